"""Random conversations, told again on the wire as harnesses tell them, against the promises of the session tree."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lego.capture import dialects
from lego.capture.session import CANCELLED, Limits, Plan, Session
from lego.capture.wire import Dialect, Reply, Request
from lego.chat.messages import Message, ToolCall
from lego.chat.render import Renderer
from lego.records import Drift, Ids, Sampling, Segment, Turn, VersionSpan
from tests.capture import rewrites as rw
from tests.capture.double import EXPERTS, generation
from tests.capture.rewrites import Body, Rewrite
from tests.tiny import SPECIALS, byte_tokenizer

CHAT, RESPONSES, MESSAGES = Dialect.CHAT, Dialect.RESPONSES, Dialect.MESSAGES
SAMPLING = Sampling(max_tokens=100_000)
LIMITS = Limits(context_tokens=1_000_000, max_turns=1000, experts=EXPERTS)
TOKENIZER = byte_tokenizer()
TOKEN = {name: 256 + i for i, name in enumerate(SPECIALS)}
OPEN, CLOSE, END = TOKEN["<think>"], TOKEN["</think>"], TOKEN["<|im_end|>"]


# What a model samples.


@dataclass(frozen=True)
class Sampled:
    """An answer: control tokens as ids, text as plain bytes whatever it says."""

    pieces: tuple[str | int, ...]
    finish: str = "stop"
    kept: float = 1.0
    """The share of the ids that is sampled before a cut."""
    all_rows: bool = False
    """Routing from the first token, as of an engine that had nothing in its cache."""

    @property
    def ids(self) -> list[int]:
        whole = [i for piece in self.pieces for i in _ids(piece)]
        return whole[: max(1, int(self.kept * len(whole)))]


@cache
def _ids(piece: str | int) -> tuple[int, ...]:
    """Letter by letter, so that text never is a control token."""
    if isinstance(piece, int):
        return (piece,)
    return tuple(i for letter in piece for i in TOKENIZER.encode(letter).ids)


def sampled(text: str = "", *calls: tuple[str, str], reasoning: str = "", **changes) -> Sampled:
    """A well-formed answer."""
    thinking = (OPEN, f"\n{reasoning}\n", CLOSE, "\n\n") if reasoning else ()
    return Sampled((*thinking, text, *(p for call in calls for p in _call(*call)), END), **changes)


def _call(name: str, arguments: str) -> tuple[str | int, ...]:
    name = json.dumps(name, ensure_ascii=False)
    block = f'\n{{"name": {name}, "arguments": {arguments}}}\n'
    return "\n", TOKEN["<tool_call>"], block, TOKEN["</tool_call>"]


# One trial: what the proxy does with a call, without sockets.


@dataclass(frozen=True)
class Call:
    """A call that was answered: what was read from the wire, and what was made of it."""

    request: Request
    plan: Plan
    turn: Turn


class Gate:
    """Between the plan of a call and its answer."""

    def __init__(self) -> None:
        self.planned, self.open = asyncio.Event(), asyncio.Event()


class Trial:
    """A session behind the wire; every turn's logprobs, versions and routing are its own."""

    def __init__(self, renderer: Renderer, dialect: Dialect) -> None:
        self.dialect = dialect
        self.session = Session("abc", renderer, LIMITS)
        self.calls: dict[int, Call] = {}
        self.lost: set[int] = set()

    @property
    def last(self) -> Call:
        return self.calls[max(self.calls)]

    def lose(self, indexes: Iterable[int]) -> None:
        """Answers that did not reach their client."""
        for index in indexes:
            self.session.lost(index)
            self.lost.add(index)

    def ask(self, body: Body, output: Sampled) -> Body:
        """The answer to one call."""
        return asyncio.run(self._converse(body, output))

    def ask_at_once(self, calls: Sequence[tuple[Body, Sampled]], order: Sequence[int]) -> list[Body | None]:
        """The answers to calls that are all planned before the first is sampled, and sampled in this order.

        None for a call whose client did not wait.
        """
        return asyncio.run(self._together(calls, order))

    async def _together(self, calls: Sequence[tuple[Body, Sampled]], order: Sequence[int]) -> list[Body | None]:
        gates = [Gate() for _ in calls]
        async with asyncio.TaskGroup() as group:
            pairs = zip(calls, gates, strict=True)
            tasks = [group.create_task(self._waited_for(*call, gate)) for call, gate in pairs]
            for gate in gates:
                await gate.planned.wait()
            for i in order:
                gates[i].open.set()
                await tasks[i]
        return [task.result() for task in tasks]

    async def _waited_for(self, body: Body, output: Sampled, gate: Gate) -> Body | None:
        try:
            return await self._converse(body, output, gate)
        except ConnectionError:
            return None

    async def _converse(self, body: Body, output: Sampled, gate: Gate | None = None) -> Body:
        async def sample(request: Request) -> Reply:
            plan = self.session.plan(request.messages, request.tools)
            if gate is not None:
                gate.planned.set()
                await gate.open.wait()
            if output.finish == "abort":
                self._abandon(plan, output)
            return self._reply(Call(request, plan, self._add(plan, output)))

        answer = await dialects.converse(self.dialect, _wire(body), sample)
        return _wire(answer)

    def _abandon(self, plan: Plan, output: Sampled) -> None:
        logprobs = np.full(len(output.ids), -1, np.float32)
        self.session.abandon(plan, CANCELLED, sampling=SAMPLING, output=(np.asarray(output.ids, np.int32), logprobs))
        raise ConnectionError

    def _add(self, plan: Plan, output: Sampled) -> Turn:
        index, n = len(self.session.turns), len(output.ids)
        start = 0 if output.all_rows else plan.routing_start
        made = generation(plan.prompt_ids, output.ids, start=start, finish=output.finish)
        assert made.routing is not None
        own = {"logprobs": made.logprobs - index, "routing": ((made.routing + index) % EXPERTS).astype(np.uint8)}
        spans = (VersionSpan(version=index, start=0, stop=1), VersionSpan(version=index + 1000, start=1, stop=n))
        return self.session.add(plan, replace(made, versions=spans[: min(n, 2)], **own), sampling=SAMPLING)

    def _reply(self, call: Call) -> Reply:
        self.calls[call.turn.index] = call
        answer = self.session.answers[call.turn.index]
        return Reply(
            id=answer.id,
            message=answer.message,
            truncated=answer.truncated,
            prompt_tokens=len(call.plan.prompt_ids),
            output_tokens=len(call.turn.generation.output_ids),
        )


