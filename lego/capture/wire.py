"""The three wire formats: their names, what a request and an answer are, and how single fields are read."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from reprlib import repr as shortened
from typing import Any

from lego.chat.messages import BadMessage, Message, Tool, read_text

Body = Mapping[str, Any]

MAX_DEPTH = 100
"""Levels of lists and objects in a body: more would end the recursion of some reader further on."""


class Dialect(StrEnum):
    """A wire format, by the end of its path."""

    CHAT = "chat/completions"
    RESPONSES = "responses"
    MESSAGES = "messages"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request in any dialect, read."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    asked: Mapping[str, object] = field(default_factory=dict)
    """Sampling fields as the harness sent them."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer before it takes a wire format. `id` is the same in every event and body of the call."""

    id: str
    message: Message
    truncated: bool
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


def model_of(body: Body) -> str:
    name = body.get("model")
    return name if isinstance(name, str) and name else "policy"


def objects(found: object, where: str) -> list[Any]:
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(item, Mapping) for item in found):
        raise BadMessage(f"{where}: a list of objects is wanted")
    return found


def name_of(item: Body, where: str, field: str = "name") -> str:
    """A field that must tell one thing from another."""
    name = item.get(field)
    if not isinstance(name, str) or not name:
        raise BadMessage(f"{where}.{field}: {shortened(name)} found, a string is wanted")
    return read_text(name, where)


def field_of(tool: Body, name: str, kind: type, where: str) -> Any:
    found = tool.get(name)
    if found is not None and not isinstance(found, kind):
        raise BadMessage(f"{where}.{name}: {type(found).__name__} found")
    return found


def object_of(text: str) -> dict[str, Any] | None:
    """The JSON object that a text of arguments spells, if every reader of JSON takes it; blank text is an empty one."""
    try:
        found = json.loads(text or "{}", parse_constant=float)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and fault_of(found) is None else None


def fault_of(value: object) -> str | None:
    """Why the value is no JSON, or none that every reader further on can take; None if it is."""
    level = [value]
    for _ in range(MAX_DEPTH):
        if any(isinstance(node, float) and not math.isfinite(node) for node in level):
            return "a number that is not finite"
        level = [child for node in level for child in _children(node)]
        if not level:
            return None
    return f"more than {MAX_DEPTH} levels"


def _children(node: object) -> Iterable[object]:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
