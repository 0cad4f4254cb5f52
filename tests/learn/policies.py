"""Real torchtitan policies in this process, for tests: one rank, gloo, no port."""

import functools

import torch

from lego.learn import titan


@functools.cache
def joined():
    """This process as the only rank."""
    torch.set_num_threads(1)  # on a busy machine the threads of a tiny operation mostly wait for each other
    return titan.join_alone()


def policy(folder, **layout):
    """A policy of the model folder."""
    return titan.Policy(folder, titan.Layout(max_length=512, **layout), joined())


def critic(folder, frozen=None):
    """A critic of the model folder."""
    return titan.Critic(folder, titan.Layout(max_length=512), joined(), frozen)


def logprobs(made, ids, positions, routing=None):
    """Log-probabilities of each next id; `routing` defaults to the live router."""
    ids, positions = torch.as_tensor(ids), torch.as_tensor(positions)
    replay = made.replay
    if routing is None:
        routing = torch.full((len(ids), replay.layers, replay.top_k), -1)
    replay.open(positions, torch.as_tensor(routing))
    rows = torch.arange(len(ids) - 1)
    out, _ = made.forward(ids, positions, rows, labels_R=ids[1:], temperature_R=torch.ones(len(rows)))
    return out


def recorded_routes(made, ids, positions):
    """(log-probabilities, the experts [T, L, K] that the live router chose)."""
    chosen, choose = {}, made.replay.choose

    def watch(layer, scores):
        chosen[layer] = choose(layer, scores)
        return chosen[layer]

    made.replay.choose = watch
    out = logprobs(made, ids, positions)
    made.replay.close(torch.as_tensor(positions))
    del made.replay.choose
    return out, torch.stack([chosen[i] for i in range(made.replay.layers)], 1)
