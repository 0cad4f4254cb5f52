"""When two tellings of one message are the same message, whatever a harness did to its spelling."""

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from lego.capture.wire import object_of
from lego.chat.messages import Message, Tool, ToolCall

Key = bytes


def digest(previous: Key, *fields: str) -> Key:
    """The key of a history one message longer."""
    h = blake2b(previous, digest_size=16)
    for text in fields:
        data = text.encode("utf-8", "surrogatepass")
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.digest()


def tools_key(tools: Iterable[Tool]) -> Key:
    return digest(b"tools", *(tool.spec for tool in tools))


def content_key(message: Message) -> tuple[str, ...]:
    """The fields of a message that reach the prompt, in a spelling that survives a harness.

    Texts of an assistant are stripped: empty, null and blank texts come back as one another.
    """
    if message.role != "assistant":
        return (message.role, message.text)
    calls = [part for call in message.calls for part in (call.name, canonical(call.arguments))]
    return (message.role, message.text.strip(), message.reasoning.strip(), *calls)


def canonical(arguments: str) -> str:
    """JSON arguments by value, numbers as JavaScript reads them; text that is no JSON stays as it is."""
    try:
        return _text(json.loads(arguments or "{}", parse_constant=_refuse))
    except (ValueError, RecursionError):
        return "not JSON: " + arguments


def same_answer(answer: Message, told: Message, schemas: Mapping[str, Mapping]) -> bool:
    """Whether `told`, which carries the answer's ids, is still that answer."""
    if (answer.text.strip(), answer.reasoning.strip()) != (told.text.strip(), told.reasoning.strip()):
        return False
    if len(answer.calls) != len(told.calls):
        return False
    return all(_same_call(a, b, schemas) for a, b in zip(answer.calls, told.calls, strict=True))


def _same_call(sampled: ToolCall, told: ToolCall, schemas: Mapping[str, Mapping]) -> bool:
    """By id alone where the harness could not run the call as sampled: it repairs arguments that are no object, and
    renames what it refuses to a tool that the model is not offered.
    """
    if sampled.id != told.id:
        return False
    values, found = object_of(sampled.arguments), object_of(told.arguments)
    if values is None:
        return True
    if sampled.name != told.name:
        return sampled.name not in schemas or told.name not in schemas
    if found is None:
        return False
    defaults = _defaults(schemas.get(sampled.name, {}))
    added = {k for k in found if k not in values}
    kept = {k: v for k, v in found.items() if k not in added}
    return _text(kept) == _text(values) and all(k in defaults and _text(found[k]) == _text(defaults[k]) for k in added)


def _defaults(schema: Mapping) -> dict[str, object]:
    properties = schema.get("properties")
    fields = properties.items() if isinstance(properties, dict) else ()
    return {k: field["default"] for k, field in fields if isinstance(field, dict) and "default" in field}


def _text(value: object) -> str:
    return json.dumps(_value(value), sort_keys=True)


def _value(value: object) -> object:
    """The value with numbers as doubles; what overflows a double is null, as JSON.stringify prints it."""
    if isinstance(value, dict):
        return {k: _value(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_value(v) for v in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        number = float(value) + 0.0
    except OverflowError:
        return None
    return number if abs(number) != float("inf") else None


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
