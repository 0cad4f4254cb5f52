"""What a model call is for, and which calls are trained: told from labels, words, and what a call goes on from."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from lego.capture.again import again, differences
from lego.capture.kinds import asks_for_summary
from lego.capture.recording import read, record, write
from lego.capture.session import LEFT_OUT, LimitReached, Limits, Session
from lego.chat.messages import Message, Tool, ToolCall
from lego.chat.render import Renderer
from lego.records import CallKind, Drift
from lego.smoke import POLICY
from tests.capture.plays import ERRAND, KINDS, PLAYS, letters, perform
from tests.capture.stage import SESSIONS
from tests.capture.test_session import CALL, TOOLS, USER, call, ids, result, session

MAIN, SUBAGENT, SUMMARY, SIDE = CallKind
SYSTEM = Message("system", "S")
SUM_UP = Message("user", "CRITICAL: Respond with TEXT ONLY. Sum up.")
TITLE = [Message("system", "You make titles"), USER]
OTHER = (Tool("look", '{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}'),)
RECORDED = {**{path.stem: path for path in SESSIONS.glob("*.npz")}, **{p.stem: p for p in KINDS.glob("*.npz")}}


@pytest.fixture(scope="module")
def policy() -> Renderer:
    return Renderer.load(POLICY)


def tokens(*turns) -> int:
    return sum(len(turn.generation.output_ids) for turn in turns)


def masked(s: Session, kind: CallKind) -> int:
    return sum(int(segment.mask_T.sum()) for segment in s.segments() if segment.kind is kind)


def check(s: Session) -> None:
    """Every sampled token is in one segment of its own kind, or excluded for a cause."""
    fidelity, causes = s.fidelity(), s.excluded()
    assert fidelity.sampled == fidelity.trained + sum(fidelity.excluded.values()) == tokens(*s.turns)
    assert sum(fidelity.kinds.values()) == len(s.turns)
    for kind in CallKind:
        own = [t for t, k in zip(s.turns, s.kinds(), strict=True) if k is kind and t.index not in causes]
        assert masked(s, kind) == tokens(*own)


def a_day(renderer, **limits) -> Session:
    """A title, two calls of work with a sub-agent between them, a summary, and work that goes on from it."""
    s = session(renderer, **limits)
    call(s, renderer, TITLE, "a title<|im_end|>", tools=())
    _, answer = call(s, renderer, [SYSTEM, USER])
    _, looked = call(s, renderer, [Message("system", "T"), USER])
    call(s, renderer, [Message("system", "T"), USER, looked, result(looked)], "a report<|im_end|>")
    history = [SYSTEM, USER, answer, result(answer)]
    _, again_ = call(s, renderer, history)
    call(s, renderer, [*history, again_, result(again_), SUM_UP], "so far: nothing<|im_end|>")
    call(s, renderer, [SYSTEM, Message("user", "so far: nothing")], "done<|im_end|>")
    return s


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_the_calls_of_a_recorded_run_are_what_they_were_for(name: str, renderer: Renderer, policy: Renderer):
    recording = read(RECORDED[name])
    s = asyncio.run(again(recording, policy if name in PLAYS else renderer))
    assert list(differences(recording, s, policy.decode)) == []
    check(s)
    if name == "codex-agent":  # its agents take turns as they come
        firsts = [s.plan_of(turn.index).history.messages[3].text for turn in s.turns]
        assert letters(s) == "".join("a" if first == ERRAND else "m" for first in firsts) and "a" in letters(s)
    else:
        assert letters(s) == (PLAYS[name].kinds if name in PLAYS else "mmmmm")


def test_every_play_has_a_recording():
    assert {path.stem for path in KINDS.glob("*.npz")} == set(PLAYS)


@pytest.mark.harness
@pytest.mark.parametrize("name", PLAYS)
async def test_the_real_programs_ask_as_the_recordings_say(name: str, policy: Renderer):
    s = await perform(PLAYS[name], policy)
    check(s)
    assert letters(s) == PLAYS[name].kinds or (name == "codex-agent" and set(letters(s)) == {"m", "a"})
    assert not s.excluded()


def test_the_calls_of_a_day_are_told_apart(renderer):
    s = a_day(renderer)
    assert letters(s) == "tmaamsm"
    assert s.fidelity().kinds == {"side": 1, "main": 3, "subagent": 2, "summary": 1}
    assert [segment.kind for segment in s.segments()] == [MAIN, SUMMARY, SUBAGENT, MAIN]
    check(s)


@pytest.mark.parametrize(
    "train",
    [(MAIN, SUBAGENT, SUMMARY), (MAIN,), (MAIN, SUBAGENT), (MAIN, SUMMARY), (SUMMARY,), (SIDE,), tuple(CallKind)],
)
def test_what_the_recipe_leaves_out_is_excluded_for_its_kind_token_by_token(renderer, train: tuple[CallKind, ...]):
    s = a_day(renderer, train_calls=train)
    whole = {kind: tokens(*(t for t, k in zip(s.turns, s.kinds(), strict=True) if k is kind)) for kind in CallKind}
    fidelity = s.fidelity()
    assert fidelity.trained == sum(whole[kind] for kind in train)
    assert fidelity.excluded == {LEFT_OUT[kind]: n for kind, n in whole.items() if kind not in train}
    assert {segment.kind for segment in s.segments()} == set(train)
    check(s)


def test_causes_are_the_words_of_the_account():
    causes = {"main": "main", "subagent": "subagent", "summary": "summary", "side": "side_request"}
    assert causes == {str(kind): cause for kind, cause in LEFT_OUT.items()}


def test_a_summary_that_goes_on_from_the_work_has_a_segment_of_its_own_and_the_work_keeps_its_turns(renderer):
    s = session(renderer)
    first, answer = call(s, renderer, [SYSTEM, USER])
    second, _ = call(s, renderer, [SYSTEM, USER, answer, result(answer), SUM_UP], "so far<|im_end|>")
    assert second.parent == 0
    work, summary = s.segments()
    assert (work.kind, summary.kind) == (MAIN, SUMMARY)
    assert (work.mask_T.sum(), summary.mask_T.sum()) == (tokens(first), tokens(second))
    assert np.array_equal(summary.ids_T[: len(work.ids_T)], work.ids_T), "the work is the summary's context"


def test_work_that_goes_on_from_a_summary_is_work(renderer):
    s = session(renderer)
    call(s, renderer, [USER])
    asked = [Message("user", "You are picking up work from another agent.")]
    summary, answer = call(s, renderer, asked, "where is it?<|im_end|>")
    turn, _ = call(s, renderer, [*asked, answer, Message("user", "Here are the answers.")])
    assert (turn.parent, letters(s)) == (summary.index, "msm")
    check(s)


def test_a_summary_left_out_is_still_the_context_of_the_work_that_goes_on_from_it(renderer):
    s = session(renderer, train_calls=(MAIN,))
    call(s, renderer, [USER])
    asked = [Message("user", "You are picking up work from another agent.")]
    summary, answer = call(s, renderer, asked, "where is it?<|im_end|>")
    turn, _ = call(s, renderer, [*asked, answer, Message("user", "Here are the answers.")])
    _, on = s.segments()
    assert s.fidelity().excluded == {"summary": tokens(summary)} and on.mask_T.sum() == tokens(turn)
    assert on.routed_T[:-1].all(), "its experts are replayed all the same"
    check(s)


@pytest.mark.parametrize("order", [0, 1])
def test_the_first_call_with_tools_is_the_works_though_a_title_came_before(renderer, order: int):
    s = session(renderer)
    for main in (order, 1 - order):
        call(s, renderer, [SYSTEM, USER] if main else TITLE, tools=TOOLS if main else ())
    assert letters(s) == ("mt" if order else "tm")


def test_a_label_says_more_than_the_words(renderer):
    s = session(renderer)
    _, answer = call(s, renderer, [SYSTEM, USER])
    forked, _ = call(s, renderer, [SYSTEM, USER, answer, result(answer)], hint=Drift.SUBAGENT)
    call(s, renderer, [SYSTEM, USER, answer, result(answer, "another")])
    call(s, renderer, [USER], tools=(), hint=Drift.COMPACTION)
    assert forked.parent == 0 and letters(s) == "mams"
    check(s)


def test_the_summary_of_a_sub_agent_is_a_summary_and_its_work_goes_on_as_its_own(renderer):
    s = session(renderer)
    call(s, renderer, [SYSTEM, USER])
    own = [Message("system", "T"), Message("user", "look")]
    _, looked = call(s, renderer, own, hint=Drift.SUBAGENT)
    call(s, renderer, [*own, looked, result(looked), SUM_UP], "so far<|im_end|>", hint=Drift.SUBAGENT)
    call(s, renderer, [own[0], Message("user", "so far")])
    assert letters(s) == "masa"


def test_a_sub_agent_whose_tools_change_is_known_by_the_answers_it_tells(renderer):
    s = session(renderer)
    call(s, renderer, [SYSTEM, USER])
    own = [Message("system", "T"), Message("user", "look")]
    _, looked = call(s, renderer, own)
    turn, _ = call(s, renderer, [*own, looked, result(looked)], tools=TOOLS + OTHER)
    assert (turn.parent, turn.drift) == (None, Drift.EDITED) and letters(s) == "maa"


def test_a_retry_of_a_sub_agents_first_call_is_the_sub_agents(renderer):
    s = session(renderer)
    call(s, renderer, [SYSTEM, USER])
    for _ in range(2):
        call(s, renderer, [Message("system", "T"), USER])
    assert letters(s) == "maa" and s.fidelity().excluded == {"superseded": len(ids(renderer, CALL))}


def test_only_what_the_harness_itself_says_last_asks_for_a_summary():
    words = SUM_UP.text
    answer = Message("assistant", "ok", calls=(ToolCall("c", "bash", "{}"),))
    assert asks_for_summary((SYSTEM, USER, SUM_UP))
    assert asks_for_summary((SYSTEM, USER, SUM_UP, Message("system", "Today is Monday.")))
    assert asks_for_summary((Message("system", "You are a context summarization agent."), USER))
    assert not asks_for_summary(())
    assert not asks_for_summary((SYSTEM, USER))
    assert not asks_for_summary((SYSTEM, SUM_UP, answer, Message("tool", words, call_id="c")))
    assert not asks_for_summary((SYSTEM, SUM_UP, Message("assistant", words)))
    assert not asks_for_summary((SYSTEM, Message("user", f"New Terminal Output:\n{words}")))
    assert not asks_for_summary((SYSTEM, Message("user", words), answer))


def test_an_agent_that_prints_the_words_is_not_taken_for_a_summary(renderer):
    """Where a harness tells output as a user's message, its own words stand before it."""
    s = session(renderer, train_calls=(MAIN,))
    _, answer = call(s, renderer, [USER], "cat file<|im_end|>", tools=())
    call(s, renderer, [USER, answer, Message("user", f"New Terminal Output:\n{SUM_UP.text}")], tools=())
    assert letters(s) == "mm" and not s.excluded()