def _wire(body: Body) -> Body:
    """The body as it comes out at the other end; raises for what JSON cannot tell."""
    return json.loads(json.dumps(body, allow_nan=False))


# What must hold.


def whole(turn: Turn) -> Ids:
    return np.concatenate([turn.prompt_ids, turn.generation.output_ids])


def path(turns: Sequence[Turn], index: int | None) -> list[Turn]:
    """A turn and those before it, the first one first."""
    return [] if index is None else [*path(turns, turns[index].parent), turns[index]]


def check(trial: Trial) -> set[int]:
    """The account and every segment, against what was sampled; returns the trained turns."""
    turns, account = trial.session.turns, trial.session.fidelity()
    owned = [index for segment in trial.session.segments() for index in _check_segment(turns, segment)]
    assert len(owned) == len(set(owned))
    lengths = [len(turn.generation.output_ids) for turn in turns]
    assert account.sampled == sum(lengths) == account.trained + sum(account.excluded.values())
    assert account.trained == sum(lengths[index] for index in owned)
    for call in trial.calls.values():
        _check_plan(trial, call)
    return set(owned)


def _check_segment(turns: Sequence[Turn], segment: Segment) -> set[int]:
    mask = segment.mask_T
    owned = {int(version) % 1000 for version in segment.versions_T[mask]}
    mine = path(turns, max(owned))
    assert np.array_equal(segment.ids_T, whole(mine[-1])), "a segment is a prompt that was sent and its answer"
    expected = np.zeros(len(mask), np.bool_)
    for turn in mine:
        if turn.index in owned:
            expected[_span(turn)] = True
            _check_tokens(turn, segment)
    assert np.array_equal(mask, expected), "what is trained is what was sampled, and nothing between"
    assert (segment.logprobs_T[~mask] == 0).all() and (segment.versions_T[~mask] == -1).all()
    _check_routing(mine, segment)
    return owned


def _span(turn: Turn) -> slice:
    return slice(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.generation.output_ids))


def _check_tokens(turn: Turn, segment: Segment) -> None:
    span, made = _span(turn), turn.generation
    assert np.array_equal(segment.ids_T[span], made.output_ids)
    assert np.array_equal(segment.logprobs_T[span], made.logprobs)
    versions = [v.version for v in made.versions for _ in range(v.start, v.stop)]
    assert segment.versions_T[span].tolist() == versions


def _check_routing(mine: Sequence[Turn], segment: Segment) -> None:
    """Each row is the first that was captured for its token; the last token has none."""
    assert segment.routing_TLK is not None
    rows: dict[int, np.ndarray] = {}
    for turn in mine:
        assert turn.generation.routing is not None
        for i, row in enumerate(turn.generation.routing, turn.generation.routing_start):
            rows.setdefault(i, row)
    assert segment.routed_T.tolist() == [True] * (len(segment.ids_T) - 1) + [False]
    assert np.array_equal(segment.routing_TLK[:-1], np.stack([rows[i] for i in range(len(rows))]))


