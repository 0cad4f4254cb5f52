import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lego.capture.crosscheck import fault
from lego.capture.journal import Origin
from lego.capture.session import CANCELLED, ENGINE_ERROR, ContextExceeded, LimitReached, Limits, Session, SessionClosed
from lego.chat.messages import Message, Tool, ToolCall, read_messages
from lego.records import Drift, Outcome, Sampling, VersionSpan
from tests.capture.double import EXPERTS, generation

SPEC = {"name": "bash", "parameters": {"type": "object", "properties": {"all": {"type": "boolean", "default": False}}}}
TOOLS = (Tool("bash", json.dumps({"type": "function", "function": SPEC})),)
SAMPLING = Sampling(max_tokens=1000)
USER = Message("user", "U")
CALL = '<tool_call>\n{"name": "bash", "arguments": {"n": 1.0, "s": "é"}}\n</tool_call><|im_end|>'


def session(renderer, **limits) -> Session:
    return Session("abc", renderer, Limits(**{"context_tokens": 100_000, "experts": EXPERTS} | limits))


def ids(renderer, text: str) -> list[int]:
    return renderer._vocabulary.encode(text)


def call(s, renderer, messages, text=CALL, *, tools=TOOLS, hint=Drift.NONE, **changes):
    plan = s.plan(tuple(messages), tools, Origin(hint=hint))
    output = ids(renderer, text)
    made = generation(plan.prompt_ids, output, start=plan.routing_start, **changes)
    turn = s.add(plan, made, sampling=SAMPLING)
    return turn, s.answers[turn.index].message


def result(answer: Message, text: str = "R") -> Message:
    return Message("tool", text, call_id=answer.calls[0].id)


def retold(answer: Message, arguments: str, *, name: str | None = None) -> Message:
    old = answer.calls[0]
    return Message("assistant", answer.text, answer.reasoning, (ToolCall(old.id, name or old.name, arguments),))


def test_a_continued_history_extends_the_turn_token_for_token(renderer):
    s = session(renderer)
    first, answer = call(s, renderer, [USER])
    second, _ = call(s, renderer, [USER, answer, result(answer)], "ok<|im_end|>")
    before = np.concatenate([first.prompt_ids, first.generation.output_ids])
    assert (second.parent, second.drift) == (0, Drift.NONE)
    assert np.array_equal(second.prompt_ids[: len(before)], before)
    (segment,) = s.segments()
    assert segment.mask_T.sum() == len(first.generation.output_ids) + len(second.generation.output_ids)
    newline = len(before)
    assert segment.mask_T[newline - 1] and not segment.mask_T[newline]


def test_a_split_that_no_encoder_would_choose_is_kept(renderer):
    s = session(renderer)
    output = [*ids(renderer, "a"), 300, 301, *ids(renderer, "<|im_end|>")]
    plan = s.plan((USER,), TOOLS)
    s.add(plan, generation(plan.prompt_ids, output), sampling=SAMPLING)
    told = Message("assistant", s.answers[0].message.text)
    again = s.plan((USER, told, Message("user", "V")), TOOLS)
    assert again.prompt_ids[len(plan.prompt_ids) :][: len(output)].tolist() == output


@pytest.mark.parametrize(
    "arguments",
    ['{"s":"é","n":1}', '{"n": 1e0, "s": "\\u00e9"}', ' {"n":7,"n":1.00,"s":"é"}\n', '{"n":1,"s":"é","all":false}'],
)
def test_arguments_are_joined_by_value(renderer, arguments):
    s = session(renderer)
    _, answer = call(s, renderer, [USER])
    assert s.plan((USER, retold(answer, arguments), result(answer)), TOOLS).parent == 0


@pytest.mark.parametrize(
    "arguments", ['{"n":2,"s":"é"}', '{"n":true,"s":"é"}', '{"n":1,"s":"é","all":true}', '{"n":1}', "x"]
)
def test_edited_arguments_start_a_new_root(renderer, arguments):
    s = session(renderer)
    _, answer = call(s, renderer, [USER])
    plan = s.plan((USER, retold(answer, arguments), result(answer)), TOOLS)
    assert (plan.parent, plan.drift, plan.routing_start) == (None, Drift.EDITED, 0)


