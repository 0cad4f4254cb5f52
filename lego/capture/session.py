"""The tree of a trial's turns: plans each model call and records what was sampled; no I/O."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from lego.capture import keys
from lego.capture.keys import Key
from lego.capture.segments import account, segments_of
from lego.chat.messages import Message, Tool, ToolCall
from lego.chat.render import Parsed
from lego.errors import EngineError
from lego.records import Drift, Fidelity, Generation, Ids, Outcome, Sampling, Segment, Turn, VersionSpan

log = logging.getLogger(__name__)

CANCELLED = "cancelled"
UNDELIVERED = "undelivered"
SUPERSEDED = "superseded"
SIDE_REQUEST = "side_request"


class Renders(Protocol):
    """What a session needs of `lego.chat.render.Renderer`."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids: ...
    def extend(self, prompt_ids: Ids, output_ids: Ids, new: Sequence[Message], tools: Sequence[Tool]) -> Ids | None: ...
    def parse(self, output_ids: Ids, prompt_ids: Ids | None = None) -> Parsed: ...


class ContextExceeded(Exception):
    """The prompt leaves no room for an answer."""

    def __init__(self, found: int, limit: int) -> None:
        super().__init__(f"prompt of {found} tokens, limit {limit}")
        self.found, self.limit = found, limit


class TurnLimit(Exception):
    """The trial has used all its model calls."""


class SessionClosed(Exception):
    """The trial is over."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one trial may use, and what its turns must bring."""

    context_tokens: int = 32_768
    """Prompt and answer together."""
    max_turns: int = 100
    experts: int | None = None
    """Number of experts if routing must be captured; None for a model without."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One model call before it is sampled."""

    prompt_ids: Ids
    parent: int | None
    drift: Drift
    routing_start: int
    """The first routing row that no earlier turn of this path has."""
    room: int
    """Tokens that an answer may have."""
    key: Key
    tools: tuple[Tool, ...]
    aside: bool
    """Without tools and not known to be a compaction: a side request if other calls have tools."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A turn as the harness sees it; `message.calls` carry our ids."""

    message: Message
    truncated: bool


