"""The terminal view shows each number of a step, on a terminal and without one."""

import io

from rich.console import Console

from lego.observe.interval import Rate
from lego.observe.terminal import StepRow, bars, open_view

ROW = StepRow(
    step=3,
    solve=Rate(30, 120),
    outcomes={"failed": 90, "solved": 30},
    pearson=0.99987,
    k3=1.2e-5,
    routing_coverage=1.0,
    trainable_share=0.995,
    seconds={"trials": 41.2, "train": 9.8},
    reused=77,
)
WANTED = ("0.25 [0.18, 0.33]", "failed 90", "solved 30", "77", "0.999870", "1.2e-05", "100.0%", "99.5%", "trials 41")


def shown(terminal: bool) -> str:
    out = io.StringIO()
    with open_view("demo", Console(file=out, force_terminal=terminal, width=200)) as view:
        view.phase("step 3: trials", 120)
        view.advance("solved")
        view.step(ROW)
    return out.getvalue()


def test_a_step_shows_all_its_numbers_without_a_terminal():
    assert all(text in shown(terminal=False) for text in WANTED)


def test_a_step_shows_all_its_numbers_on_a_terminal():
    assert all(text in shown(terminal=True) for text in WANTED)


def test_numbers_nobody_measured_are_shown_as_such():
    assert bars([0.0, 0.5, 1.0]) == "▁▅█"
    assert str(Rate(0, 0)) == "–"


def test_the_picture_holds_the_report(tmp_path):
    with open_view("demo", Console(file=io.StringIO())) as view:
        view.step(ROW)
        view.report(("tasks", "start", "end"), [("train", "0.25", "0.75")], ["notes here"])
    view.picture(tmp_path / "screen.svg")
    svg = (tmp_path / "screen.svg").read_text()
    assert svg.startswith("<svg") and "0.999870" in svg and "notes" in svg