def test_large_integers_are_compared_as_javascript_doubles(renderer):
    s = session(renderer)
    text = CALL.replace("1.0", "12345678901234567890")
    _, answer = call(s, renderer, [USER], text)
    told = retold(answer, '{"n":12345678901234567000,"s":"é"}')
    assert s.plan((USER, told, result(answer)), TOOLS).parent == 0


@pytest.mark.parametrize("text", ['{"name": "bash", "arguments": {"n": }', '{"name": "unknown", "arguments": {}}'])
def test_a_call_that_could_not_run_is_joined_by_its_id_alone(renderer, text):
    s = session(renderer)
    _, answer = call(s, renderer, [USER], f"<tool_call>\n{text}\n</tool_call><|im_end|>")
    assert s.plan((USER, retold(answer, '{"tool":"x"}', name="invalid"), result(answer)), TOOLS).parent == 0


def test_a_text_answer_is_joined_by_its_content_without_ids(renderer):
    s = session(renderer)
    call(s, renderer, [USER], "hello <|im_end|>")
    for told in ("hello", " hello\n", [{"type": "text", "text": "hello"}]):
        raw = [
            {"role": "user", "content": "U"},
            {"role": "assistant", "content": told},
            {"role": "user", "content": "V"},
        ]
        assert s.plan(read_messages(raw), TOOLS).parent == 0


def test_an_edit_behind_a_matching_answer_starts_a_new_root(renderer):
    s = session(renderer)
    _, a = call(s, renderer, [USER])
    _, b = call(s, renderer, [USER, a, result(a)])
    turn, _ = call(s, renderer, [USER, a, result(a, "[cleared]"), b, result(b)])
    assert (turn.parent, turn.drift) == (None, Drift.EDITED)
    assert len(s.segments()) == 2 and s.fidelity().trained == s.fidelity().sampled


def test_dropped_reasoning_starts_a_new_root_with_its_class(renderer):
    s = session(renderer)
    _, answer = call(s, renderer, [USER], "<think>\nplan A\n</think>\n\nok<|im_end|>")
    assert answer == Message("assistant", "ok", "plan A")
    kept = s.plan((USER, Message("assistant", "ok", "plan A\n"), Message("user", "V")), TOOLS)
    turn, _ = call(s, renderer, [USER, Message("assistant", "ok"), Message("user", "V")])
    assert kept.parent == 0 and (turn.parent, turn.drift) == (None, Drift.REASONING_DROPPED)
    assert len(s.segments()) == 2


def test_a_retried_request_is_a_sibling_and_only_the_answer_gone_on_from_is_trained(renderer):
    s = session(renderer)
    _, lost = call(s, renderer, [USER])
    twin, answer = call(s, renderer, [USER])
    assert (twin.parent, twin.drift) == (None, Drift.RETRY_TWIN) and lost.calls[0].id != answer.calls[0].id
    assert s.fidelity().excluded == {"superseded": len(twin.generation.output_ids)}
    child, _ = call(s, renderer, [USER, lost, result(lost)], "ok<|im_end|>")
    assert child.parent == 0
    (segment,) = s.segments()
    assert segment.mask_T.sum() == s.fidelity().trained == len(ids(renderer, CALL)) + 3


def test_a_lost_answer_is_not_trained_unless_the_harness_goes_on_from_it(renderer):
    s = session(renderer)
    turn, answer = call(s, renderer, [USER])
    s.lost(turn.index)
    assert s.fidelity().excluded == {"undelivered": len(turn.generation.output_ids)} and not s.segments()
    s.plan((USER, answer, result(answer)), TOOLS)
    assert s.fidelity().excluded == {}


def test_a_side_request_is_never_trained_whichever_comes_first(renderer):
    title = [Message("system", "You make titles"), USER]
    for order in (0, 1):
        s = session(renderer)
        for main in (order, 1 - order):
            call(s, renderer, [USER] if main else title, tools=TOOLS if main else ())
        assert list(s.fidelity().excluded) == ["side_request"] and len(s.segments()) == 1


