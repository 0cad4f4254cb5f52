"""The tree of a trial's turns: plans each model call and records what was sampled; no I/O."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from lego.capture import keys
from lego.capture.crosscheck import fault
from lego.capture.histories import Histories, History
from lego.capture.joins import Answer, Joins
from lego.capture.journal import NOWHERE, Journal, Origin, Step
from lego.capture.keys import Key
from lego.capture.kinds import asks_for_summary
from lego.capture.segments import account, segments_of
from lego.capture.tape import Tape
from lego.chat.messages import BadMessage, Message, Tool, ToolCall
from lego.chat.render import Parsed, Partial
from lego.errors import EngineError
from lego.records import CallKind, Drift, Fidelity, Floats, Generation, Ids, Outcome, Sampling, Segment, Turn

log = logging.getLogger(__name__)

CANCELLED = "cancelled"
ENGINE_ERROR = "engine_error"
UNDELIVERED = "undelivered"
SUPERSEDED = "superseded"
SIDE_REQUEST = "side_request"
LEFT_OUT = {kind: SIDE_REQUEST if kind is CallKind.SIDE else str(kind) for kind in CallKind}
"""Why a call is not trained whose kind the recipe leaves out."""
AGENTS = frozenset({CallKind.MAIN, CallKind.SUBAGENT})
"""Kinds that a call takes over from the one that it goes on from."""
UNFINISHED = frozenset({CANCELLED, ENGINE_ERROR})
"""Turns that never became an answer."""
UNHEARD = UNFINISHED | {UNDELIVERED}
"""Turns that the harness knows nothing of: it asks again, and that is the turn that counts."""
MOST_CHARACTERS = 32
"""Taken for more than a token has on average over a whole prompt; a guess that only refuses megabytes early."""


class Renders(Protocol):
    """What a session needs of `lego.chat.render.Renderer`."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids: ...
    def continuation(
        self,
        prompt_ids: Ids,
        output_ids: Ids,
        new: Sequence[Message],
        tools: Sequence[Tool],
        calls: Sequence[ToolCall] = (),
    ) -> Ids | None: ...
    def parse(self, output_ids: Ids, prompt_ids: Ids | None = None, tools: Sequence[Tool] = ()) -> Parsed: ...
    def partial(self, output_ids: Ids, prompt_ids: Ids | None = None) -> Partial: ...


