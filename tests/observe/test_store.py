"""The run folder is strict JSON, and its curves can be read back."""

import json
import math

from lego.observe.interval import Rate
from lego.observe.store import open_run
from lego.records import Histogram
from tests.factories import trajectory


def test_numbers_that_json_lacks_are_written_as_strings(tmp_path):
    with open_run(tmp_path / "r") as store:
        store.metrics(0, {"a": math.nan, "b": 1.5})
        store.document("summary.json", {"x": [math.inf]})
    assert json.loads((tmp_path / "r/metrics.jsonl").read_text()) == {"step": 0, "a": "nan", "b": 1.5}
    assert json.loads((tmp_path / "r/summary.json").read_text()) == {"x": ["inf"]}


def test_a_trial_keeps_its_outcome_and_token_account(tmp_path):
    with open_run(tmp_path / "r") as store:
        store.trial(trajectory("boltons/x", 1.0, excluded=3), "end/heldout")
    line = json.loads((tmp_path / "r/trials.jsonl").read_text())
    assert (line["measurement"], line["outcome"], line["reward"]) == ("end/heldout", "solved", 1.0)
    assert line["sampled"] == line["trainable"] + sum(line["excluded"].values())


def test_curves_can_be_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_run(tmp_path / "r") as store:
        store.metrics(0, {"rollout/solve_rate": 0.25})
        store.metrics(1, {"rollout/solve_rate": 0.5}, {"ratio": Histogram(edges=(-1.0, 1.0), counts=(1, 5, 2))})
    read = EventAccumulator(str(tmp_path / "r/tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("rollout/solve_rate")] == [(0, 0.25), (1, 0.5)]
    assert [(e.step, list(e.histogram_value.bucket)) for e in read.Histograms("ratio")] == [(1, [1.0, 5.0, 2.0])]
    line = json.loads((tmp_path / "r/metrics.jsonl").read_text().splitlines()[1])
    assert line["ratio"] == {"edges": [-1.0, 1.0], "counts": [1, 5, 2]}


def test_wilsons_interval_matches_the_published_value():
    low, high = Rate(10, 50).bounds
    assert (round(low, 4), round(high, 4)) == (0.1124, 0.3304)
    assert Rate(0, 0).bounds == (0.0, 1.0)