def test_a_last_answer_asked_for_without_tools_belongs_to_the_work(renderer):
    s = session(renderer, max_turns=2)
    _, answer = call(s, renderer, [USER])
    turn, _ = call(s, renderer, [USER, answer, result(answer)], "done<|im_end|>", tools=())
    assert (turn.parent, turn.drift) == (None, Drift.EDITED)
    assert s.fidelity().excluded == {} and len(s.segments()) == 2
    with pytest.raises(LimitReached):
        s.plan((USER, answer, result(answer)), TOOLS)


def test_a_plan_made_without_tools_belongs_to_the_work_once_it_is_told(renderer):
    s = session(renderer)
    _, plan = call(s, renderer, [USER], "first this, then that<|im_end|>", tools=())
    turn, _ = call(s, renderer, [USER, plan, Message("user", "go on")])
    assert turn.drift is Drift.EDITED and s.fidelity().excluded == {} and len(s.segments()) == 2


def test_a_compaction_known_by_its_label_is_a_segment_of_its_own(renderer):
    s = session(renderer)
    _, answer = call(s, renderer, [USER])
    turn, _ = call(
        s, renderer, [USER, answer, result(answer), Message("user", "sum up")], tools=(), hint=Drift.COMPACTION
    )
    assert (turn.parent, turn.drift) == (None, Drift.COMPACTION) and len(s.segments()) == 2


def test_a_subagent_runs_beside_its_parent(renderer):
    s = session(renderer)
    main, answer = call(s, renderer, [Message("system", "S"), USER])
    sub, _ = call(s, renderer, [Message("system", "T"), USER])
    after, _ = call(s, renderer, [Message("system", "S"), USER, answer, result(answer)])
    assert [t.drift for t in (main, sub, after)] == [Drift.FIRST, Drift.SUBAGENT, Drift.NONE] and after.parent == 0


def test_the_boundary_row_of_a_turn_comes_from_the_next(renderer):
    s = session(renderer)
    first, answer = call(s, renderer, [USER])
    boundary = len(first.prompt_ids) + len(first.generation.output_ids) - 1
    second, _ = call(s, renderer, [USER, answer, result(answer)])
    assert second.generation.routing_start == boundary
    (segment,) = s.segments()
    assert segment.routed_T[:-1].all() and not segment.routed_T[-1]
    assert np.array_equal(segment.routing_TLK[boundary], second.generation.routing[0])
    assert segment.routing_TLK.dtype == np.uint8


def test_the_first_capture_of_a_routing_row_wins(renderer):
    s = session(renderer)
    plan = s.plan((USER,), TOOLS)
    s.add(plan, generation(plan.prompt_ids, ids(renderer, CALL)), sampling=SAMPLING)
    answer = s.answers[0].message
    plan = s.plan((USER, answer, result(answer)), TOOLS)
    made = generation(plan.prompt_ids, ids(renderer, CALL), start=0)
    made.routing[: plan.routing_start] = [6, 7]
    s.add(plan, made, sampling=SAMPLING)
    (segment,) = s.segments()
    assert not (segment.routing_TLK[: plan.routing_start] == [6, 7]).all()