class LimitReached(Exception):
    """A limit of the trial refuses the call."""

    def __init__(self, outcome: Outcome, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome


class ContextExceeded(LimitReached):
    """The prompt leaves no room for an answer."""

    def __init__(self, found: int, limit: int, *, guessed: bool = False) -> None:
        about = "about " if guessed else ""
        super().__init__(Outcome.CONTEXT_EXCEEDED, f"prompt of {about}{found} tokens, limit {limit}")
        self.found, self.limit = found, limit


class SessionClosed(Exception):
    """The trial is over."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one trial may use, what its turns must bring, and which of them train."""

    context_tokens: int = 32_768
    """Prompt and answer together."""
    max_turns: int = 100
    """Model calls; side requests are counted apart, up to as many again."""
    max_sampled: int | None = None
    """Tokens sampled in all calls together, as counted when a call is planned; None for no limit."""
    experts: int | None = None
    """Number of experts if routing must be captured; None for a model without."""
    train_calls: tuple[CallKind, ...] = (CallKind.MAIN, CallKind.SUBAGENT, CallKind.SUMMARY)
    """Kinds of calls that are trained; the others are excluded for a cause of LEFT_OUT."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "train_calls", tuple(CallKind(kind) for kind in self.train_calls))
        for name in ("context_tokens", "max_turns", "max_sampled", "experts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value}, wanted 1 or more")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One model call before it is sampled."""

    call: int
    """The call's number in its session."""
    prompt_ids: Ids
    parent: int | None
    drift: Drift
    routing_start: int
    """The first routing row that no earlier turn of this path has."""
    room: int
    """Tokens that an answer may have."""
    history: History
    tape: Tape
    kind: CallKind
    """What the call is for, unless it turns out to be a side request."""
    aside: bool
    """Without tools, telling no answer of ours, not known as a compaction: a side request if others have tools."""

    @property
    def key(self) -> Key:
        return self.history.chain[-1]


@dataclass(frozen=True)
class _Extension:
    """The prompt of a call, on the tape that the turn it extends lies on."""

    parent: int | None
    tape: Tape
    prompt_ids: Ids


class Session:
    """All turns of one trial. `uid` must be unique among all trials: ids that harnesses echo are made of it."""

    def __init__(self, uid: str, renderer: Renders, limits: Limits) -> None:
        self.uid = uid
        self.limits = limits
        self.closed = False
        self.breach: LimitReached | None = None
        """The first limit that refused a call, if one did; not a full context that the harness got around."""
        self._refused = -1
        """The call that a limit refused last."""
        self.journal = Journal()
        self._renderer = renderer
        self._turns: list[Turn] = []
        self._plans: list[Plan] = []
        self._rows: list[int] = []
        self._routing_shape: tuple[int, ...] | None = None
        self._open: dict[int, Plan] = {}
        self._histories = Histories()
        self._joins = Joins(len(self.reply_id(0)))
        self._planned: set[Key] = set()
        self._systems: dict[Key, CallKind] = {}
        """System texts with their tools, and what the first call was for that had them."""
        self._parents: set[int | None] = set()
        self._in_history: set[int] = set()
        """Calls whose answers were told in a history since: these belong to the work, with tools or without."""
        self._had_tools = False

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    @property
    def answers(self) -> Mapping[int, Answer]:
        """What became of turns that are answers, by turn."""
        return self._joins.answers

    def plan_of(self, turn: int) -> Plan:
        """The plan that a turn was sampled for."""
        return self._plans[turn]

    def reply_id(self, call: int) -> str:
        """The root of all ids that the answer to this call hands out."""
        return f"{self.uid}{call:05x}"

    def plan(self, messages: tuple[Message, ...], tools: tuple[Tool, ...], origin: Origin = NOWHERE) -> Plan:
        """Ids to sample from. Raises SessionClosed, LimitReached, BadMessage."""
        if self.closed:
            raise SessionClosed(self.uid)
        call = self.journal.asked(origin)
        try:
            return self._planned_call(call, messages, tools, origin.hint)
        except (LimitReached, BadMessage) as refused:
            self.journal.refusals[call] = str(refused)
            if isinstance(refused, LimitReached):
                self.breach, self._refused = self.breach or refused, call
            raise

    def cached(self, plan: Plan) -> int:
        """How many ids of the prompt are an earlier turn's."""
        if plan.parent is None:
            return 0
        parent = self._turns[plan.parent]
        return len(parent.prompt_ids) + len(parent.generation.output_ids)

    def prompt(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> Ids:
        """The ids that a call with this history would be sampled from; plans nothing."""
        return self._extension(self._history(messages, tools)).prompt_ids

    def add(self, plan: Plan, generation: Generation, *, sampling: Sampling, seconds: float = 0.0) -> Turn:
        """Records what was sampled for the plan; a turn that fails a cross-check is kept, but untrainable.

        One that comes after `close`, when nobody waits for it, is abandoned. Raises EngineError for ids that cannot
        be read.
        """
        if self.closed:
            output = (generation.output_ids, generation.logprobs)
            return self.abandon(plan, CANCELLED, sampling=sampling, output=output, seconds=seconds)
        if generation.output_ids.size and int(generation.output_ids.min()) < 0:
            self.abandon(plan, ENGINE_ERROR, sampling=sampling, seconds=seconds)
            raise EngineError(f"the engine sampled id {int(generation.output_ids.min())}")
        found = fault(
            generation,
            sampling,
            prompt_len=len(plan.prompt_ids),
            routing_start=plan.routing_start,
            experts=self.limits.experts,
            shape=self._routing_shape,
        )
        if found:
            log.error("turn %d rejected: %s", len(self._turns), found)
        if found is None and generation.routing is not None:
            self._routing_shape = generation.routing.shape[1:]
        turn = self._append(Step.ADD, plan, generation, sampling, found, seconds)
        self._answer(plan, turn)
        if isinstance(self.breach, ContextExceeded) and plan.call > self._refused and plan.kind in AGENTS:
            # The harness made its history shorter and went on.
            self.breach = None
        return turn

    def abandon(
        self,
        plan: Plan,
        cause: str,
        *,
        sampling: Sampling,
        output: tuple[Ids, Floats] | None = None,
        seconds: float = 0.0,
    ) -> Turn:
        """Records a call without an answer, one cause of UNFINISHED, and the ids and logprobs that came of it."""
        return self._append(Step.ABANDON, plan, _piece(plan, output), sampling, cause, seconds)

    def lost(self, index: int) -> None:
        """Marks an answer that did not reach the client; a later call that extends it takes this back."""
        self.journal.note(Step.LOST, self._plans[index].call)
        if self._turns[index].rejected is None:
            self._turns[index] = replace(self._turns[index], rejected=UNDELIVERED)

    def close(self) -> None:
        self.closed = True

    def segments(self) -> tuple[Segment, ...]:
        """Every trainable token once, in its own context."""
        return segments_of(self._turns, self.excluded(), self.kinds())

    def fidelity(self) -> Fidelity:
        """The token account: sampled = trained + excluded."""
        return account(self._turns, self.excluded(), self.kinds())

    def kinds(self) -> tuple[CallKind, ...]:
        """What each turn is for, as far as it is known by now."""
        return tuple(CallKind.SIDE if self._aside(plan) else plan.kind for plan in self._plans)

    def excluded(self) -> dict[int, str]:
        """Untrainable turns and why."""
        extended = {t.parent for t in self._turns if t.rejected not in UNFINISHED}
        causes: dict[int, str] = {}
        latest: dict[Key, int] = {}
        for turn, plan, kind in zip(self._turns, self._plans, self.kinds(), strict=True):
            if turn.rejected:
                causes[turn.index] = turn.rejected
            elif kind not in self.limits.train_calls:
                causes[turn.index] = LEFT_OUT[kind]
            else:
                latest[plan.key] = _accepted(turn, latest.get(plan.key), extended, causes)
        return causes

    # Planning

    def _planned_call(self, call: int, messages: tuple[Message, ...], tools: tuple[Tool, ...], hint: Drift) -> Plan:
        hint = Drift.COMPACTION if asks_for_summary(messages) else hint
        tells = any(self._joins.told(message) is not None for message in messages)
        aside = not (tools or tells or hint is Drift.COMPACTION)
        self._check_turns(aside and self._had_tools)
        self._check_size(messages)
        history = self._history(messages, tools)
        extension = self._extension(history)
        parent = extension.parent
        room = self._room(len(extension.prompt_ids))
        if parent is not None and self._turns[parent].rejected == UNDELIVERED:
            self._turns[parent] = replace(self._turns[parent], rejected=None)
        drift = self._drift(parent, history, hint, aside)
        plan = Plan(
            call=call,
            prompt_ids=extension.prompt_ids,
            parent=parent,
            drift=drift,
            routing_start=self._rows[parent] if parent is not None else 0,
            room=room,
            history=history,
            tape=extension.tape,
            kind=self._kind(parent, history, hint, drift),
            aside=aside,
        )
        self._note(plan)
        return plan

    def _check_turns(self, aside: bool) -> None:
        done = (p for t, p in zip(self._turns, self._plans, strict=True) if t.rejected not in UNHEARD)
        used = sum(self._aside(plan) == aside for plan in (*done, *self._open.values()))
        if used >= self.limits.max_turns:
            raise LimitReached(Outcome.TURN_LIMIT, f"{used} model calls, limit {self.limits.max_turns}")

    def _check_size(self, messages: Sequence[Message]) -> None:
        """Refuses what cannot fit before anybody renders it, which for megabytes takes long."""
        at_least = sum(len(message.text) for message in messages) // MOST_CHARACTERS
        if at_least > self.limits.context_tokens:
            raise ContextExceeded(at_least, self.limits.context_tokens, guessed=True)

    def _aside(self, plan: Plan) -> bool:
        return plan.aside and self._had_tools and plan.call not in self._in_history

    def _room(self, prompt: int) -> int:
        """Tokens left for an answer by the context and by the trial."""
        room = self.limits.context_tokens - prompt
        if room <= 0:
            raise ContextExceeded(prompt, self.limits.context_tokens)
        if self.limits.max_sampled is None:
            return room
        used = sum(len(turn.generation.output_ids) for turn in self._turns)
        if used >= self.limits.max_sampled:
            raise LimitReached(Outcome.TOKEN_LIMIT, f"{used} sampled tokens, limit {self.limits.max_sampled}")
        return min(room, self.limits.max_sampled - used)

    def _history(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> History:
        """The history with the keys of all its beginnings."""
        known = self._histories.beginning(messages, tools)
        new = messages[len(known.messages) :]
        chain = list(known.chain)
        for message in new:
            chain.append(self._joins.key(chain[-1], message, known.tools))
        return History(known.messages + new, known.tools, tuple(chain), len(known.messages))

    def _extension(self, history: History) -> _Extension:
        """The turn whose prompt and answer this history begins with, and the ids that continue it; else all anew."""
        messages = history.messages
        last = next((i for i in reversed(range(len(messages))) if messages[i].role == "assistant"), None)
        index = self._joins.end(history.chain[last + 1]) if last is not None else None
        if last is not None and index is not None:
            more = self._continuation(self._turns[index], messages[last + 1 :], history.tools)
            if more is not None:
                return _Extension(index, *more)
        tape = Tape(self._renderer.render(messages, history.tools))
        return _Extension(None, tape, tape.view())

    def _continuation(self, turn: Turn, new: Sequence[Message], tools: Sequence[Tool]) -> tuple[Tape, Ids] | None:
        output = turn.generation.output_ids
        calls = self.answers[turn.index].message.calls
        more = self._renderer.continuation(turn.prompt_ids, output, new, tools, calls)
        if more is None:
            return None
        return self._plans[turn.index].tape.grown(len(turn.prompt_ids), np.concatenate([output, more]))

    def _note(self, plan: Plan) -> None:
        self._open[plan.call] = plan
        self._histories.keep(plan.history)
        told = (self._joins.told(message) for message in plan.history.messages[plan.history.known :])
        self._in_history |= {self._plans[turn].call for turn in told if turn is not None}
        self._parents.add(plan.parent)
        self._planned.add(plan.key)
        self._systems.setdefault(_system(plan.history), plan.kind)
        self._had_tools |= bool(plan.history.tools)

    # What a call is for

    def _kind(self, parent: int | None, history: History, hint: Drift, drift: Drift) -> CallKind:
        """Its label says it, or else what it goes on from, or else who has its system text and tools."""
        if hint is Drift.COMPACTION:
            return CallKind.SUMMARY
        if hint is Drift.SUBAGENT:
            return CallKind.SUBAGENT
        # The first call with tools is the work's, though a title was asked for before it.
        other = drift is Drift.SUBAGENT and self._had_tools
        return self._whose(parent, history) or (CallKind.SUBAGENT if other else CallKind.MAIN)

    def _whose(self, parent: int | None, history: History) -> CallKind | None:
        """The work's or a sub-agent's, as what this call goes on from; None where nothing tells."""
        if parent is None and (known := self._systems.get(_system(history))) in AGENTS:
            return known
        told = (self._joins.told(message) for message in reversed(history.messages))
        before = parent if parent is not None else next((turn for turn in told if turn is not None), None)
        # Work may go on from a summary, as Terminus-2's does: what it is lies before that.
        return next((kind for turn in self._path(before) if (kind := self._plans[turn].kind) in AGENTS), None)

    # Why a call starts a new root

    def _drift(self, parent: int | None, history: History, hint: Drift, aside: bool) -> Drift:
        if history.chain[-1] in self._planned:
            return Drift.RETRY_TWIN
        if parent is not None:
            return Drift.NONE
        if hint is not Drift.NONE:
            return hint
        if not self._planned:
            return Drift.FIRST
        if aside and self._had_tools:
            return Drift.SIDE_REQUEST
        return self._break(history)

    def _break(self, history: History) -> Drift:
        """Why a history with tools does not continue any turn, as far as the history tells."""
        if any(map(self._joins.without_reasoning, history.messages)):
            return Drift.REASONING_DROPPED
        if self._another_answer(history):
            return Drift.EDITED
        told = [owner for owner in map(self._joins.told, history.messages) if owner is not None]
        if told:
            return Drift.EDITED if set(self._calling(told[-1])) <= set(told) else Drift.COMPACTION
        if _system(history) in self._systems:
            return Drift.COMPACTION
        return Drift.SUBAGENT if history.tools else Drift.UNKNOWN

    def _another_answer(self, history: History) -> bool:
        """Whether where a turn was sampled, the history has an answer that is not that turn's."""
        steps = zip(history.messages, history.chain, history.chain[1:], strict=False)
        return any(m.role == "assistant" and a in self._planned and self._joins.end(b) is None for m, a, b in steps)

    def _calling(self, index: int) -> list[int]:
        """The turns with calls on the path that ends in this turn."""
        return [turn for turn in self._path(index) if self.answers[turn].message.calls]

    def _path(self, index: int | None) -> Iterator[int]:
        while index is not None:
            yield index
            index = self._turns[index].parent

    # Recording

    def _append(
        self, step: Step, plan: Plan, generation: Generation, sampling: Sampling, rejected: str | None, seconds: float
    ) -> Turn:
        origin = self.journal.origins[plan.call]
        turn = Turn(
            index=len(self._turns),
            parent=plan.parent,
            drift=plan.drift,
            prompt_ids=plan.prompt_ids,
            generation=generation,
            sampling=sampling,
            rejected=rejected,
            asked=origin.asked,
            started=origin.at,
            seconds=seconds,
        )
        self.journal.note(step, plan.call)
        del self._open[plan.call]
        self._turns.append(turn)
        self._plans.append(plan)
        self._rows.append(_rows_known(plan, generation, rejected))
        return turn

    def _answer(self, plan: Plan, turn: Turn) -> None:
        parsed = self._renderer.parse(turn.generation.output_ids, plan.prompt_ids, plan.history.tools)
        reply = self.reply_id(plan.call)
        calls = tuple(ToolCall(f"call_{reply}{i:02x}", c.name, c.arguments) for i, c in enumerate(parsed.calls))
        message = Message("assistant", parsed.content, parsed.reasoning, calls)
        answer = Answer(id=reply, message=message, truncated=turn.truncated, reasoning_tokens=parsed.reasoning_tokens)
        self._joins.add(turn.index, answer, plan.key, self._parents)


def _accepted(turn: Turn, twin: int | None, extended: set[int | None], causes: dict[int, str]) -> int:
    """Of twins, those that the harness went on from; if none, the last."""
    if twin is None:
        return turn.index
    if turn.index not in extended and twin in extended:
        causes[turn.index] = SUPERSEDED
        return twin
    if twin not in extended:
        causes[twin] = SUPERSEDED
    return turn.index


def _system(history: History) -> Key:
    first = history.messages[0] if history.messages else None
    return keys.digest(history.chain[0], first.text if first is not None and first.role == "system" else "")


def _rows_known(plan: Plan, generation: Generation, rejected: str | None) -> int:
    """How many leading rows of this turn's path are captured."""
    if generation.routing is None or rejected is not None:
        return plan.routing_start
    return generation.routing_start + len(generation.routing)


def _piece(plan: Plan, output: tuple[Ids, Floats] | None) -> Generation:
    """What came of an answer that was not waited for."""
    ids, logprobs = output or (np.zeros(0, np.int32), np.zeros(0, np.float32))
    return Generation(
        prompt_len=len(plan.prompt_ids),
        output_ids=ids,
        logprobs=logprobs,
        routing=None,
        routing_start=0,
        versions=(),
        finish="abort",
    )
