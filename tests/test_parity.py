"""The trainer computes what vLLM sampled from, by the same ids: before and after steps whose weights it was sent.

pytest -s --log-cli-level=INFO tests/test_parity.py      # says how far they are apart
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch

from lego.engine.vllm import VllmServer
from lego.engine.vllm_client import VllmEngine
from lego.learn.optimizer import AdamW
from lego.learn.packing import PADDING
from lego.learn.titan import Policy
from lego.learn.titan_cpu import causal_convolution
from lego.learn.weight_files import Replaced
from lego.records import Floats, Generation, Ids, Sampling
from tests.learn import policies
from tests.tiny_engine import one_engine, write_served

log = logging.getLogger(__name__)

CONVERSATIONS = ((1, 30), (150, 40), (40, 24), (7, 60), (260, 40), (64, 16))
"""Tokens of the first prompt and of each answer."""
TURNS = 3


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Conversations one after the other, as the engine had them."""

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    sampled_S: torch.Tensor
    """Places of sampled tokens."""
    logprobs_S: Floats
    routing_TLK: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far trainer and engine are apart over sampled tokens."""

    pearson: float
    """Of log-probabilities or of probabilities, whichever is lower."""
    k3: float
    largest: float
    mean: float


@dataclass(frozen=True, kw_only=True)
class Found:
    """Trainer against engine with one version of the weights."""

    replayed: Distance
    live: Distance
    """The same with the trainer's own routes."""
    agreement: float
    """Share of replayed rows that the trainer would have chosen."""
    regret: float
    """By how much a replayed expert's score is at most below that of the trainer's choice."""


async def converse(engine: VllmEngine, seed: int, prompt: int, answer: int) -> list[tuple[int, Ids, Generation]]:
    """The tokens said before each turn, the turn's whole prompt and its answer."""
    rng = np.random.default_rng(seed)
    ids: Ids = np.zeros(0, np.int32)
    turns = []
    for turn in range(TURNS):
        said = len(ids)
        ids = np.concatenate([ids, rng.integers(0, 256, 9 if turn else prompt).astype(np.int32)])
        sampling = Sampling(max_tokens=answer, seed=seed)
        got = await engine.generate(ids, sampling, session=str(seed), routing_start=max(said - 1, 0))
        turns.append((said, ids, got))
        ids = np.concatenate([ids, got.output_ids])
    return turns


async def sample(engine: VllmEngine, seed: int) -> Packed:
    """Conversations of several lengths, held at once."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(converse(engine, seed + i, *sizes)) for i, sizes in enumerate(CONVERSATIONS)]
    return pack([task.result() for task in tasks])


def pack(conversations: Sequence[list[tuple[int, Ids, Generation]]]) -> Packed:
    whole = [np.concatenate([turns[-1][1], turns[-1][2].output_ids]).astype(np.int64) for turns in conversations]
    starts = [0, *accumulate(map(len, whole))]
    turns = [(start, ids, got) for start, c in zip(starts, conversations, strict=False) for _, ids, got in c]
    places = [start + len(ids) + np.arange(len(got.output_ids)) for start, ids, got in turns]
    return Packed(
        ids_T=torch.from_numpy(np.concatenate(whole)),
        positions_T=torch.cat([torch.arange(len(ids)) for ids in whole]),
        sampled_S=torch.from_numpy(np.concatenate(places)),
        logprobs_S=np.concatenate([got.logprobs for _, _, got in turns]),
        routing_TLK=routing(conversations),
    )


def routing(conversations: Sequence[list[tuple[int, Ids, Generation]]]) -> torch.Tensor | None:
    """The rows of all turns; a conversation's last token, which the engine did not process, has none."""
    rows = []
    for turns in conversations:
        for _, _, got in turns:
            if got.routing is None:
                return None
            rows.append(got.routing.astype(np.int64))
        rows.append(np.full_like(rows[-1][:1], PADDING))
    return torch.from_numpy(np.concatenate(rows))


