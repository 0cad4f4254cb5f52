"""Lets a recorded session happen again, and says where it comes out differently."""

from collections.abc import Callable, Iterator

import numpy as np

from lego.capture import dialects
from lego.capture.journal import Event, Origin, Step
from lego.capture.recording import Recording, trained
from lego.capture.session import CANCELLED, LimitReached, Plan, Renders, Session
from lego.capture.tape import common
from lego.capture.wire import Dialect
from lego.chat.messages import BadMessage
from lego.records import Ids, Turn

CONTEXT = 12
"""Tokens shown on both sides of the first that differs."""


async def again(recording: Recording, renderer: Renders) -> Session:
    """The session that the recorded requests and answers make with this renderer. Raises BadMessage."""
    session = Session(recording.uid, renderer, recording.limits)
    plans: dict[int, Plan] = {}
    turns = dict(zip(recording.calls, recording.turns, strict=True))
    for event in recording.events:
        if event.step is Step.PLAN:
            await _plan(session, recording.origins[event.call], plans)
        elif event.call in plans:
            _settle(session, event, plans[event.call], turns[event.call])
    return session


async def _plan(session: Session, origin: Origin, plans: dict[int, Plan]) -> None:
    request = await dialects.read(Dialect(origin.dialect), origin.body)
    try:
        plan = session.plan(request.messages, request.tools, origin)
    except (LimitReached, BadMessage):
        return
    plans[plan.call] = plan


def _settle(session: Session, event: Event, plan: Plan, turn: Turn) -> None:
    made = turn.generation
    if event.step is Step.ADD:
        session.add(plan, made, sampling=turn.sampling, seconds=turn.seconds)
    elif event.step is Step.ABANDON:
        output = (made.output_ids, made.logprobs)
        session.abandon(plan, turn.rejected or CANCELLED, sampling=turn.sampling, output=output, seconds=turn.seconds)
    else:
        session.lost(next(t.index for t in session.turns if session.plan_of(t.index).call == event.call))


def differences(recording: Recording, session: Session, decode: Callable[[Ids], str]) -> Iterator[str]:
    """One line for each thing that came out differently; none if the tree is the same."""
    if len(recording.turns) != len(session.turns):
        yield f"{len(recording.turns)} turns recorded, {len(session.turns)} now"
    for call in sorted(session.journal.refusals.keys() & set(recording.calls)):
        yield f"call {call} is refused now: {session.journal.refusals[call]}"
    if recording.trained != trained(session):
        yield f"trainable tokens of the segments were {list(recording.trained)}, are {list(trained(session))}"
    for before, now in zip(recording.turns, session.turns, strict=False):
        for name in ("parent", "drift", "rejected"):
            if getattr(before, name) != getattr(now, name):
                yield f"turn {now.index}: {name} was {getattr(before, name)}, is {getattr(now, name)}"
        if not np.array_equal(before.prompt_ids, now.prompt_ids):
            yield f"turn {now.index}: {first_difference(before.prompt_ids, now.prompt_ids, decode)}"


def first_difference(before: Ids, now: Ids, decode: Callable[[Ids], str]) -> str:
    """The first token that differs between two prompts, with what is around it."""
    at = common(before, now)
    pieces = (now[max(0, at - CONTEXT) : at], before[at : at + CONTEXT], now[at : at + CONTEXT])
    same, old, new = map(decode, pieces)
    ids = [int(side[at]) if at < len(side) else None for side in (before, now)]
    return f"token {at} of the prompt was {ids[0]}, is {ids[1]}: after {same!r} came {old!r}, now {new!r}"