def _check_plan(trial: Trial, call: Call) -> None:
    """The prompt is that of the parent, its answer and the new messages; the parent is what was told."""
    messages, tools, plan = call.request.messages, call.request.tools, call.plan
    renderer = trial.session._renderer
    if plan.parent is None:
        assert plan.drift is not Drift.NONE
        assert np.array_equal(plan.prompt_ids, renderer.render(messages, tools))
        return
    assert plan.parent < call.turn.index and plan.drift in (Drift.NONE, Drift.RETRY_TWIN)
    parent, new = trial.calls[plan.parent], messages[_answered(messages) :]
    assert np.array_equal(plan.prompt_ids, np.concatenate([whole(parent.turn), suffix(parent.turn, new)]))
    history = sampled_history(trial, plan.parent)
    assert len(history) == _answered(messages) and parent.request.tools == tools
    answers = [answer.message for answer in trial.session.answers.values()]
    for mine, told in zip(history, messages, strict=False):
        # Two tellings of one answer that no harness could run need not be alike: both are known by its ids.
        same = alike(mine, told) or any(alike(answer, mine) and alike(answer, told) for answer in answers)
        assert same, (mine, told)


def _answered(messages: Sequence[Message]) -> int:
    """How many messages there are up to the last answer."""
    return max((i + 1 for i, m in enumerate(messages) if m.role == "assistant"), default=0)


def suffix(parent: Turn, new: Sequence[Message]) -> list[int]:
    """The template by hand: the closer if the answer lacks one, the new messages, and the head of an answer."""
    output = parent.generation.output_ids.tolist()
    marks = [i for i in output if i in (OPEN, CLOSE, TOKEN["<tool_call>"])]
    thinks = marks == [OPEN] and not TOKENIZER.decode(output[: output.index(OPEN)], skip_special_tokens=False).strip()
    pieces: list[str | int] = ["\n"] if output[-1] == END else [*([CLOSE] if thinks else []), END, "\n"]
    for i, message in enumerate(new):
        tool = message.role == "tool"
        if not tool or i == 0 or new[i - 1].role != "tool":
            pieces += [TOKEN["<|im_start|>"], "user" if tool else message.role]
        wrapped = (TOKEN["<tool_response>"], f"\n{message.text}\n", TOKEN["</tool_response>"])
        pieces += ["\n", *(wrapped if tool else (message.text,))]
        if not tool or i + 1 == len(new) or new[i + 1].role != "tool":
            pieces += [END, "\n"]
    return [i for piece in [*pieces, TOKEN["<|im_start|>"], "assistant\n"] for i in _ids(piece)]


def sampled_history(trial: Trial, index: int) -> tuple[Message, ...]:
    """The messages of a turn's context, our answers as they were sampled, and its own answer."""
    call = trial.calls[index]
    messages = call.request.messages
    if call.plan.parent is not None:
        messages = (*sampled_history(trial, call.plan.parent), *messages[_answered(messages) :])
    return (*messages, trial.session.answers[index].message)


def alike(mine: Message, told: Message) -> bool:
    """Whether the two are one message, by notes of what harnesses do to spelling and no more."""
    if mine.role != told.role or len(mine.calls) != len(told.calls):
        return False
    if mine.role != "assistant":
        return mine.text == told.text
    calls = all(_alike_call(a, b) for a, b in zip(mine.calls, told.calls, strict=True))
    return calls and mine.text.strip() == told.text.strip() and mine.reasoning.strip() == told.reasoning.strip()


def _alike_call(mine: ToolCall, told: ToolCall) -> bool:
    values, found = _values(mine.arguments), _values(told.arguments)
    renamed = told.name != mine.name and not {told.name, mine.name} <= rw.SCHEMAS.keys()
    if mine.id == told.id and (not isinstance(values, dict) or renamed):
        return True
    if isinstance(values, dict) and isinstance(found, dict):
        values = {k: v for k, v in rw.DEFAULTS.get(mine.name, {}).items() if k in found} | values
    same = mine.arguments == told.arguments if values is None else _canonical(values) == _canonical(found)
    return same and mine.name == told.name


def _values(arguments: str) -> object:
    """None too for a number beyond a double, which no body can tell."""
    try:
        values = rw.strict_json(arguments or "{}")
        json.dumps(values, allow_nan=False)
    except ValueError:
        return None
    return values


def _canonical(value: object) -> str:
    return json.dumps(json.loads(rw.js_text(value)), sort_keys=True)


# Random conversations.

TEXT = ("", " ", "\n", "ok", " I look. \r\n", "café 😀 \u2028 a/b <b>", "<|im_end|>", "<think>no</think>", "</think>")
TEXT += ('<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>', "<tool_response>", "e\u0301", "\ufffd\x00\x1f")
PLAIN = st.sampled_from(TEXT) | st.text(max_size=8)
NUMBERS = st.sampled_from(["1.0", "1e3", "12345678901234567890", "-0.0", "1e400", "1e-7", "7", "0.1", "1E+2"])
FIELDS = st.lists(st.tuples(PLAIN, NUMBERS | PLAIN.map(json.dumps), st.sampled_from(["", " ", "\n "])), max_size=3)


def _object(fields: list[tuple[str, str, str]]) -> str:
    return "{" + ",".join(f"{s}{json.dumps(k, ensure_ascii=False)}{s}:{s}{v}" for k, v, s in fields) + "}"