@contextmanager
def computed(policy: Policy, packed: Packed, routing_TLK: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """The trainer's log-probabilities [S] of the sampled tokens, as long as their gradients may be asked for."""
    yield policies.logprobs(policy, packed.ids_T, packed.positions_T, routing_TLK)[packed.sampled_S - 1]
    policy.replay.close(packed.positions_T)


def distance(policy: Policy, packed: Packed, routing_TLK: torch.Tensor | None) -> Distance:
    with torch.no_grad(), computed(policy, packed, routing_TLK) as logprobs_S:
        ours, theirs = logprobs_S.double().numpy(), packed.logprobs_S.astype(np.float64)
    ratios = ours - theirs
    return Distance(
        pearson=float(min(np.corrcoef(ours, theirs)[0, 1], np.corrcoef(np.exp(ours), np.exp(theirs))[0, 1])),
        k3=float((np.expm1(ratios) - ratios).mean()),
        largest=float(np.abs(ratios).max()),
        mean=float(np.abs(ratios).mean()),
    )


def look(policy: Policy, packed: Packed) -> Found:
    """Replays the engine's routes and watches what the routers would have chosen."""
    regrets, choose = [torch.zeros(1)], policy.replay.choose

    def watch(layer: int, scores_TE: torch.Tensor) -> torch.Tensor:
        ids_TK = choose(layer, scores_TE)
        own_T = scores_TE.topk(ids_TK.shape[-1], -1).values.amin(-1)
        regrets.append(own_T - scores_TE.gather(-1, ids_TK).amin(-1))
        return ids_TK

    policy.replay.choose = watch
    replayed = distance(policy, packed, packed.routing_TLK)
    del policy.replay.choose
    all_regrets = torch.cat(regrets)
    found = Found(
        replayed=replayed,
        live=distance(policy, packed, None),
        agreement=(all_regrets <= 0).double().mean().item(),
        regret=all_regrets.max().item(),
    )
    log.info("%s", found)
    return found


def train(policy: Policy, packed: Packed) -> None:
    """Three optimizer steps."""
    optimizer = AdamW(policy, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    weights_S = torch.from_numpy(np.random.default_rng(1).standard_normal(len(packed.sampled_S)).astype(np.float32))
    for _ in range(3):
        with computed(policy, packed, packed.routing_TLK) as logprobs_S:
            (logprobs_S * weights_S).mean().backward()
        policy.clip_gradients(1.0)
        optimizer.step()


async def before_and_after(engine: VllmEngine, policy: Policy, dtype: torch.dtype, scratch: Path) -> list[Found]:
    """With the weights of the folder, and with those of three steps later, pushed as a run pushes them."""
    stop_ids, engine.model = engine.model.stop_ids, replace(engine.model, stop_ids=())
    packed = await sample(engine, 100)
    before = look(policy, packed)
    train(policy, packed)
    assert distance(policy, packed, packed.routing_TLK).largest > 0.5, "old weights would pass for new ones"
    await engine.update(Replaced(scratch, policy.weights.forms(dtype)).write(1, policy.weights.held()), 1)
    after = look(policy, await sample(engine, 200))
    engine.model = replace(engine.model, stop_ids=stop_ids)
    return [before, after]


def test_the_trainers_convolution_rounds_once_as_the_engines_does():
    rng = torch.Generator().manual_seed(0)
    x_BLD, weight_D1K = (torch.randn(shape, generator=rng).bfloat16() for shape in ((1, 30, 8), (8, 1, 4)))
    runs = [(0, 2, 10), (20, 1, 10)]
    exact = causal_convolution(x_BLD.float(), weight_D1K.float(), runs)
    assert torch.equal(causal_convolution(x_BLD, weight_D1K, runs), exact.bfloat16())


async def test_float32_moe_agrees_to_1e_4_and_on_every_route(vllm_engine: VllmEngine, tiny_model: Path, tmp_path: Path):
    found = await before_and_after(vllm_engine, policies.policy(tiny_model), torch.float32, tmp_path)
    await vllm_engine.update(tiny_model / "model.safetensors", 0)
    for each in found:
        assert each.replayed.largest < 1e-4 and each.live.largest < 1e-4
        assert each.regret < 1e-5


async def test_float32_dense_agrees_to_1e_4(tmp_path: Path):
    folder = write_served(tmp_path / "model", "qwen3")
    async with one_engine(VllmServer(dtype="float32", kv_cache_mib=64), folder, tmp_path) as engine:
        found = await before_and_after(engine, policies.policy(folder), torch.float32, tmp_path)
    assert max(each.replayed.largest for each in found) < 1e-4


@pytest.mark.parametrize(("family", "k3"), [("qwen3_moe", 5e-4), ("qwen3_5_moe_text", 1e-3)])
async def test_bfloat16_moe_agrees_as_far_as_its_rounding_goes_because_routes_are_replayed(
    family: str, k3: float, tmp_path: Path
):
    folder = write_served(tmp_path / "model", family)
    policy = policies.policy(folder, dtype="bfloat16")
    async with one_engine(VllmServer(dtype="bfloat16", kv_cache_mib=64), folder, tmp_path) as engine:
        first = await converse(engine, 300, 40, 30)
        found = await before_and_after(engine, policy, torch.bfloat16, tmp_path)
        await engine.update(folder / "model.safetensors", 2)
        again = await converse(engine, 300, 40, 30)
    for (_, _, loaded), (_, _, updated) in zip(first, again, strict=True):
        np.testing.assert_array_equal(loaded.logprobs, updated.logprobs)
        np.testing.assert_array_equal(loaded.routing, updated.routing)
    for each in found:
        assert each.replayed.pearson >= 0.999 and each.replayed.k3 < k3
        assert each.live.k3 > 2 * each.replayed.k3 and each.live.largest > 2 * each.replayed.largest
        assert each.agreement > 0.95 and each.regret < 0.15
