"""What happened to a session, in order: enough to let it happen again."""

import marshal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from lego.records import Drift


class Step(StrEnum):
    """What a session was told about one of its calls."""

    PLAN = "plan"
    ADD = "add"
    ABANDON = "abandon"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One step of call number `call`."""

    step: Step
    call: int


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A call as it came in: its wire format, what its labels say it is, its body, and when."""

    dialect: str = ""
    hint: Drift = Drift.NONE
    body: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, object] = field(default_factory=dict)
    """Sampling fields as the harness sent them; the recipe's are used."""
    at: float = 0.0
    """Seconds since the trial began."""


NOWHERE = Origin()
"""A call made by hand."""


class Journal:
    """All calls of a session, and its events in order."""

    def __init__(self) -> None:
        self.origins: list[Origin] = []
        self.events: list[Event] = []
        self.refusals: dict[int, str] = {}
        """Calls that were refused when they were to be planned, and why."""

    def asked(self, origin: Origin) -> int:
        """Takes a call in; returns its number."""
        before = self.origins[-1].body if self.origins else {}
        self.origins.append(replace(origin, body=_sharing(origin.body, before)))
        self.note(Step.PLAN, len(self.origins) - 1)
        return len(self.origins) - 1

    def note(self, step: Step, call: int) -> None:
        """The next event."""
        self.events.append(Event(step=step, call=call))


def _sharing(body: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The body, made of the objects of the body before where both hold the same: histories are told again and again."""
    return {name: _shared(value, before.get(name)) for name, value in body.items()}


def _shared(value: Any, before: Any) -> Any:
    if not isinstance(value, list) or not isinstance(before, list):
        return before if _same(value, before) else value
    known = min(len(value), len(before))
    return [b if _same(a, b) else a for a, b in zip(value[:known], before, strict=False)] + value[known:]


def _same(a: Any, b: Any) -> bool:
    # Not ==, to which 1, 1.0 and true are one; version 2 has no back references, so equal values have equal bytes.
    return marshal.dumps(a, 2) == marshal.dumps(b, 2)
