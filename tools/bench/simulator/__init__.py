"""A training run on a virtual clock: our own collector between a scripted engine, scripted trials and trainer."""
