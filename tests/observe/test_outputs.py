"""Numbers of a step, for the curves."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from lego.observe.account import Account
from lego.observe.interval import Rate
from lego.observe.memory import PeakMemory
from lego.observe.outputs import Outputs, _metrics
from lego.observe.store import open_run
from lego.observe.terminal import View
from lego.records import Fidelity, Outcome
from lego.rollout.collect import solved_and_asked
from lego.rollout.credit import Rules, credit
from tests.factories import trajectory

RULES = Rules(advantages=lambda groups: groups)


def metrics(*trajectories):
    rate = Rate(*solved_and_asked(trajectories))
    scored = [t for t in trajectories if t.reward is not None]
    return _metrics(trajectories, rate, credit([scored], RULES), None, {})


def of(harness: str, reward: float | None, turns: int, **more):
    made = trajectory(f"{harness}/x", reward, **more)
    return replace(made, harness=harness, fidelity=replace(made.fidelity, turns=turns))


def test_each_harness_has_its_own_rates_turns_shares_and_outcomes():
    found = metrics(
        of("codex", 1.0, 4),
        of("codex", 0.0, 2),
        of("pi", 1.0, 10, excluded=2),
        of("pi", None, 1, outcome=Outcome.HARNESS_ERROR),
    )
    own = {name: value for name, value in found.items() if name.startswith("harness/")}
    assert own == {
        "harness/codex/solve_rate": 0.5,
        "harness/codex/trials": 2,
        "harness/codex/turns": 3.0,
        "harness/codex/trainable_share": 1.0,
        "harness/codex/outcome/solved": 1,
        "harness/codex/outcome/failed": 1,
        "harness/pi/solve_rate": 1.0,
        "harness/pi/trials": 2,
        "harness/pi/turns": 5.5,
        "harness/pi/trainable_share": pytest.approx(4 / 6),
        "harness/pi/outcome/solved": 1,
        "harness/pi/outcome/harness_error": 1,
    }
    assert found["rollout/solve_rate"] == pytest.approx(2 / 3)


def test_a_harness_of_which_no_trial_came_to_a_result_has_no_rate():
    found = metrics(of("pi", None, 0, outcome=Outcome.HARNESS_ERROR), of("codex", 1.0, 1))
    assert "harness/pi/solve_rate" not in found and found["harness/pi/trials"] == 1


def test_nothing_sampled_is_a_share_of_nothing():
    idle = replace(of("pi", 0.0, 0), segments=(), fidelity=Fidelity())
    assert metrics(idle)["harness/pi/trainable_share"] == 0.0


def test_a_run_that_goes_on_has_each_point_of_its_curves_once(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rate, told = Rate(1, 2), dict[tuple[str, str], Rate]()
    lives = ((0, [0], "start", "train", 0), (0, [0, 1], "step-2", "heldout", 2), (2, [2], "end", "train", 3))
    for done, steps, moment, split, version in lives:
        with open_run(tmp_path, done) as store:
            view = View("test", Console(file=StringIO()))
            out = Outputs(store=store, view=view, account=Account(PeakMemory()))
            out.restore(tmp_path, told, done)
            for step in steps:
                store.curve(step, {"rollout/solve_rate": 0.5})
            out.measured(moment, split, rate, 0.0, version=version)
        told[moment, split] = rate
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    names = ("rollout/solve_rate", "validation/heldout_solve_rate", "validation/train_solve_rate")
    assert [[event.step for event in read.Scalars(name)] for name in names] == [[0, 1, 2], [2], [0, 3]]
