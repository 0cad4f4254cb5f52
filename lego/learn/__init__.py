"""The trainer: packing, losses, routing replay, and the ranks that run torchtitan."""
