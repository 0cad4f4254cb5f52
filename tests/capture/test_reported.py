"""Faults that others reported of systems like this one, with the numbers of their reports, on a toy tokenizer."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lego.capture.session import Limits, Session
from lego.chat.answer import Parsed, Partial
from lego.chat.messages import Message
from lego.engine.scripted import made_up_routing
from lego.records import Generation, Ids, Sampling, Turn, VersionSpan

SAMPLING = Sampling(max_tokens=100)
END, NEWLINE, START = 151645, 198, 151644
USER, MORE = Message("user", "U"), Message("user", "V")


def ids(*values: int) -> Ids:
    return np.asarray(values, np.int32)


class Toy:
    """Renders any conversation as `prompt`, and what follows an answer as `more`, closed first if it is not."""

    def __init__(self, prompt: Sequence[int], more: Sequence[int] = (NEWLINE, START)) -> None:
        self.prompt, self.more = ids(*prompt), list(more)

    def render(self, messages, tools):
        return self.prompt

    def continuation(self, prompt_ids, output_ids, new, tools, calls=()):
        return ids(*([] if output_ids[-1] == END else [END]), *self.more)

    def parse(self, output_ids, prompt_ids=None, tools=()):
        return Parsed(" ".join(map(str, output_ids)), "", (), output_ids[-1] != END, 0)

    def partial(self, output_ids, prompt_ids=None, tools=()):
        return Partial("", "")


def made(prompt_len: int, output: Sequence[int], finish: str = "stop", **fields) -> Generation:
    n = len(output)
    common = {"prompt_len": prompt_len, "routing": None, "routing_start": 0, "finish": finish}
    logprobs = np.linspace(-0.1, -0.3, n).astype(np.float32)
    spans = (VersionSpan(version=0, start=0, stop=n),)
    return Generation(**common | {"output_ids": ids(*output), "logprobs": logprobs, "versions": spans} | fields)


def two_turns(toy: Toy, first: Generation, second: Sequence[int] = (7, END)) -> Session:
    session = Session("abc", toy, Limits())
    session.add(session.plan((USER,), ()), first, sampling=SAMPLING)
    plan = session.plan((USER, session.answers[0].message, MORE), ())
    assert plan.parent == 0
    session.add(plan, made(len(plan.prompt_ids), second), sampling=SAMPLING)
    return session


def test_t02_the_newline_after_a_turn_is_inserted_once_without_a_logprob():
    (segment,) = two_turns(Toy([1, 2]), made(2, [5, END])).segments()
    assert segment.ids_T.tolist() == [1, 2, 5, END, NEWLINE, START, 7, END]
    assert segment.mask_T.tolist() == [False, False, True, True, False, False, True, True]
    assert not segment.logprobs_T[~segment.mask_T].any()


def test_t03_the_sampled_split_stays_though_the_tokenizer_would_join_it():
    session = two_turns(Toy([1, 2]), made(2, [3, 4, END]))
    prompt = session.turns[1].prompt_ids.tolist()
    assert prompt[2:5] == [3, 4, END] and 9 not in prompt
    (segment,) = session.segments()
    assert segment.mask_T[2:4].all()


@pytest.mark.parametrize(("output", "finish"), [([11, 12, 13], "length"), ([11, 12], "stop")])
def test_t06_a_closer_that_was_not_sampled_is_not_trained(output: list[int], finish: str):
    first = made(1, output, finish)
    (segment,) = two_turns(Toy([1]), first).segments()
    closer = 1 + len(output)
    assert segment.ids_T[closer] == END and not segment.mask_T[closer] and segment.logprobs_T[closer] == 0
    assert segment.ids_T[segment.mask_T].tolist() == [*output, 7, END]
    assert (segment.logprobs_T[segment.mask_T] < 0).all()


def test_t12_an_end_token_that_is_also_the_padding_is_trained():
    session = Session("abc", Toy([5]), Limits())
    session.add(session.plan((USER,), ()), made(1, [6, 0]), sampling=SAMPLING)
    (segment,) = session.segments()
    assert segment.ids_T[segment.mask_T].tolist() == [6, 0]


def test_x14_the_answer_is_clamped_to_the_room_that_is_left():
    session = Session("abc", Toy(range(900)), Limits(context_tokens=1000))
    assert session.plan((USER,), ()).room == 100


LAYERS, EXPERTS, EACH = 2, 8, 2


def routed(prompt_len: int, output: Sequence[int], rows: int, start: int = 0) -> Generation:
    whole = made_up_routing(np.arange(rows + start + 1, dtype=np.int32), LAYERS, EXPERTS, EACH)
    return replace(made(prompt_len, output), routing=whole[start:], routing_start=start)


@pytest.mark.parametrize(("rows", "rejected"), [(7, None), (6, "routing_rows"), (8, "routing_rows")])
def test_r01_five_and_three_tokens_have_seven_rows(rows: int, rejected: str | None, caplog):
    session = Session("abc", Toy(range(5)), Limits(experts=EXPERTS))
    turn = session.add(session.plan((USER,), ()), routed(5, [5, 6, END], rows), sampling=SAMPLING)
    assert turn.rejected == rejected
    if rejected:
        assert "7 rows wanted" in caplog.text and f"({rows}, 2, 2) found" in caplog.text
        return
    (segment,) = session.segments()
    assert segment.routed_T.tolist() == [True] * 7 + [False]


def test_r02_the_boundary_row_comes_from_the_next_turn():
    session = Session("abc", Toy(range(5), more=[NEWLINE, START, 1, 2]), Limits(experts=EXPERTS))
    session.add(session.plan((USER,), ()), routed(5, [5, 6, END], 7), sampling=SAMPLING)
    plan = session.plan((USER, session.answers[0].message, MORE), ())
    assert (len(plan.prompt_ids), plan.routing_start) == (12, 7)
    second = routed(12, [8, END], 13)
    session.add(plan, second, sampling=SAMPLING)
    (segment,) = session.segments()
    assert len(segment.ids_T) == 14 and segment.routed_T.tolist() == [True] * 13 + [False]
    assert second.routing is not None and segment.routing_TLK is not None
    assert np.array_equal(segment.routing_TLK[7], second.routing[7]) and segment.routing_TLK[7].any()


@pytest.mark.parametrize("length", [1, 3, 5, 6, 8])
def test_r04_one_cut_for_all_fields(length: int):
    session = Session("abc", Toy(range(5)), Limits(experts=EXPERTS))
    session.add(session.plan((USER,), ()), routed(5, [5, 6, END], 7), sampling=SAMPLING)
    (segment,) = session.segments()
    cut = segment.window(0, length)
    assert cut.routing_TLK is not None and segment.routing_TLK is not None
    assert np.array_equal(cut.routing_TLK, segment.routing_TLK[:length])
    assert cut.mask_T.tolist() == ([False] * 5 + [True] * 3)[:length]
    for name in ("ids_T", "logprobs_T", "versions_T", "routed_T"):
        assert np.array_equal(getattr(cut, name), getattr(segment, name)[:length])


@pytest.mark.parametrize("length", [0, 9])
def test_r04_a_cut_beyond_the_segment_is_refused(length: int):
    session = Session("abc", Toy(range(5)), Limits())
    session.add(session.plan((USER,), ()), made(5, [5, 6, END]), sampling=SAMPLING)
    with pytest.raises(ValueError, match=rf"window \[0, {length}\) of 8"):
        session.segments()[0].window(0, length)


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda rows: rows * np.repeat([0, 1], [4, 3])[:, None, None].astype(np.uint8), "routing_repeats"),
        (lambda rows: np.where(rows == 3, EXPERTS, rows).astype(np.uint8), "routing_experts"),
    ],
)
def test_r05_zero_rows_and_ids_out_of_range_are_rejected_counted_and_never_replayed(spoil, cause: str):
    session = Session("abc", Toy(range(5)), Limits(experts=EXPERTS))
    good = routed(5, [5, 6, END], 7)
    turn: Turn = session.add(session.plan((USER,), ()), replace(good, routing=spoil(good.routing)), sampling=SAMPLING)
    assert turn.rejected == cause and session.fidelity().faults == {cause: 1}
    assert not session.segments()