WELL_FORMED = ('{"command": "ls"}', '{ "command" :  "a", "command": "b" }', '{"path": "x", "replace_all": true}', "{}")
WELL_FORMED += ('{"path": "x", "n": 1.0}', '{"a": [1.0, {"b": null}], "2": 1, "1": 2}', '{"x": "\\ud800"}')
WELL_FORMED += ('{"s": "caf\\u00e9 \\ud83d\\ude00 \\u003ctag a\\/b"}', '{"command": 12345678901234567890}')
ILL_FORMED = ('{"command": "ls", ', "ls -la", "", "[1]", "null", '"ls"', '{"x": NaN}', '{"a": {}}}')
ARGUMENTS = FIELDS.map(_object) | st.sampled_from(WELL_FORMED + ILL_FORMED)
NAMES = st.sampled_from(["bash", "bash", "edit", "unknown", "ü"])
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS).map(lambda call: _call(*call)), max_size=3)
THOUGHT = (OPEN, "\nplan A\n", CLOSE, "\n\n")
THINKING = st.sampled_from([(), (), THOUGHT, THOUGHT, (OPEN, "  ", CLOSE), (CLOSE,)])
STRAY = st.sampled_from(
    [*(i for name, i in TOKEN.items() if name not in ("<|im_end|>", "<|endoftext|>")), 200, 300, 511]
)


@st.composite
def answers(draw: st.DrawFn, cuts: Sequence[str] = ("length",)) -> Sampled:
    """Thinking, text and calls, sometimes with a stray token among them or cut at any place."""
    pieces = [*draw(THINKING), draw(PLAIN), *(p for call in draw(CALLS) for p in call), draw(PLAIN)]
    if draw(st.integers(0, 5)) == 0:
        pieces.insert(draw(st.integers(0, len(pieces))), draw(STRAY))
    rows = draw(st.booleans())
    finish = draw(st.sampled_from(["stop", "stop", "stop", *cuts]))
    if finish != "stop":
        return Sampled((*pieces, "."), finish, draw(st.floats(0, 1)), rows)
    return Sampled((*pieces, END), all_rows=rows)


Said = list[tuple[str, str]]


def replied(answer: Body, texts: Sequence[str]) -> Said:
    """What the harness has to say to an answer: a result for each call, a user's text if there is none, or more."""
    results = [("tool", f"{texts[i % len(texts)]}{i}") for i in range(len(rw.call_ids(answer)))]
    return results + ([("user", texts[-1])] if not results or len(texts) > 2 else [])


def followed(body: Body, answer: Body, texts: Sequence[str]) -> Body:
    """The history with our answer and what the harness has to say to it."""
    said = replied(answer, texts)
    body = rw.with_results(rw.told(body, answer), answer, [text for role, text in said if role == "tool"])
    return rw.with_user(body, said[-1][1]) if said[-1][0] == "user" else body


def retold(body: Body, changes: Sequence[Rewrite]) -> Body:
    return reduce(lambda told, change: change(told), changes, body)


TEXTS = st.lists(PLAIN.map(lambda text: text + "."), min_size=1, max_size=3)


@pytest.mark.parametrize("dialect", Dialect)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_history_that_is_only_spelled_anew_is_one_segment(renderer, dialect, data):
    changes = st.lists(st.sampled_from(rw.KEEPING[dialect]), max_size=6)
    trial, history, said = Trial(renderer, dialect), rw.opening(dialect), [("system", "S"), ("user", "U")]
    for index in range(data.draw(st.integers(2, 4))):
        answer = trial.ask(retold(history, data.draw(changes)), data.draw(answers()))
        messages, plan = trial.last.request.messages, trial.last.plan
        assert [(message.role, message.text) for message in messages[_answered(messages) :]] == said
        assert (plan.parent, plan.drift) == ((index - 1, "none") if index else (None, "first"))
        texts = data.draw(TEXTS)
        history, said = followed(history, answer, texts), replied(answer, texts)
    assert check(trial) == set(trial.calls)
    assert len(trial.session.segments()) == 1 and not trial.session.fidelity().excluded


@pytest.mark.parametrize("dialect", Dialect)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_whatever_harnesses_do_no_join_is_wrong_and_every_token_is_in_the_account(renderer, dialect, data):
    changes = st.builds(
        lambda breaking, keeping: [*breaking, *keeping],
        st.lists(st.sampled_from(rw.BREAKING), max_size=1),
        st.lists(st.sampled_from(rw.KEEPING[dialect]), max_size=2),
    )
    trial = Trial(renderer, dialect)
    histories = [rw.opening(dialect), rw.opening(dialect, "another agent", "T")]
    for _ in range(data.draw(st.integers(2, 5))):
        late = st.sampled_from([*histories[-3:], histories[0]])
        picked = data.draw(st.lists(st.tuples(late, changes), min_size=1, max_size=3))
        bodies = [retold(history, change) for history, change in picked]
        before = set(trial.calls)
        calls = [(body, data.draw(answers(("length", "abort")))) for body in bodies]
        heard = trial.ask_at_once(calls, data.draw(st.permutations(range(len(calls)))))
        trial.lose({index for index in trial.calls if index not in before and data.draw(st.integers(0, 4)) == 0})
        for body, (history, _), answer in zip(bodies, picked, heard, strict=True):
            kept = body if data.draw(st.booleans()) else history
            histories += [followed(kept, answer, data.draw(TEXTS))] if answer is not None else []
    _check_causes(trial, check(trial))