def test_versions_are_kept_for_every_token(renderer):
    s = session(renderer)
    plan = s.plan((USER,), TOOLS)
    made = generation(plan.prompt_ids, [1, 2, 3])
    spans = (VersionSpan(version=4, start=0, stop=1), VersionSpan(version=5, start=1, stop=3))
    s.add(plan, replace(made, versions=spans), sampling=SAMPLING)
    (segment,) = s.segments()
    assert segment.versions_T[-4:].tolist() == [-1, 4, 5, 5]


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        ("prompt_length", lambda g: {"prompt_len": g.prompt_len + 1}),
        ("output_ids", lambda g: {"output_ids": g.output_ids[:0]}),
        ("logprobs", lambda g: {"logprobs": g.logprobs[1:]}),
        ("logprobs", lambda g: {"logprobs": g.logprobs * np.nan}),
        ("logprobs", lambda g: {"logprobs": g.logprobs + 1}),
        ("versions", lambda g: {"versions": ()}),
        ("versions", lambda g: {"versions": (VersionSpan(version=0, start=1, stop=3),)}),
        ("finish", lambda g: {"finish": "abort"}),
        ("routing_missing", lambda g: {"routing": None}),
        ("routing_rows", lambda g: {"routing": g.routing[1:]}),
        ("routing_start", lambda g: {"routing": g.routing[1:], "routing_start": 1}),
        ("routing_rows", lambda g: {"routing": np.concatenate([g.routing, g.routing[:1]])}),
        ("routing_experts", lambda g: {"routing": g.routing + np.uint8(EXPERTS)}),
        ("routing_repeats", lambda g: {"routing": g.routing * 0}),
    ],
)
def test_a_broken_invariant_makes_the_turn_untrainable_and_is_counted(renderer, cause, changes):
    s = session(renderer)
    plan = s.plan((USER,), TOOLS)
    good = generation(plan.prompt_ids, [1, 2, 3])
    assert fault(good, SAMPLING, prompt_len=len(plan.prompt_ids), routing_start=0, experts=EXPERTS) is None
    turn = s.add(plan, replace(good, **changes(good)), sampling=SAMPLING)
    assert turn.rejected == cause and not s.segments()
    assert s.fidelity().excluded == {cause: len(turn.generation.output_ids)}


@pytest.mark.parametrize("broken", [lambda rows: None, lambda rows: rows * 0])
def test_a_rejected_turn_is_context_but_neither_it_nor_its_rows_are_trained_on(renderer, broken):
    s = session(renderer)
    plan = s.plan((USER,), TOOLS)
    made = generation(plan.prompt_ids, ids(renderer, CALL))
    s.add(plan, replace(made, routing=broken(made.routing)), sampling=SAMPLING)
    answer = s.answers[0].message
    child, _ = call(s, renderer, [USER, answer, result(answer)], "ok<|im_end|>")
    (segment,) = s.segments()
    assert child.parent == 0 and segment.mask_T.sum() == 3 and segment.routed_T[:-1].all()
    assert (segment.routing_TLK[:-1, 0, 0] == segment.ids_T[:-1] % EXPERTS).all()


def test_item_ids_find_the_turn_among_answers_that_read_the_same(renderer):
    s = session(renderer)
    for _ in range(2):
        call(s, renderer, [USER], "same<|im_end|>")
    for turn in (0, 1):
        told = replace(s.answers[turn].message, items=(f"msg_{s.answers[turn].id}00",))
        assert s.plan((USER, told, Message("user", "V")), TOOLS).parent == turn


def test_an_answer_told_with_its_item_ids_once_and_without_them_later_is_one_path(renderer):
    s = session(renderer)
    _, answer = call(s, renderer, [USER], "one<|im_end|>")
    with_ids = replace(answer, items=(f"rs_{s.answers[0].id}00", f"msg_{s.answers[0].id}01"))
    _, second = call(s, renderer, [USER, with_ids, Message("user", "V")], "two<|im_end|>")
    third, _ = call(s, renderer, [USER, answer, Message("user", "V"), second, Message("user", "W")], "three<|im_end|>")
    assert third.parent == 1 and len(s.segments()) == 1


def test_an_edited_text_answer_is_known_by_its_item_ids(renderer):
    s = session(renderer)
    _, answer = call(s, renderer, [USER], "one<|im_end|>")
    edited = replace(answer, text="another", items=(f"msg_{s.answers[0].id}00",))
    turn, _ = call(s, renderer, [USER, edited, Message("user", "V")])
    assert (turn.parent, turn.drift) == (None, Drift.EDITED)


def test_a_turn_stays_with_its_first_path_whatever_grows_later(renderer):
    s = session(renderer)
    root, answer = call(s, renderer, [USER])
    left, told = call(s, renderer, [USER, answer, result(answer, "left")])
    right, _ = call(s, renderer, [USER, answer, result(answer, "right")])
    before = s.segments()
    call(s, renderer, [USER, answer, result(answer, "left"), told, result(told)])
    after = s.segments()
    sizes = [len(turn.generation.output_ids) for turn in (root, left, right)]
    assert [int(g.mask_T.sum()) for g in before] == [sizes[0] + sizes[1], sizes[2]]
    assert int(after[0].mask_T.sum()) > int(before[0].mask_T.sum())
    assert np.array_equal(after[1].mask_T, before[1].mask_T)