def test_a_summary_without_tools_counts_as_a_call_of_the_work(renderer):
    s = session(renderer, max_turns=2)
    call(s, renderer, [SYSTEM, USER])
    asked = [Message("system", "Summarize the provided coding session briefly."), USER]
    turn, _ = call(s, renderer, asked, "so far<|im_end|>", tools=())
    assert turn.drift is Drift.COMPACTION
    with pytest.raises(LimitReached, match="2 model calls"):
        s.plan((SYSTEM, Message("user", "so far")), TOOLS)


def test_a_side_request_that_is_told_later_is_the_works(renderer):
    s = session(renderer)
    call(s, renderer, [SYSTEM, USER])
    _, plan = call(s, renderer, [USER], "first this, then that<|im_end|>", tools=())
    assert letters(s) == "mt"
    call(s, renderer, [SYSTEM, USER, plan, Message("user", "go on")])
    assert letters(s) == "mmm"


def test_a_session_file_keeps_what_was_trained(renderer, tmp_path: Path):
    s = a_day(renderer, train_calls=(MAIN,), experts=None)
    write(record(s, renderer), tmp_path / "s.npz")
    assert read(tmp_path / "s.npz").limits == s.limits


def test_a_kind_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="mian"):
        Limits(train_calls=("mian",))  # type: ignore[arg-type]


def test_a_window_of_a_segment_keeps_its_kind(renderer):
    segment = a_day(renderer).segments()[1]
    assert segment.window(0, 5).kind is segment.kind is SUMMARY