def _among_answers(trial: Trial, index: int) -> bool:
    """Whether a call without tools tells answers, or its own is told by another."""
    answer = trial.session.answers[index].message
    own = any(message.role == "assistant" for message in trial.calls[index].request.messages)
    turns = trial.session.turns
    told = [message for turn in turns for message in trial.session.plan_of(turn.index).history.messages]
    ids, root = {call.id for call in answer.calls}, trial.session.answers[index].id
    by_id = any({call.id for call in m.calls} & ids or any(root in item for item in m.items) for m in told)
    return own or by_id or any(alike(answer, m) for m in told)


def _check_causes(trial: Trial, trained: set[int]) -> None:
    """Left out are side requests, answers that were lost, and twins that nobody went on from."""
    parents = {call.plan.parent for call in trial.calls.values()}
    planned_on = {turn.parent for turn in trial.session.turns}
    keys = [call.plan.key for call in trial.calls.values()]
    main = any(trial.session.plan_of(turn.index).history.tools for turn in trial.session.turns)
    for index, call in trial.calls.items():
        toolless = main and not call.request.tools
        aside = toolless and not _among_answers(trial, index)
        if toolless and not aside:
            continue
        if aside or (index in trial.lost and index not in planned_on):
            assert index not in trained
        elif index in parents or (index not in trial.lost and keys.count(call.plan.key) == 1):
            assert index in trained


# By hand: what each harness was seen doing, row by row.

LOOK = ("bash", '{"command": "ls"}')
Case = tuple[str, Dialect, tuple[Rewrite, ...]]


def seen(name: str, dialect: Dialect, *changes: Rewrite) -> Case:
    return name, dialect, changes


def named(case: object) -> str | None:
    """The harness and its dialect, for the test's id."""
    return f"{case[0]}-{case[1].name.lower()}" if isinstance(case, tuple) and len(case) == 3 else None


def second_call(renderer: Renderer, case: Case, output: Sampled) -> tuple[int | None, Drift]:
    """Where a second call hangs that tells the first answer as the harness does."""
    _, dialect, changes = case
    trial, opening = Trial(renderer, dialect), rw.opening(dialect)
    answer = trial.ask(opening, output)
    trial.ask(retold(followed(opening, answer, ["R"]), changes), sampled("ok"))
    check(trial)
    return trial.last.plan.parent, trial.last.plan.drift


CODEX, CLAUDE = seen("codex", RESPONSES), seen("claude", MESSAGES)
VERBATIM = [CODEX, seen("mini", CHAT), seen("mini", RESPONSES), seen("openhands, call refused", CHAT)]
RESPELLED = [seen(name, CHAT, rw.js_arguments) for name in ("opencode", "pi", "qwen", "cline")]
RESPELLED += [seen(name, RESPONSES, rw.js_arguments) for name in ("opencode", "pi")]
RESPELLED += [seen(name, MESSAGES, rw.js_arguments) for name in ("claude", "opencode", "pi", "qwen")]
RESPELLED += [seen("openhands", dialect, rw.python_arguments) for dialect in (CHAT, MESSAGES)]
ODD_ARGUMENTS = [
    '{ "command" :  "echo loose" }',
    '{"command": "echo first", "command": "echo second"}',
    '{"command": "caf\\u00e9 \\ud83d\\ude00 \\u003ctag\\u003e a\\/b"}',
    '{"a": 1.0, "b": 1e3, "c": 12345678901234567890}',
    ' {"command":"ls"}\n',
    '{"unknown": null, "command": "é"}',
]


@pytest.mark.parametrize("arguments", ODD_ARGUMENTS)
@pytest.mark.parametrize("case", VERBATIM + RESPELLED, ids=named)
def test_arguments_told_anew_are_the_same_call(renderer, case, arguments):
    assert second_call(renderer, case, sampled("", ("bash", arguments))) == (0, Drift.NONE)


@pytest.mark.parametrize("dialect", Dialect)
def test_a_call_may_have_an_argument_of_the_name_that_is_ours_for_malformed_ones(renderer, dialect):
    output = sampled("", ("bash", '{"raw_arguments": "x"}'))
    assert second_call(renderer, seen("any", dialect), output) == (0, Drift.NONE)


def test_claude_adds_a_default_of_the_schema(renderer):
    case = seen("claude", MESSAGES, rw.defaults_added)
    assert second_call(renderer, case, sampled("", ("edit", '{"path": "x"}'))) == (0, Drift.NONE)


def test_gemini_tells_calls_under_ids_of_its_own(renderer):
    case = seen("gemini", CHAT, rw.js_arguments, rw.ids_reminted)
    assert second_call(renderer, case, sampled("", LOOK)) == (0, Drift.NONE)