def test_turns_left_out_are_a_compaction_and_a_changed_result_is_an_edit(renderer):
    s = session(renderer)
    _, a = call(s, renderer, [USER])
    _, b = call(s, renderer, [USER, a, result(a)])
    edited = s.plan((USER, a, result(a, "cut"), b, result(b)), TOOLS)
    compacted = s.plan((Message("user", "so far: ..."), b, result(b)), TOOLS)
    assert (edited.drift, compacted.drift) == (Drift.EDITED, Drift.COMPACTION)


def test_what_was_sampled_of_a_cancelled_answer_is_in_the_account(renderer):
    s = session(renderer)
    plan = s.plan((USER,), TOOLS)
    output = (np.asarray([1, 2, 3], np.int32), np.asarray([-1, -2, -3], np.float32))
    turn = s.abandon(plan, CANCELLED, sampling=SAMPLING, output=output)
    assert turn.generation.finish == "abort" and not s.segments()
    assert (s.fidelity().sampled, s.fidelity().excluded) == (3, {"cancelled": 3})


def test_an_answer_that_comes_after_the_end_of_the_trial_is_in_the_account(renderer):
    s = session(renderer)
    plan = s.plan((USER,), TOOLS)
    s.close()
    s.add(plan, generation(plan.prompt_ids, [1, 2, 3]), sampling=SAMPLING)
    assert s.fidelity().excluded == {"cancelled": 3} and not s.segments()


def test_calls_in_flight_count_against_the_turn_limit_and_failed_ones_do_not(renderer):
    s = session(renderer, max_turns=2)
    first = s.plan((USER,), TOOLS)
    s.plan((Message("user", "V"),), TOOLS)
    with pytest.raises(LimitReached, match="2 model calls, limit 2"):
        s.plan((Message("user", "W"),), TOOLS)
    s.abandon(first, ENGINE_ERROR, sampling=SAMPLING)
    s.plan((Message("user", "W"),), TOOLS)


def test_an_answer_that_did_not_arrive_is_no_turn_of_the_limit_but_its_retry_is(renderer):
    s = session(renderer, max_turns=1)
    turn, _ = call(s, renderer, [USER])
    s.lost(turn.index)
    call(s, renderer, [USER])
    with pytest.raises(LimitReached, match="1 model calls, limit 1"):
        s.plan((USER,), TOOLS)


def test_side_requests_have_an_allowance_of_their_own(renderer):
    s = session(renderer, max_turns=1)
    call(s, renderer, [USER])
    call(s, renderer, [Message("user", "a title")], tools=())
    with pytest.raises(LimitReached):
        s.plan((Message("user", "a title"),), ())


def test_the_tokens_of_a_trial_are_limited(renderer):
    s = session(renderer, max_sampled=5)
    plan = s.plan((USER,), TOOLS)
    assert plan.room == 5
    s.add(plan, generation(plan.prompt_ids, [1, 2, 3]), sampling=SAMPLING)
    plan = s.plan((Message("user", "V"),), TOOLS)
    assert plan.room == 2
    s.add(plan, generation(plan.prompt_ids, [1, 2]), sampling=SAMPLING)
    with pytest.raises(LimitReached, match="5 sampled tokens"):
        s.plan((Message("user", "W"),), TOOLS)
    assert s.breach.outcome is Outcome.TOKEN_LIMIT


def test_a_long_trial_holds_its_ids_once(renderer):
    s = session(renderer, context_tokens=1_000_000, experts=None)
    history = [Message("user", "x" * 50_000)]
    for _ in range(8):
        _, answer = call(s, renderer, history, "ok<|im_end|>")
        history += [answer, Message("user", "y" * 5_000)]
    bases = {id(turn.prompt_ids if turn.prompt_ids.base is None else turn.prompt_ids.base) for turn in s.turns}
    assert len(bases) <= 2 and [turn.parent for turn in s.turns] == [None, *range(7)]
    plain = Session("abc", renderer, s.limits)
    assert np.array_equal(s.turns[-1].prompt_ids[: len(s.turns[0].prompt_ids)], plain.prompt((history[0],), TOOLS))


