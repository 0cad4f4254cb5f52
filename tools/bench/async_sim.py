"""What running ahead of the trainer brings: the real collector in simulated runs, on a virtual clock.

`python tools/bench/async_sim.py [--json] [--plot docs/async.svg] [--trials 1000000]`: compares lockstep with windows of
several depths, with and without partial rollout, over-sampling, deadlines and filters; then from 8 to 4,096 concurrent
trials. Baseline: lockstep, same trials, same engine, same trainer. Then it runs random settings and asserts for each
trained trial that its oldest token keeps to the bound of docs/async.md, and measures the driver's own CPU time for a
trial. What is assumed of trials, engine and trainer lies in `simulator/` and is told in docs/async.md.
"""

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from simulator.engine import Capacity
from simulator.plot import Bar, svg
from simulator.world import Patience, Result, Setting, Window, random_setting, simulate

BAR, COST_BAR = 2.35, 1.5
DEPTH = 4
"""Staleness of the setting that is held against the bar."""
SIZES = (8, 32, 128, 512, 1024, 4096)
GROUP, CONCURRENT, STEPS, SWEEP_STEPS = 8, 256, 40, 12
COST_TRIALS, COST_TRIES = 16_384, 5
GC_FIRST = 20_000
"""Objects before the garbage collector looks. By default it looks after 700, and at all objects of all trials often."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting in numbers; `ratio` is its throughput by that of its lockstep run."""

    name: str
    per_hour: float
    ratio: float
    engine_idle: float
    trainer_idle: float
    unused: float
    """Share of the started trials that were not trained."""
    staleness: tuple[float, ...]
    """Shares of trained trials by versions of age."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Microseconds of the driver's CPU time for a trial, the simulated parts' own included."""

    concurrent: int
    us: float


@dataclass(frozen=True, kw_only=True)
class Bound:
    """How many trials ran in random settings, and were trained within the bound; one outside stops the benchmark."""

    trials: int
    trained: int
    settings: int


