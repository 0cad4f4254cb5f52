"""What a harness costs beside the model: CPU and wall seconds of a whole scripted trial in a box, and its prompt.

`python tools/bench/harness_cost.py [--json]`: each known harness views a file, edits it and says it is done.
"""

import argparse
import asyncio
import json
import logging
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from harnesses.base import Harness
from harnesses.codex import Codex
from harnesses.fetch import DEFAULT_CACHE, FetchError, fetch
from harnesses.known import KNOWN
from harnesses.pi import Pi
from harnesses.rehearsal import Say, Shell, Stage
from sandbox.base import BoxSpec, SandboxError
from sandbox.bubble import Bubblewrap

SHORT = "You fix bugs."
TASK = "mathutils.py:2 test_clamp fails."
SCRIPT = (Shell("nl -ba mathutils.py | sed -n '1,+12p'"), Shell("sed -i '2s/>/</' mathutils.py"), Say("Done."))
SOURCE = "def clamp(x, low):\n    return low if x > low else x\n"
VARIANTS: dict[str, Harness] = {
    "codex, short instructions": Codex(instructions=SHORT),
    "codex": Codex(),
    "codex, not lean": Codex(lean=False),
    "pi, short instructions": Pi(instructions=SHORT, tools=("bash",)),
    "pi": Pi(),
    "pi, Responses": Pi(api="openai-responses"),
    "pi, Messages": Pi(api="anthropic-messages"),
}
DEFAULT, RIVAL = "codex, short instructions", "pi, short instructions"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One harness, medians over the runs; the empty box is taken off."""

    harness: str
    format: str
    cpu_s: float
    wall_s: float
    prompt_chars: int
    calls: int


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


async def _empty_box(stage: Stage) -> tuple[float, float]:
    """CPU and wall seconds of a box that runs `true`."""
    cpu, wall = _children_s(), time.monotonic()
    async with stage.sandbox.open(BoxSpec(base=stage.base)) as box:
        await box.exec(("true",))
    return _children_s() - cpu, time.monotonic() - wall


async def _cost(label: str, stage: Stage, runs: int) -> Cost:
    cpus, walls, requests = [], [], []
    for _ in range(runs + 1):
        box_cpu, box_wall = await _empty_box(stage)
        cpu, wall = _children_s(), time.monotonic()
        performance = await stage.perform(VARIANTS[label], SCRIPT, TASK)
        cpus.append(_children_s() - cpu - box_cpu)
        walls.append(time.monotonic() - wall - box_wall)
        requests = performance.requests
        if performance.end.error or not performance.changes:
            raise SystemExit(f"{label} did not finish its script: {performance.end.error or performance.result}")
    # The first run reads the program from disk: not what a trial among thousands pays.
    return Cost(
        harness=label,
        format=requests[0].path,
        cpu_s=round(statistics.median(cpus[1:]), 3),
        wall_s=round(statistics.median(walls[1:]), 3),
        prompt_chars=requests[0].prompt_chars,
        calls=len(requests),
    )


async def _measure(cache: Path, base: Path, runs: int) -> list[Cost]:
    stage = Stage(sandbox=Bubblewrap(), cache=cache, base=base)
    return [await _cost(label, stage, runs) for label in VARIANTS]


def _report(costs: list[Cost]) -> dict[str, object]:
    """The default harness against its rival, in the form that all benchmarks share."""
    cpu_s = {cost.harness: cost.cpu_s for cost in costs}
    ratio = cpu_s[DEFAULT] / cpu_s[RIVAL]
    head = {"name": "harness_cost", "value": cpu_s[DEFAULT], "baseline": cpu_s[RIVAL], "ratio": round(ratio, 3)}
    return {**head, "bar": 1.0, "ok": ratio <= 1.0, "costs": [asdict(cost) for cost in costs]}


def _print_table(costs: list[Cost]) -> None:
    print(f"{'harness':<26} {'format':<22} {'CPU s':>6} {'wall s':>7} {'prompt chars':>13} {'calls':>6}")
    for cost in costs:
        numbers = f"{cost.cpu_s:>6.2f} {cost.wall_s:>7.2f} {cost.prompt_chars:>13} {cost.calls:>6}"
        print(f"{cost.harness:<26} {cost.format:<22} {numbers}")


def main() -> int:
    parser = argparse.ArgumentParser(description="What each harness costs in a scripted trial.")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        for harness in KNOWN.values():
            fetch(harness(), options.cache)
        with tempfile.TemporaryDirectory() as base:
            Path(base, "mathutils.py").write_text(SOURCE)
            costs = asyncio.run(_measure(options.cache, Path(base), options.runs))
    except (FetchError, SandboxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(_report(costs)))
    else:
        _print_table(costs)
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    sys.exit(main())
