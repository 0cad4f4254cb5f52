"""What it costs to bring new weights from a trainer to an engine on the same machine: milliseconds for 500 MB.

`python tools/bench/weights.py [--json]`: tensors of a mixture of experts, bfloat16, one thread. The way has two parts:
the trainer copies its tensors into the shared file; the engine copies them out, which is vLLM's own loading and here a
plain copy. The first row ends where the file is whole, checked and readable in another process, the second where that
process has copied all of it into tensors of its own. Baseline: the same tensors copied once, and twice, into memory
that was used before. The first two exports of a run are not counted: they fill fresh memory, at ten times the price.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from heads import Finding, show
from safetensors.torch import save_file

from lego.engine.transfer import WeightsFile
from lego.learn.weight_files import InPlace

SHARED_MEMORY = Path("/dev/shm")
LAYERS, EXPERTS, WIDTH, HIDDEN, WORDS = 10, 16, 1536, 170, 20_480
ROUNDS = 15
BAR, SAVE_BAR = 2.0, 0.5

Tensors = Mapping[str, torch.Tensor]
Way = Callable[[], object]


def shapes() -> dict[str, tuple[int, int]]:
    """Of the policy's tensors by name."""
    found = {"embed": (WORDS, WIDTH), "norm": (1, WIDTH)}
    for layer in range(LAYERS):
        found |= {f"{layer}.{part}_proj": (WIDTH, WIDTH) for part in "qkvo"} | {f"{layer}.norm": (1, WIDTH)}
        for expert in range(EXPERTS):
            found |= {f"{layer}.experts.{expert}.{part}_proj": (HIDDEN, WIDTH) for part in ("gate", "up", "down")}
    return found


class Reader:
    """Another process that reads weights files, as an engine's worker does."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--read"]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdin and self._child.stdout
        self._to, self._from = self._child.stdin, self._child.stdout

    def read(self, path: Path, version: int, copies: bool) -> None:
        """Returns when it has the file: checked and mapped, or copied."""
        print(path, version, int(copies), file=self._to, flush=True)
        if self._from.readline() != "read\n":
            raise RuntimeError("the reader died")

    def close(self) -> None:
        """Waits for its end."""
        self._to.close()
        self._child.wait()


def serve() -> None:
    """The reader's side: a path, a version and whether to copy, a line each."""
    torch.set_num_threads(1)
    own: dict[str, torch.Tensor] = {}
    for line in sys.stdin:
        path, version, copies = line.split()
        with WeightsFile(Path(path), int(version)) as file:
            for name, tensor in file:
                if name not in own:
                    own[name] = tensor.clone()
                if int(copies):
                    own[name].copy_(tensor)
                else:
                    tensor.view(-1)[[0, -1]].sum()  # readable to its end
        print("read", flush=True)


def ways(folder: Path, reader: Reader) -> dict[str, Way]:
    """All that is compared, each a repeatable step on the same numbers."""
    torch.manual_seed(0)
    masters = {name: torch.randn(shape) for name, shape in shapes().items()}
    narrow = {name: tensor.bfloat16() for name, tensor in masters.items()}
    ready = {name: tensor.clone() for name, tensor in narrow.items()}
    files = InPlace(folder, {name: tensor.to("meta") for name, tensor in narrow.items()})
    versions = iter(range(1, 1 << 20))

    def copied(source: Tensors) -> None:
        for name, tensor in source.items():
            ready[name].copy_(tensor)

    def passed(source: Tensors, copies: bool) -> None:
        version = next(versions)
        reader.read(files.write(version, source.items()), version, copies)

    def saved() -> None:
        path = folder / "saved.safetensors"
        save_file(dict(narrow), path)
        reader.read(path, 0, False)
        path.unlink()

    return {
        "copy": lambda: copied(narrow),
        "cast": lambda: copied(masters),
        "reach": lambda: passed(narrow, False),
        "reach cast": lambda: passed(masters, False),
        "whole way": lambda: passed(narrow, True),
        "save": saved,
    }


def milliseconds(made: Mapping[str, Way]) -> dict[str, float]:
    """The best of the rounds, in which all take turns; the first two, which allocate, are not counted."""
    spent: dict[str, list[float]] = {name: [] for name in made}
    for index in range(ROUNDS + 2):
        for name in list(made)[:: -1 if index % 2 else 1]:
            start = time.perf_counter()
            made[name]()
            spent[name].append(1000 * (time.perf_counter() - start))
    return {name: round(min(each[2:]), 1) for name, each in spent.items()}


def findings() -> list[Finding]:
    """Of shared memory; takes about a minute."""
    torch.set_num_threads(1)
    reader = Reader()
    with tempfile.TemporaryDirectory(prefix="lego-bench-", dir=SHARED_MEMORY) as folder:
        spent = milliseconds(ways(Path(folder), reader))
    reader.close()
    size = f"{2 * sum(rows * columns for rows, columns in shapes().values()) / 1e6:.0f} MB"
    return [
        beside(f"{size} to another process, one copy", spent["reach"], spent["copy"], BAR),
        beside(f"{size} and copied there, two copies", spent["whole way"], 2 * spent["copy"], BAR),
        beside(f"{size} cast from float32, one cast", spent["reach cast"], spent["cast"], BAR),
        beside(f"{size} to another process, save_file", spent["reach"], spent["save"], SAVE_BAR),
    ]


def beside(name: str, value: float, baseline: float, bar: float) -> Finding:
    """Milliseconds beside their baseline; less is better."""
    ratio = round(value / baseline, 3)
    return Finding(name=f"weights ms, {name}", value=value, baseline=baseline, ratio=ratio, bar=bar, ok=ratio <= bar)


def main() -> int:
    parser = argparse.ArgumentParser(description="What weights cost on their way from trainer to engine.")
    parser.add_argument("--json", action="store_true", help="one object a line instead of a table")
    parser.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        serve()
        return 0
    show(findings(), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
