"""Which sessions a run keeps, and that what it keeps can be replayed."""

from dataclasses import replace
from pathlib import Path

import pytest

from lego.capture.again import again, differences
from lego.capture.journal import Origin
from lego.capture.recording import read
from lego.capture.session import Limits, Session
from lego.capture.wire import Dialect
from lego.chat.messages import Message
from lego.chat.render import Renderer
from lego.records import Fidelity, Outcome, Sampling
from lego.rollout.sessions import Sessions, odd
from tests.capture.double import EXPERTS, generation
from tests.factories import trajectory
from tests.tiny import write_model

CODEX = Path(__file__).parents[1] / "capture" / "sessions" / "codex.npz"
PLAIN = replace(trajectory("pkg/task", 0.0), fidelity=Fidelity(turns=2, drift={"first": 1, "none": 1}))


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer.load(write_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("seen", "wants_a_look"),
    [
        (PLAIN, False),
        (replace(PLAIN, fidelity=Fidelity(drift={"first": 1, "compaction": 1, "subagent": 2})), False),
        (replace(PLAIN, fidelity=Fidelity(drift={"first": 1, "edited": 1})), True),
        (replace(PLAIN, fidelity=Fidelity(faults={"logprobs": 1})), True),
        (trajectory("t", None, outcome=Outcome.HARNESS_ERROR), True),
        (trajectory("t", None, outcome=Outcome.TIMEOUT), False),
    ],
)
def test_what_wants_a_look(seen, wants_a_look: bool):
    assert odd(seen) == wants_a_look


async def test_a_kept_session_replays_and_the_others_leave_no_file(renderer, tmp_path: Path):
    session = await again(read(CODEX), renderer)
    for which in ("none", "odd"):
        assert await Sessions(folder=tmp_path / "s", which=which, renderer=renderer).keep(session, PLAIN) == ""
    assert not (tmp_path / "s").exists()
    name = await Sessions(folder=tmp_path / "s", which="all", renderer=renderer).keep(session, PLAIN)
    assert name == f"pkg_task-0-{session.uid}.npz" and [p.name for p in (tmp_path / "s").iterdir()] == [name]
    kept = read(tmp_path / "s" / name)
    assert Path(kept.model) == renderer.folder.resolve()
    assert list(differences(kept, await again(kept, renderer), renderer.decode)) == []


@pytest.mark.parametrize("spoil", [lambda rows: rows * 0, lambda rows: rows[1:], lambda rows: None])
async def test_a_session_whose_routing_failed_a_check_replays_with_its_fault(renderer, tmp_path: Path, spoil):
    session = Session("abc", renderer, Limits(experts=EXPERTS))
    request = {"messages": [{"role": "user", "content": "U"}]}
    plan = session.plan((Message("user", "U"),), (), Origin(dialect=Dialect.CHAT, body=request))
    made = generation(plan.prompt_ids, [65, 258])
    turn = session.add(plan, replace(made, routing=spoil(made.routing)), sampling=Sampling())
    seen = replace(PLAIN, fidelity=session.fidelity())
    name = await Sessions(folder=tmp_path / "s", which="odd", renderer=renderer).keep(session, seen)
    kept = read(tmp_path / "s" / name)
    assert turn.rejected is not None and turn.rejected.startswith("routing_")
    assert list(differences(kept, await again(kept, renderer), renderer.decode)) == []