def test_terminus_tells_its_calls_as_text_and_has_no_tools(renderer):
    trial, opening = Trial(renderer, CHAT), rw.without_tools(rw.opening(CHAT))
    answer = trial.ask(opening, sampled('{ "commands": [1.0] }\n'))
    trial.ask(followed(opening, answer, ["errors"]), sampled("ok"))
    assert trial.last.plan.parent == 0 and check(trial) == {0, 1}


@pytest.mark.parametrize(
    "text", ["  x  ", "a\r\nb", "a\u2028b", "<|im_end|>", "a</think>b", "<tool_call>\n{}\n</tool_call>", "\n", ""]
)
@pytest.mark.parametrize(
    "case", [CODEX, CLAUDE, *(seen(n, CHAT) for n in ("opencode", "qwen", "cline", "mini", "pi"))], ids=named
)
@pytest.mark.parametrize("calls", [(), (LOOK,)], ids=["alone", "with a call"])
def test_text_is_told_as_it_was(renderer, case, text, calls):
    assert second_call(renderer, case, sampled(text, *calls)) == (0, Drift.NONE)


@pytest.mark.parametrize("text", ["", "\n", " \n "])
@pytest.mark.parametrize(
    "case",
    [
        seen("opencode", CHAT, rw.none_as_empty),
        *(seen(name, CHAT, rw.none_as_empty, rw.empty_as_none) for name in ("pi", "qwen", "cline")),
        seen("mini", CHAT, rw.none_missing),
        seen("openhands", CHAT, rw.blank_missing),
        *(seen(name, CHAT, rw.blank_dropped) for name in ("pi", "openhands")),
        seen("claude", MESSAGES, rw.blank_dropped),
    ],
    ids=named,
)
def test_blank_text_beside_calls_has_many_spellings(renderer, case, text):
    assert second_call(renderer, case, sampled(text, LOOK)) == (0, Drift.NONE)


@pytest.mark.parametrize("calls", [(), (LOOK,)], ids=["alone", "with a call"])
@pytest.mark.parametrize(
    "case",
    [
        seen("openhands", CHAT, rw.as_parts),
        seen("openhands", MESSAGES, rw.as_parts),
        seen("claude", MESSAGES, rw.as_strings),
        seen("opencode", RESPONSES, rw.item_types_dropped, rw.item_state_dropped),
        seen("mini", RESPONSES, rw.as_strings, rw.item_ids_dropped),
        seen("codex", RESPONSES, rw.item_state_dropped, rw.item_fields_added),
    ],
    ids=named,
)
def test_strings_and_parts_and_the_fields_of_items_make_no_difference(renderer, case, calls):
    assert second_call(renderer, case, sampled("text ", *calls)) == (0, Drift.NONE)


@pytest.mark.parametrize("calls", [(), (LOOK,)], ids=["alone", "with a call"])
@pytest.mark.parametrize(
    "case",
    [
        *(seen(name, CHAT) for name in ("opencode", "cline", "openhands as deepseek")),
        seen("pi", CHAT, rw.reasoning_renamed),
        seen("mini", CHAT, rw.reasoning_twice),
        seen("litellm", CHAT, rw.reasoning_as_blocks),
        seen("qwen", CHAT, rw.reasoning_trimmed),
        CLAUDE,
        seen("opencode", MESSAGES),
        CODEX,
        seen("pi", RESPONSES),
    ],
    ids=named,
)
def test_reasoning_that_comes_back_is_the_same_answer(renderer, case, calls):
    assert second_call(renderer, case, sampled("ok", *calls, reasoning=" plan A\n")) == (0, Drift.NONE)


@pytest.mark.parametrize("calls", [(), (LOOK,)], ids=["alone", "with a call"])
@pytest.mark.parametrize(
    "case",
    [seen(n, d, rw.reasoning_dropped) for n, d in (("openhands", CHAT), ("terminus", CHAT), ("ai-sdk", RESPONSES))],
    ids=named,
)
def test_reasoning_that_is_left_out_is_a_new_root(renderer, case, calls):
    found = second_call(renderer, case, sampled("ok", *calls, reasoning="plan A"))
    assert found == (None, Drift.REASONING_DROPPED)


@pytest.mark.parametrize("name", ["mini", "openhands"])
def test_think_tags_in_text_are_cut_out_by_litellm_clients(renderer, name):
    def cut(body: Body) -> Body:
        return json.loads(json.dumps(body).replace("<think>\\ninline\\n</think>", ""))

    output = sampled("<think>\ninline\n</think>\n\nvisible")
    assert second_call(renderer, seen(name, CHAT, cut), output) == (None, Drift.EDITED)
    assert second_call(renderer, seen("opencode", CHAT), output) == (0, Drift.NONE)


MALFORMED = [("bash", '{"command": "ls", '), ("bash", "ls -la"), ("bash", ""), ("unknown", '{"command": "ls"}')]


