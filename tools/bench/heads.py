"""What log-probabilities of tokens cost: peak memory and CPU seconds of the head, forward and backward.

`python tools/bench/heads.py [--json]`: a vocabulary of 151,936 words, hidden states of 256 numbers, float32. Ours also
gives entropies and takes a temperature. Baselines: the plain way, all logits at once, and torch's own chunked cross
entropy of a linear layer. Each runs in a fresh process, whose peak resident set tells the memory.
"""

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from lego.learn.heads import chunked_logprobs

WORDS, WIDTH = 151_936, 256
ROWS, LONG = 2048, 4096
REPEATS = 2

Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return chunked_logprobs(hidden, weight, labels, torch.ones(len(labels)))[0]


def _plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(hidden @ weight.t(), -1).gather(-1, labels[:, None])[:, 0]


def _torch(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    chunks = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=1024, chunking_method=None)
    return -F.linear_cross_entropy(hidden, weight, labels, reduction="none", options=chunks)


# Ours computes the logits twice, since a loss over sequences is not known in the forward pass, and entropies besides.
CPU_BAR = 1.5

HEADS: dict[str, Head] = {"ours": _ours, "plain": _plain, "torch": _torch}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one forward and backward pass; the memory is what came on top of hidden states and weight."""

    peak_mib: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cost beside its baseline; `ok` where their ratio is at most the bar."""

    name: str
    value: float
    baseline: float
    ratio: float
    bar: float
    ok: bool


def _peak_mib() -> float:
    # Not getrusage's: that begins with what the process that started this one held.
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def measure(head: Head, rows: int) -> Cost:
    """In this process, which must be a fresh one."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, WIDTH), torch.randn(WORDS, WIDTH) / WIDTH**0.5
    labels = torch.randint(0, WORDS, (rows,))
    before, seconds = _peak_mib(), []
    for _ in range(REPEATS):
        inputs = hidden.requires_grad_(), weight.requires_grad_()
        start = time.process_time()
        head(*inputs, labels).sum().backward()
        seconds.append(time.process_time() - start)
        hidden.grad = weight.grad = None
    return Cost(peak_mib=round(_peak_mib() - before, 1), cpu_s=round(min(seconds), 2))


@functools.cache
def _measured(head: str, rows: int) -> Cost:
    child = subprocess.run([sys.executable, __file__, "--measure", head, str(rows)], stdout=subprocess.PIPE, check=True)
    return Cost(**json.loads(child.stdout))


def _beside(name: str, value: float, baseline: float, bar: float) -> Finding:
    ratio = round(value / baseline, 3)
    return Finding(name=name, value=value, baseline=baseline, ratio=ratio, bar=bar, ok=ratio <= bar)


def memory() -> list[Finding]:
    """Peak memory against the plain way, and against half as many rows."""
    ours, plain, long = _measured("ours", ROWS), _measured("plain", ROWS), _measured("ours", LONG)
    return [
        _beside(f"head peak MiB, plain way, {ROWS} rows", ours.peak_mib, plain.peak_mib, 0.25),
        _beside(f"head peak MiB, {LONG} rows against {ROWS}", long.peak_mib, ours.peak_mib, 1.1),
    ]


def findings() -> list[Finding]:
    """All of them; takes about a minute on two cores."""
    ours, plain, built_in = (_measured(head, ROWS) for head in HEADS)
    long, long_built_in = (_measured(head, LONG) for head in ("ours", "torch"))
    return [
        *memory(),
        _beside(f"head CPU s, plain way, {ROWS} rows", ours.cpu_s, plain.cpu_s, CPU_BAR),
        _beside(f"head peak MiB, torch's own, {ROWS} rows", ours.peak_mib, built_in.peak_mib, 1.0),
        _beside(f"head peak MiB, torch's own, {LONG} rows", long.peak_mib, long_built_in.peak_mib, 1.0),
        _beside(f"head CPU s, torch's own, {LONG} rows", long.cpu_s, long_built_in.cpu_s, CPU_BAR),
    ]


def show(found: Sequence[Finding], as_json: bool) -> None:
    """Prints findings: one JSON object a line, or a table."""
    if as_json:
        print("\n".join(json.dumps(asdict(f)) for f in found))
        return
    print(f"{'':<44} {'ours':>9} {'baseline':>9} {'ratio':>7} {'bar':>6}")
    for f in found:
        print(f"{f.name:<44} {f.value:>9.1f} {f.baseline:>9.1f} {f.ratio:>7.2f} {f.bar:>6.2f}{'' if f.ok else '  NO'}")


def main() -> int:
    parser = argparse.ArgumentParser(description="What log-probabilities of tokens cost.")
    parser.add_argument("--json", action="store_true", help="one object a line instead of a table")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(asdict(measure(HEADS[options.measure[0]], int(options.measure[1])))))
        return 0
    show(findings(), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
