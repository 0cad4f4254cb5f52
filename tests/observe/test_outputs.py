"""Numbers of a step, for the curves."""

from dataclasses import replace

import pytest

from lego.observe.interval import Rate
from lego.observe.outputs import _metrics
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