@pytest.mark.parametrize("call", MALFORMED, ids=["cut", "no JSON", "empty", "unknown tool"])
@pytest.mark.parametrize(
    "case",
    [
        CODEX,
        seen("claude", MESSAGES, rw.invalid_wrapped),
        *(seen("opencode", dialect, rw.invalid_renamed) for dialect in Dialect),
        seen("openhands", CHAT, rw.invalid_marked),
        *(seen(name, CHAT, rw.invalid_repaired, rw.js_arguments) for name in ("pi", "cline", "qwen")),
    ],
    ids=named,
)
def test_a_call_that_could_not_run_is_known_by_its_id_whatever_is_told_of_it(renderer, case, call):
    assert second_call(renderer, case, sampled("", call)) == (0, Drift.NONE)
    assert second_call(renderer, case, sampled("I look", call, LOOK)) == (0, Drift.NONE)


@pytest.mark.parametrize(
    ("name", "dialect", "change", "output"),
    [
        ("mini", CHAT, rw.turn_deleted, sampled("", MALFORMED[0])),
        ("mini", CHAT, rw.turn_deleted, sampled("no call")),
        ("mini", RESPONSES, rw.turn_deleted, sampled("no call")),
        ("claude", MESSAGES, rw.turn_deleted_note_joined, sampled("\n")),
    ],
)
def test_an_answer_that_is_deleted_is_a_branch_that_ends(renderer, name, dialect, change, output):
    trial, opening = Trial(renderer, dialect), rw.opening(dialect)
    told = followed(opening, trial.ask(opening, sampled("", LOOK)), ["R"])
    deleted = change(rw.told(told, trial.ask(told, output)))
    trial.ask(deleted, sampled("ok"))
    assert (trial.last.plan.parent, trial.last.plan.drift) == (0, Drift.NONE)
    assert check(trial) == {0, 1, 2} and len(trial.session.segments()) == 2


@pytest.mark.parametrize(
    "case", [seen("mini", CHAT, rw.turn_deleted), seen("mini", RESPONSES, rw.turn_deleted)], ids=named
)
def test_a_first_answer_that_is_deleted_leaves_a_shorter_history(renderer, case):
    assert second_call(renderer, case, sampled("no call")) == (None, Drift.COMPACTION)


@pytest.mark.parametrize(("name", "dialect"), [("openhands", CHAT), ("terminus", CHAT), ("claude", MESSAGES)])
def test_an_empty_answer_that_is_kept_with_a_nudge_is_extended(renderer, name, dialect):
    assert second_call(renderer, seen(name, dialect), sampled("")) == (0, Drift.NONE)


@pytest.mark.parametrize(
    "changes",
    [
        (rw.cache_mark_moved,),
        (rw.billing_changed,),
        (rw.cache_mark_moved, rw.billing_changed, rw.js_arguments, rw.defaults_added),
        (rw.messages_split,),
        (),
    ],
    ids=["cache mark", "billing line", "all of it", "one block a message", "the recipe without them"],
)
def test_claude_moves_marks_and_changes_a_line_that_is_no_text(renderer, changes):
    output = sampled("I look", LOOK, ("edit", '{"path": "x"}'), reasoning="plan")
    assert second_call(renderer, seen("claude", MESSAGES, *changes), output) == (0, Drift.NONE)


def test_claude_puts_reminders_behind_the_results_and_tells_results_as_they_come(renderer):
    trial, opening = Trial(renderer, MESSAGES), rw.opening(MESSAGES)
    answer = trial.ask(opening, sampled("", LOOK, LOOK))
    told = rw.results_reversed(rw.with_results(rw.told(opening, answer), answer, ["R0", "R1"]))
    told["messages"][-1]["content"].append({"type": "text", "text": "<system-reminder>x</system-reminder>"})
    answer = trial.ask(rw.cache_mark_moved(told), sampled("", LOOK))
    trial.ask(rw.cache_mark_moved(followed(told, answer, ["R2"])), sampled("ok"))
    assert [call.plan.parent for call in trial.calls.values()] == [None, 0, 1]
    assert len(trial.session.segments()) == 1 and check(trial) == {0, 1, 2}


def test_results_in_another_order_than_before_are_the_same_history(renderer):
    trial, opening = Trial(renderer, MESSAGES), rw.opening(MESSAGES)
    answer = trial.ask(opening, sampled("", LOOK, LOOK))
    told = rw.with_results(rw.told(opening, answer), answer, ["R0", "R1"])
    told = followed(told, trial.ask(told, sampled("", LOOK)), ["R2"])
    trial.ask(rw.results_reversed(told), sampled("ok"))
    assert trial.last.plan.parent == 1 and check(trial) == {0, 1, 2}


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize(
    ("change", "call"),
    [
        (rw.arguments_edited, LOOK),
        (rw.arguments_edited, ("edit", "{}")),
        (rw.answers_trimmed, LOOK),
        (rw.calls_renamed, LOOK),
    ],
    ids=["another value", "one more argument", "less text", "another tool that is offered"],
)
def test_an_answer_that_is_edited_is_a_new_root_although_its_ids_are_known(renderer, dialect, change, call):
    output = sampled("I look", call)
    assert second_call(renderer, seen("any", dialect, change), output) == (None, Drift.EDITED)