def run(name: str, staleness: int = 0, *, concurrent: int = CONCURRENT, **changes: Any) -> Setting:
    """A step takes as many trials as run at a time; there is a replica for every 256 of them."""
    window = Window(groups_per_step=concurrent // GROUP, staleness=staleness, concurrency=concurrent)
    capacity = Capacity(replicas=max(1, concurrent // 256))
    return replace(Setting(name=name, window=window, capacity=capacity, group_size=GROUP, steps=STEPS), **changes)


def _with(setting: Setting, **changes: int) -> Setting:
    return replace(setting, window=replace(setting.window, **changes))


def _one_answer(name: str, staleness: int) -> Setting:
    """Trials that think once and use no tool: the longest answers there are."""
    return run(name, staleness, turns=0.0, tools_s=0.0)


def families() -> list[list[Setting]]:
    """Settings that are compared; the first of each family is its lockstep baseline."""
    lockstep = run("lockstep")
    flat = [_with(run(name, depth, drop_flat=True), refill=16) for name, depth in (("lockstep", 0), ("4 ahead", DEPTH))]
    light = replace(lockstep.shape, stray=0.0)
    return [
        [
            lockstep,
            _with(run("lockstep, 8 groups extra"), oversample=8),
            run("lockstep, groups cut at 1800 s", patience=Patience(group_s=1800.0)),
            *(run(f"{depth} ahead", depth) for depth in (1, 2, DEPTH, 8)),
            run("4 ahead, update waits for answers", DEPTH, partial=False),
            run("4 ahead, groups cut at 1800 s", DEPTH, patience=Patience(group_s=1800.0)),
        ],
        [replace(setting, name=f"{setting.name}, flat groups replaced") for setting in flat],
        [
            _one_answer("lockstep, one answer", 0),
            _one_answer("4 ahead, one answer", DEPTH),
            replace(_one_answer("4 ahead, one answer, update waits", DEPTH), partial=False),
        ],
        [run(f"{name}, no strays", depth, shape=light) for name, depth in (("lockstep", 0), ("4 ahead", DEPTH))],
    ]


def row(result: Result, baseline: Result) -> Row:
    ages = range(max(result.staleness) + 1)
    return Row(
        name=result.setting.name,
        per_hour=round(result.per_hour, 1),
        ratio=round(result.per_hour / baseline.per_hour, 2),
        engine_idle=round(result.engine_idle, 3),
        trainer_idle=round(result.trainer_idle, 3),
        unused=round(1 - result.trained / result.started, 3),
        staleness=tuple(round(result.staleness[age] / result.trained, 3) for age in ages),
    )


def compared(family: Sequence[Setting]) -> list[Row]:
    results = [simulate(setting) for setting in family]
    return [row(result, results[0]) for result in results]


def swept(depth: int) -> dict[int, float]:
    """Trained trials an hour by concurrent trials."""
    settings = {size: run("", depth, concurrent=size, steps=SWEEP_STEPS) for size in SIZES}
    return {size: round(simulate(setting).per_hour, 1) for size, setting in settings.items()}


def bound(trials: int) -> Bound:
    """Random settings until so many trials ran; `simulate` asserts the bound for each that is trained."""
    started = trained = settings = 0
    while started < trials:
        result = simulate(random_setting(random.Random(settings)))
        started, trained, settings = started + result.started, trained + result.trained, settings + 1
    return Bound(trials=started, trained=trained, settings=settings)


def cost(concurrent: int) -> Cost:
    """The least of several tries. Steps are the same for all sizes: only what runs at a time differs."""
    window = Window(groups_per_step=SIZES[-1] // GROUP, staleness=1, concurrency=concurrent)
    steps = COST_TRIALS // SIZES[-1]
    setting = Setting(name="", window=window, steps=steps, turns=0.0, tools_s=0.0, capacity=Capacity(slots=SIZES[-1]))
    seconds = []
    for _ in range(COST_TRIES):
        start = time.process_time()
        result = simulate(setting)
        seconds.append((time.process_time() - start) / result.started)
    return Cost(concurrent=concurrent, us=round(1e6 * min(seconds), 1))


def report(
    rows: Sequence[Row], sweep: Mapping[str, Mapping[int, float]], costs: Sequence[Cost], held: Bound
) -> dict[str, object]:
    """The setting that is held against the bar, and whether all bars hold."""
    lockstep, ahead = rows[0], next(row for row in rows if row.name == f"{DEPTH} ahead")
    growth = costs[-1].us / costs[0].us
    return {
        "name": f"simulated trained trials an hour, {DEPTH} steps ahead",
        "value": ahead.per_hour,
        "baseline": lockstep.per_hour,
        "ratio": ahead.ratio,
        "bar": BAR,
        "ok": ahead.ratio >= BAR and growth <= COST_BAR,
        "settings": [asdict(row) for row in rows],
        "by_concurrency": sweep,
        "bound": asdict(held),
        "cost": [asdict(cost) for cost in costs],
        "cost_growth": round(growth, 2),
        "cost_bar": COST_BAR,
    }


def table(rows: Sequence[Row], sweep: Mapping[str, Mapping[int, float]], costs: Sequence[Cost], held: Bound) -> None:
    print(f"{CONCURRENT} trials at a time, {CONCURRENT} a step, {STEPS} steps; idle and unused as shares")
    print(f"{'':<34} {'trials/h':>8} {'ratio':>6} {'engine':>7} {'trainer':>7} {'unused':>6}  staleness 0, 1, 2, …")
    for r in rows:
        numbers = f"{r.per_hour:>8.0f} {r.ratio:>6.2f} {r.engine_idle:>7.2f} {r.trainer_idle:>7.2f} {r.unused:>6.2f}"
        print(f"{r.name:<34} {numbers}  {' '.join(f'{share:.2f}' for share in r.staleness)}")
    print(f"\n{'concurrent trials':<34} " + " ".join(f"{size:>8}" for size in SIZES))
    for name, line in sweep.items():
        print(f"{name + ', trials/h':<34} " + " ".join(f"{line[size]:>8.0f}" for size in SIZES))
    print(f"{'driver CPU µs a trial':<34} " + " ".join(f"{each.us:>8.1f}" for each in costs))
    print(f"CPU time grows {costs[-1].us / costs[0].us:.2f} times, bar {COST_BAR}")
    print(f"{held.trials:,} trials in {held.settings} random settings, {held.trained:,} trained, all within the bound")


def picture(rows: Sequence[Row], sweep: Mapping[str, Mapping[int, float]]) -> str:
    bars = [
        Bar(name=row.name, ratio=row.ratio, note=f"idle: engine {row.engine_idle:.0%}, trainer {row.trainer_idle:.0%}")
        for row in rows
    ]
    depths = {
        f"{depth} ahead": row.staleness for depth in (1, DEPTH, 8) for row in rows if row.name == f"{depth} ahead"
    }
    return svg("Trained trials an hour, by those of lockstep (tools/bench/async_sim.py)", bars, depths, sweep)


def main() -> int:
    parser = argparse.ArgumentParser(description="What running ahead of the trainer brings, simulated.")
    parser.add_argument("--json", action="store_true", help="one object instead of tables")
    parser.add_argument("--plot", type=Path, help="where to write a picture")
    parser.add_argument("--trials", type=int, default=1_000_000, help="trials in random settings, to test the bound")
    options = parser.parse_args()
    gc.set_threshold(GC_FIRST)
    rows = [row for family in families() for row in compared(family)]
    sweep = {"lockstep": swept(0), f"{DEPTH} ahead": swept(DEPTH)}
    costs, held = [cost(size) for size in SIZES], bound(options.trials)
    if options.plot:
        options.plot.write_text(picture(rows, sweep))
    if options.json:
        print(json.dumps(report(rows, sweep, costs, held)))
    else:
        table(rows, sweep, costs, held)
    return 0


if __name__ == "__main__":
    sys.exit(main())