def test_a_full_context_that_the_harness_gets_around_with_a_shorter_history_is_no_breach(renderer):
    s = session(renderer, context_tokens=4000, max_turns=4)
    call(s, renderer, [USER])
    with pytest.raises(ContextExceeded):
        s.plan((Message("user", "x " * 5000),), TOOLS)
    call(s, renderer, [Message("user", "You are picking up work from an agent.")])
    assert s.breach.outcome is Outcome.CONTEXT_EXCEEDED, "a summary alone is not the work gone on with"
    call(s, renderer, [Message("user", "Go on from here.")])
    assert s.breach is None
    call(s, renderer, [Message("user", "Go on from there.")])
    with pytest.raises(LimitReached):
        s.plan((USER,), TOOLS)
    assert s.breach.outcome is Outcome.TURN_LIMIT


def test_limits_refuse_the_call_and_name_the_breach(renderer):
    s = session(renderer, max_turns=1)
    call(s, renderer, [USER])
    with pytest.raises(LimitReached):
        s.plan((USER,), TOOLS)
    assert s.breach.outcome is Outcome.TURN_LIMIT
    s = session(renderer, context_tokens=10)
    with pytest.raises(ContextExceeded, match="limit 10"):
        s.plan((USER,), TOOLS)
    assert s.breach.outcome is Outcome.CONTEXT_EXCEEDED
    s.close()
    with pytest.raises(SessionClosed):
        s.plan((USER,), TOOLS)


WORDS = st.sampled_from(["ok", "go on", "<think>\nhm\n</think>\n\nok", CALL.removesuffix("<|im_end|>")])
STEPS = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.sampled_from(["go", "go", "go", "fork", "fork", "edit", "root", "lose", "cut", "fail", "cancel"]),
        WORDS,
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_whatever_the_harness_does_every_sampled_token_is_trained_once_or_excluded_with_a_cause(renderer, steps):
    s = session(renderer)
    histories: list[tuple[Message, ...]] = [(USER,)]
    for pick, action, words in steps:
        history = histories[pick % len(histories)]
        if action == "edit":
            history = (Message("user", f"edited {len(histories)}"), *history[1:])
        if action == "fork":
            history = (*history[:-1], replace(history[-1], text=f"fork {len(histories)}"))
        if action == "root":
            history = (Message("user", f"root {len(histories)}"),)
        _step(s, renderer, history, action, words, histories)
    _check(s)


def _step(s, renderer, history, action, words, histories):
    plan = s.plan(history, TOOLS)
    if plan.parent is not None:
        parent = s.turns[plan.parent]
        before = np.concatenate([parent.prompt_ids, parent.generation.output_ids])
        assert np.array_equal(plan.prompt_ids[: len(before)], before)
    if action == "cancel":
        s.abandon(plan, CANCELLED, sampling=SAMPLING)
        return
    cut = action == "cut"
    output = ids(renderer, words if cut else words + "<|im_end|>")
    made = generation(plan.prompt_ids, output, start=plan.routing_start, finish="length" if cut else "stop")
    turn = s.add(plan, replace(made, versions=()) if action == "fail" else made, sampling=SAMPLING)
    if action == "lose":
        s.lost(turn.index)
    answer = s.answers[turn.index].message
    follow = result(answer) if answer.calls else Message("user", "more")
    histories.append((*history, answer, follow))


def _check(s):
    segments, fidelity = s.segments(), s.fidelity()
    assert fidelity.sampled == fidelity.trained + sum(fidelity.excluded.values())
    assert fidelity.sampled == sum(len(t.generation.output_ids) for t in s.turns)
    assert sum(int(g.mask_T.sum()) for g in segments) == fidelity.trained
    for g in segments:
        assert g.mask_T.any() and (g.logprobs_T[~g.mask_T] == 0).all() and (g.logprobs_T[g.mask_T] < 0).all()
        assert ((g.versions_T >= 0) == g.mask_T).all() and g.routed_T[:-1].all()
        assert (g.routing_TLK[:-1, 0, 0] == g.ids_T[:-1] % EXPERTS).all()