HARNESSES = ("claude", "codex", "pi", "opencode", "cline", "qwen", "gemini", "mini", "terminus", "openhands")
DIALECTS = {"claude": MESSAGES, "codex": RESPONSES}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "the retry first"])
@pytest.mark.parametrize("name", HARNESSES)
def test_a_retry_while_the_first_is_still_sampled_is_its_twin(renderer, name, order):
    dialect = DIALECTS.get(name, CHAT)
    trial, opening = Trial(renderer, dialect), rw.opening(dialect)
    heard = trial.ask_at_once([(opening, sampled("a", LOOK)), (opening, sampled("b", LOOK))], order)
    assert [call.plan.drift for call in trial.calls.values()] == [(Drift.FIRST, Drift.RETRY_TWIN)[i] for i in order]
    assert heard[1] is not None
    trial.ask(followed(opening, heard[1], ["R"]), sampled("ok"))
    kept = order.index(1)
    assert trial.last.plan.parent == kept and check(trial) == {kept, 2}
    assert list(trial.session.fidelity().excluded) == ["superseded"]


@pytest.mark.parametrize("answer", [sampled("same"), sampled("", LOOK), sampled("")], ids=["text", "call", "empty"])
@pytest.mark.parametrize("name", ["claude", "codex", "pi", "opencode", "qwen"])
def test_a_lost_answer_is_dropped_and_the_next_try_is_gone_on_from(renderer, name, answer):
    dialect = DIALECTS.get(name, CHAT)
    trial, opening = Trial(renderer, dialect), rw.opening(dialect)
    trial.ask(opening, answer)
    trial.lose({0})
    again = trial.ask(opening, answer)
    assert (trial.last.plan.parent, trial.last.plan.drift) == (None, Drift.RETRY_TWIN)
    trial.ask(followed(opening, again, ["R"]), sampled("ok"))
    assert trial.last.plan.parent == 1 and check(trial) == {1, 2}
    assert trial.session.fidelity().excluded == {"undelivered": len(answer.ids)}


@pytest.mark.parametrize("calls", [(), (LOOK,)], ids=["text", "with a call"])
@pytest.mark.parametrize("name", ["cline", "qwen"])
def test_the_text_of_a_cut_stream_glued_to_the_next_try_is_an_edit(renderer, name, calls):
    trial, opening = Trial(renderer, CHAT), rw.opening(CHAT)
    trial.ask(opening, sampled("this stream is cut in the middle of", kept=0.5, finish="length"))
    trial.lose({0})
    again = trial.ask(opening, sampled("after cut", *calls))
    trial.ask(rw.partial_glued(followed(opening, again, ["R"]), "this stream is "), sampled("ok"))
    assert (trial.last.plan.parent, trial.last.plan.drift) == (None, Drift.EDITED)
    assert check(trial) == {1, 2}


def test_qwen_asks_again_for_an_empty_answer_and_for_a_cut_one_with_another_limit(renderer):
    trial, opening = Trial(renderer, CHAT), rw.opening(CHAT)
    outputs = (sampled(""), sampled(""), sampled("cut", kept=0.5, finish="length"), sampled("", LOOK))
    for i, output in enumerate(outputs):
        answer = trial.ask(opening | {"max_tokens": 64_000 + i}, output)
    trial.ask(followed(opening, answer, ["R"]), sampled("ok"))
    assert trial.last.plan.parent == 3 and check(trial) == {3, 4}
    assert [call.plan.drift for call in trial.calls.values()] == ["first", *["retry_twin"] * 3, "none"]


@pytest.mark.parametrize(
    "case",
    [
        seen("claude", MESSAGES, rw.compacted_to_last_turn, rw.billing_changed),
        seen("codex", RESPONSES, rw.compacted_to_summary, rw.item_ids_dropped),
        *(seen("opencode", dialect, rw.compacted_to_answer) for dialect in Dialect),
        seen("openhands", CHAT, rw.compacted_to_last_turn, rw.as_parts),
        seen("qwen", CHAT, rw.compacted_with_own_words),
    ],
    ids=named,
)
def test_a_compaction_is_a_fork(renderer, case):
    _, dialect, changes = case
    trial, history = Trial(renderer, dialect), rw.opening(dialect)
    for _ in range(3):
        history = followed(history, trial.ask(history, sampled("I look", LOOK)), ["R"])
    fork = retold(history, changes)
    answer = trial.ask(fork, sampled("", LOOK))
    assert (trial.last.plan.parent, trial.last.plan.drift) == (None, Drift.COMPACTION)
    trial.ask(followed(fork, answer, ["R"]), sampled("ok"))
    assert trial.last.plan.parent == 3 and check(trial) == {0, 1, 2, 3, 4}
    assert len(trial.session.segments()) == 2