class Session:
    """All turns of one trial. `uid` must be unique among all trials: tool-call ids are made of it."""

    def __init__(self, uid: str, renderer: Renders, limits: Limits) -> None:
        self.uid = uid
        self.limits = limits
        self.closed = False
        self.breach: Outcome | None = None
        """The limit that ended the trial, if one did."""
        self.asked: dict[int, Mapping[str, object]] = {}
        """Sampling fields the harness sent, by turn; the recipe's were used."""
        self.answers: dict[int, Answer] = {}
        self._renderer = renderer
        self._turns: list[Turn] = []
        self._plans: list[Plan] = []
        self._rows: list[int] = []
        self._ends: dict[Key, int] = {}
        self._ids: dict[str, int] = {}
        self._planned: set[Key] = set()
        self._systems: set[Key] = set()
        self._had_tools = False

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    def plan(self, messages: tuple[Message, ...], tools: tuple[Tool, ...], hint: Drift = Drift.NONE) -> Plan:
        """Ids to sample from. `hint` is what the request's own labels say it is.

        Raises SessionClosed, TurnLimit, ContextExceeded.
        """
        self._admit()
        chain = self._chain(messages, tools)
        parent, prompt = self._extension(chain, messages, tools)
        if prompt is None:
            parent, prompt = None, self._renderer.render(messages, tools)
        elif parent is not None and self._turns[parent].rejected == UNDELIVERED:
            self._turns[parent] = replace(self._turns[parent], rejected=None)
        self._check_room(len(prompt))
        drift = self._drift(parent, chain, messages, tools, hint)
        self._note(chain, messages, tools)
        return Plan(
            prompt_ids=prompt,
            parent=parent,
            drift=drift,
            routing_start=self._rows[parent] if parent is not None else 0,
            room=self.limits.context_tokens - len(prompt),
            key=chain[-1],
            tools=tools,
            aside=not tools and hint is not Drift.COMPACTION,
        )

    def prompt(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> Ids:
        """The ids that a call with this history would be sampled from; plans nothing."""
        _, ids = self._extension(self._chain(messages, tools), messages, tools)
        return self._renderer.render(messages, tools) if ids is None else ids

    def add(
        self,
        plan: Plan,
        generation: Generation,
        *,
        sampling: Sampling,
        asked: Mapping[str, object] | None = None,
        seconds: float = 0.0,
    ) -> Turn:
        """Records what was sampled for the plan; a turn that fails an invariant is kept, but untrainable.

        Raises SessionClosed, EngineError.
        """
        if self.closed:
            raise SessionClosed(self.uid)
        if generation.output_ids.size and int(generation.output_ids.min()) < 0:
            raise EngineError(f"the engine sampled id {int(generation.output_ids.min())}")
        rejected = fault(plan, generation, sampling, self.limits.experts)
        if rejected:
            log.error("turn %d rejected: %s", len(self._turns), rejected)
        turn = self._append(plan, generation, sampling, rejected, seconds)
        self.asked[turn.index] = dict(asked or {})
        self._answer(plan, turn)
        return turn

    def cancel(self, plan: Plan, *, sampling: Sampling, seconds: float = 0.0) -> Turn:
        """Records a call whose client went before anything was sampled to its end."""
        return self._append(plan, _nothing(plan), sampling, CANCELLED, seconds)

    def lost(self, index: int) -> None:
        """Marks an answer that did not reach the client; a later call that extends it takes this back."""
        if self._turns[index].rejected is None:
            self._turns[index] = replace(self._turns[index], rejected=UNDELIVERED)

    def close(self) -> None:
        self.closed = True

    def segments(self) -> tuple[Segment, ...]:
        """Every trainable token once, in its own context."""
        return segments_of(self._turns, self._excluded())

    def fidelity(self) -> Fidelity:
        """The token account: sampled = trained + excluded."""
        return account(self._turns, self._excluded())

    def _admit(self) -> None:
        if self.closed:
            raise SessionClosed(self.uid)
        used = sum(t.rejected != CANCELLED and not (p.aside and self._had_tools) for t, p in self._pairs())
        if used >= self.limits.max_turns:
            self.breach = self.breach or Outcome.TURN_LIMIT
            raise TurnLimit(f"{used} model calls, limit {self.limits.max_turns}")

    def _check_room(self, tokens: int) -> None:
        if tokens >= self.limits.context_tokens:
            self.breach = self.breach or Outcome.CONTEXT_EXCEEDED
            raise ContextExceeded(tokens, self.limits.context_tokens)

    def _chain(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Key]:
        """Keys of all prefixes of the history; our own answers count as the turn that made them."""
        schemas: dict[str, Mapping] | None = None
        chain = [keys.tools_key(tools)]
        for message in messages:
            owner = self._owner(message)
            if owner is not None:
                schemas = keys.schemas_of(tools) if schemas is None else schemas
            mine = owner is not None and self._unchanged(owner, message, schemas or {})
            fields = ("turn", str(owner)) if mine else keys.content_key(message)
            chain.append(keys.digest(chain[-1], *fields))
        return chain

    def _owner(self, message: Message) -> int | None:
        """The turn that made all calls of this message."""
        owners = {self._ids.get(call.id) for call in message.calls}
        return owners.pop() if len(owners) == 1 else None

    def _unchanged(self, owner: int, told: Message, schemas: Mapping[str, Mapping]) -> bool:
        answer = self.answers[owner].message
        return answer.reasoning.strip() == told.reasoning.strip() and keys.same_answer(answer, told, schemas)

    def _extension(
        self, chain: list[Key], messages: tuple[Message, ...], tools: tuple[Tool, ...]
    ) -> tuple[int | None, Ids | None]:
        """The turn whose prompt and answer this history begins with, and the ids that continue it."""
        last = max((i for i, m in enumerate(messages) if m.role == "assistant"), default=None)
        index = self._ends.get(chain[last + 1]) if last is not None else None
        if last is None or index is None:
            return None, None
        turn = self._turns[index]
        ids = self._renderer.extend(turn.prompt_ids, turn.generation.output_ids, messages[last + 1 :], tools)
        return index, ids

    def _drift(
        self, parent: int | None, chain: list[Key], messages: Sequence[Message], tools: Sequence[Tool], hint: Drift
    ) -> Drift:
        if chain[-1] in self._planned:
            return Drift.RETRY_TWIN
        if parent is not None:
            return Drift.NONE
        if hint is not Drift.NONE:
            return hint
        if not self._planned:
            return Drift.FIRST
        if self._had_tools and not tools:
            return Drift.SIDE_REQUEST
        return self._break(messages, tools)

    def _break(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Drift:
        """Why a history with tools does not continue any turn, as far as the history tells."""
        if any(self._lost_reasoning(m) for m in messages if m.role == "assistant"):
            return Drift.REASONING_DROPPED
        if any(self._owner(m) is not None for m in messages):
            calls = sum(len(m.calls) for m in messages)
            return Drift.COMPACTION if calls < len(self._ids) // 2 else Drift.EDITED
        if self._system(messages, tools) in self._systems:
            return Drift.COMPACTION
        return Drift.SUBAGENT if tools else Drift.UNKNOWN

    def _lost_reasoning(self, told: Message) -> bool:
        """Whether one of our answers was told without its reasoning."""
        ids = [call.id for call in told.calls]
        mine = (a.message for a in self.answers.values() if a.message.reasoning.strip() and not told.reasoning.strip())
        return any([c.id for c in m.calls] == ids and m.text.strip() == told.text.strip() for m in mine)

    def _system(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Key:
        text = messages[0].text if messages and messages[0].role == "system" else ""
        return keys.digest(keys.tools_key(tools), text)

    def _note(self, chain: list[Key], messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        self._planned.add(chain[-1])
        self._systems.add(self._system(messages, tools))
        self._had_tools |= bool(tools)

    def _append(
        self, plan: Plan, generation: Generation, sampling: Sampling, rejected: str | None, seconds: float
    ) -> Turn:
        turn = Turn(
            index=len(self._turns),
            parent=plan.parent,
            drift=plan.drift,
            prompt_ids=plan.prompt_ids,
            generation=generation,
            sampling=sampling,
            rejected=rejected,
            seconds=seconds,
        )
        self._turns.append(turn)
        self._plans.append(plan)
        self._rows.append(_rows_known(plan, generation, rejected))
        return turn

    def _answer(self, plan: Plan, turn: Turn) -> None:
        output = turn.generation.output_ids
        parsed = self._renderer.parse(output, plan.prompt_ids)
        calls = tuple(
            ToolCall(f"call_{self.uid}{turn.index:05x}{i:02x}", c.name, c.arguments) for i, c in enumerate(parsed.calls)
        )
        message = Message("assistant", parsed.content, parsed.reasoning, calls)
        truncated = turn.generation.finish == "length"
        self.answers[turn.index] = Answer(message=message, truncated=truncated)
        self._ids |= {call.id: turn.index for call in calls}
        self._ends[keys.digest(plan.key, "turn", str(turn.index))] = turn.index
        self._ends[keys.digest(plan.key, *keys.content_key(message))] = turn.index

    def _pairs(self) -> list[tuple[Turn, Plan]]:
        return list(zip(self._turns, self._plans, strict=True))

    def _excluded(self) -> dict[int, str]:
        """Untrainable turns and why."""
        extended = {t.parent for t in self._turns if t.rejected != CANCELLED}
        causes: dict[int, str] = {}
        latest: dict[Key, int] = {}
        for turn, plan in self._pairs():
            if turn.rejected:
                causes[turn.index] = turn.rejected
            elif plan.aside and self._had_tools:
                causes[turn.index] = SIDE_REQUEST
            else:
                latest[plan.key] = self._accepted(turn, latest.get(plan.key), extended, causes)
        return causes

    @staticmethod
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


def fault(plan: Plan, generation: Generation, sampling: Sampling, experts: int | None) -> str | None:
    """The first invariant that a generation breaks, as a word to count by; None if it keeps all."""
    n = len(generation.output_ids)
    logprobs = generation.logprobs
    if generation.prompt_len != len(plan.prompt_ids):
        return "prompt_length"
    if n == 0 or n > sampling.max_tokens:
        return "output_ids"
    if generation.finish not in ("stop", "length"):
        return "finish"
    if len(logprobs) != n or not np.isfinite(logprobs).all() or float(logprobs.max()) > 1e-3:
        return "logprobs"
    if not _covers(generation.versions, n):
        return "versions"
    return _routing_fault(generation, plan.routing_start, experts)


def _covers(spans: Sequence[VersionSpan], n: int) -> bool:
    at = 0
    for span in spans:
        if span.start != at or span.stop <= at:
            return False
        at = span.stop
    return at == n


def _routing_fault(generation: Generation, start: int, experts: int | None) -> str | None:
    rows = generation.routing
    if experts is None:
        return None
    if rows is None:
        return "routing_missing"
    if generation.routing_start > start:
        return "routing_start"
    wanted = generation.prompt_len + len(generation.output_ids) - 1 - generation.routing_start
    if rows.ndim != 3 or len(rows) != wanted:
        log.error("routing: %d rows wanted, shape %s found", wanted, rows.shape)
        return "routing_rows"
    if rows.size and int(rows.max()) >= experts:
        return "routing_experts"
    ranked = np.sort(rows, axis=-1)
    return "routing_repeats" if bool((ranked[..., 1:] == ranked[..., :-1]).any()) else None


def _rows_known(plan: Plan, generation: Generation, rejected: str | None) -> int:
    """How many leading rows of this turn's path are captured."""
    bad = rejected is not None and rejected != UNDELIVERED
    if generation.routing is None or bad:
        return plan.routing_start
    return generation.routing_start + len(generation.routing)


def _nothing(plan: Plan) -> Generation:
    return Generation(
        prompt_len=len(plan.prompt_ids),
        output_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        routing=None,
        routing_start=0,
        versions=(),
        finish="stop",
    )
