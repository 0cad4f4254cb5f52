"""What our training step costs: beside torchtitan's own step, and with recorded routes beside the live router.

`python tools/bench/trainer.py [--json]`: a Qwen3-MoE whose head has a fifth of its active weights, as the 3B-active
models with large vocabularies have, and one packed row of uneven documents. Baseline: the same model with torchtitan's
router, head, chunked cross-entropy, clipping and optimizer on the same row, in the same process, steps taken in turn.
Rates are of CPU seconds on one thread, which a busy machine disturbs least. The learning rate is 0, so that all steps
are alike. The memory of log-probabilities is measured by `heads.py`.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from heads import Finding, memory, show

from lego.learn import hf_folder, packing, titan, titan_cpu
from lego.learn.algorithms import GSPO
from lego.learn.layout import Layout
from lego.learn.optimizer import AdamW
from lego.learn.packing import MicroBatch, RankBatch
from lego.learn.row import Row
from lego.learn.step import Actors, Plan, policy_logprobs, train_step
from lego.learn.titan_models import architecture
from lego.learn.titan_parts import Gate, LogprobLinear, ReplayRouter
from lego.records import Sample, Segment

# isort: split
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter

CONFIG = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 64,
    "hidden_size": 256,
    "mlp_only_layers": [],
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "vocab_size": 8192,
}
LAYOUT = Layout(max_length=2048)
LENGTHS = (1100, 600, 348)
SHARES = {"all tokens trained": 1.0, "30 % sampled": 0.3}
CLIP, LR, BETAS, DECAY = 1.0, 0.0, (0.9, 0.95), 0.1
ROUNDS = 7
RATE_BAR, REPLAY_BAR = 0.95, 1.03

Step = Callable[[], object]


class Plain:
    """torchtitan's own training step, as its trainer takes it, on random weights."""

    def __init__(self, folder: Path) -> None:
        self.arch = architecture(folder, LAYOUT.max_length)
        for ours, own in ((Gate, Linear), (LogprobLinear, Linear), (ReplayRouter, TokenChoiceTopKRouter)):
            for _, config, parent, name in list(self.arch.config.traverse(ours.Config)):
                setattr(parent, str(name), titan_cpu.derive(config, own.Config))
        parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
        self.arch.config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
        with torch.device("meta"):
            self.model = self.arch.config.build()
        self._parallelize(parallelism)
        self.model._skip_lm_head = True
        self.loss = ChunkedLossWrapper.Config().build()
        self.loss.set_lm_head(self.model.lm_head)
        self.optimizer = default_adamw(lr=LR, betas=BETAS, weight_decay=DECAY).build(model_parts=[self.model])

    def _parallelize(self, parallelism: ParallelismConfig) -> None:
        self.arch.family.parallelize(
            self.model,
            parallel_dims=ParallelDims.from_config(parallelism, 1),
            training=TrainingConfig(mixed_precision_param=LAYOUT.dtype),
            parallelism=parallelism,
            compile_config=CompileConfig(),
            ac_config=None,
            dump_folder="",
        )
        titan_cpu.use_sum_reduction(self.model)
        self.model.to_empty(device="cpu")
        with torch.no_grad():
            self.model.init_weights(buffer_device=None)
            for parameter in self.model.parameters():
                parameter.normal_(std=parameter.shape[-1] ** -0.5) if parameter.ndim > 1 else parameter.fill_(1)

    def save(self, path: Path) -> None:
        """Writes the weights as a model folder has them."""
        hf = self.arch.adapter.to_hf({name: p.full_tensor() for name, p in self.model.state_dict().items()})
        hf_folder.save(path, {name: tensor.contiguous() for name, tensor in hf.items()})

    def step(self, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> float:
        """One optimizer step; returns the gradient norm."""
        self.optimizer.zero_grad()
        masks = self.model.get_attention_masks(positions)
        hidden = self.model(ids, positions=positions, attention_masks=masks)
        loss, _ = self.loss(hidden, labels, (labels != IGNORE_INDEX).sum())
        loss.backward()
        norm = clip_grad_norm_(list(self.model.parameters()), CLIP, foreach=True)
        self.optimizer.step()
        return float(norm)


def part_of(share: float) -> MicroBatch:
    """The packed row, with that share of its tokens sampled: the end of each hundred, as a turn's answer."""
    rng, samples = np.random.default_rng(0), []
    for length in LENGTHS:
        mask = np.arange(length, -1, -1) % 100 < 100 * share
        mask[0] = False
        segment = Segment(
            ids_T=rng.integers(0, CONFIG["vocab_size"], length + 1).astype(np.int32),
            mask_T=mask,
            logprobs_T=np.zeros(length + 1, np.float32),
            versions_T=np.where(mask, 0, -1).astype(np.int32),
            routing_TLK=None,
            routed_T=np.zeros(length + 1, bool),
        )
        samples.append(Sample(segment=segment, advantage=float(rng.standard_normal()), weight=1.0))
    return packing.pack(samples, ranks=1, token_budget=sum(LENGTHS)).ranks[0][0]


def recorded(policy: titan.Policy, part: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
    """The row as this policy would have sampled it, without and with the experts it chose."""
    row, routes = Row.of(part, policy.device), {}
    routers = [module for module in policy.model.modules() if isinstance(module, ReplayRouter)]
    hooks = [r.register_forward_hook(lambda r, _, out: routes.update({r.layer: out[1][0]})) for r in routers]
    policy.replay.open(row.positions_T, row.routing(policy.replay))
    with torch.no_grad():
        logprobs_R, _ = policy_logprobs(policy, row)
    policy.replay.close(row.positions_T)
    for hook in hooks:
        hook.remove()
    live = replace(part, sampled_R=logprobs_R.numpy())
    routing_TLK = torch.stack([routes[layer] for layer in range(policy.replay.layers)], 1)
    return live, replace(live, routing_TLK=routing_TLK.numpy().astype(np.int16))


def plain_step(plain: Plain, part: MicroBatch) -> Step:
    """torchtitan's step on a row."""
    ids, positions = (torch.from_numpy(a).long()[None] for a in (part.ids_T, part.positions_T))
    labels = torch.full_like(ids, IGNORE_INDEX)
    rows, trained = (torch.from_numpy(a).long() for a in (part.rows_R, part.labels_R))
    labels[0, rows] = trained
    return lambda: plain.step(ids, positions, labels)


def our_step(actors: Actors, part: MicroBatch) -> Step:
    """Our step on a row."""
    batch = RankBatch(parts=(part,), trained=len(part.rows_R), weight=len(LENGTHS))
    plan = Plan(algorithm=GSPO(), grad_clip=CLIP)
    return lambda: train_step(actors, batch, plan)


def steps(folder: Path) -> dict[str, Step]:
    """All that is compared, on the same weights."""
    device = titan.join_alone()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    plain = Plain(folder)
    plain.save(folder / "model.safetensors")
    policy = titan.Policy(folder, LAYOUT, device)
    actors = Actors(policy=policy, optimizer=AdamW(policy, lr=LR, betas=BETAS, weight_decay=DECAY))
    made: dict[str, Step] = {}
    for name, share in SHARES.items():
        live, replayed = recorded(policy, part_of(share))
        made |= {f"plain, {name}": plain_step(plain, live), f"ours, {name}": our_step(actors, replayed)}
    return made | {"live": our_step(actors, live)}


def cpu_seconds(made: Mapping[str, Step]) -> dict[str, list[float]]:
    """Of each step in each round, the first not counted; every other round goes backwards."""
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for index in range(ROUNDS + 1):
        for name in list(made)[:: -1 if index % 2 else 1]:
            start = time.process_time()
            made[name]()
            seconds[name].append(time.process_time() - start)
    return {name: spent[1:] for name, spent in seconds.items()}


def ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Median of the rounds' ratios."""
    return round(statistics.median(a / b for a, b in zip(of, to, strict=True)), 3)


def rate(name: str, ours: Sequence[float], plain: Sequence[float]) -> Finding:
    """Tokens a CPU second beside torchtitan's; more is better."""
    value, baseline = (round(sum(LENGTHS) / statistics.median(s), 1) for s in (ours, plain))
    share = ratio(plain, ours)
    return Finding(name=name, value=value, baseline=baseline, ratio=share, bar=RATE_BAR, ok=share >= RATE_BAR)


def replay_cost(replayed: Sequence[float], live: Sequence[float]) -> Finding:
    """CPU seconds of a step with recorded routes beside one with the live router's; less is better."""
    value, baseline = (round(statistics.median(s), 3) for s in (replayed, live))
    share = ratio(replayed, live)
    name = "step CPU s, replayed routes against live"
    return Finding(name=name, value=value, baseline=baseline, ratio=share, bar=REPLAY_BAR, ok=share <= REPLAY_BAR)


def findings() -> list[Finding]:
    """Of the step; takes about two minutes on an idle core."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        spent = cpu_seconds(steps(Path(folder)))
    found = [rate(f"tokens a CPU s, {name}", spent[f"ours, {name}"], spent[f"plain, {name}"]) for name in SHARES]
    return [*found, replay_cost(spent["ours, 30 % sampled"], spent["live"])]


def main() -> int:
    parser = argparse.ArgumentParser(description="What a training step costs.")
    parser.add_argument("--json", action="store_true", help="one object a line instead of a table")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # torch's, of operators that are not tuned for CPU
    show([*findings(), *memory()], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
