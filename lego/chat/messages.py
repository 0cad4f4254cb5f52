"""Chat messages and tools as values: every wire shape of the same message reads into one record."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from reprlib import repr as shortened

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
# What of a tool reaches the prompt, in the order of every dialect: equal tools are equal prompts.
_TOOL_FIELDS = ("name", "description", "parameters", "strict")
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


class BadMessage(ValueError):
    """A message or tool that cannot be read; the text names the field, the value and what is wanted."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call as text: `arguments` is verbatim, valid JSON or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `call_id` names the call that a tool message answers."""

    role: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    items: tuple[str, ...] = ()
    """Ids under which an assistant message was handed out: Responses items, Messages thinking signatures."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call; `spec` is its JSON text in the chat-completions shape."""

    name: str
    spec: str


def read_messages(raw: object) -> tuple[Message, ...]:
    """Reads chat-completions messages; neighbouring assistant messages are one turn. Raises BadMessage."""
    if not isinstance(raw, list) or not raw:
        raise BadMessage("messages: a non-empty list is wanted")
    messages: list[Message] = []
    for i, item in enumerate(raw):
        message = _message(item, f"messages[{i}]")
        if messages and message.role == messages[-1].role == "assistant":
            message = joined(messages.pop(), message)
        messages.append(message)
    return tuple(messages)


def read_tools(raw: object) -> tuple[Tool, ...]:
    """Reads function tools in the chat-completions shape. Raises BadMessage."""
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise BadMessage(f"tools: {type(raw).__name__} found, a list is wanted")
    return tuple(_tool(item, f"tools[{i}]") for i, item in enumerate(raw))


def joined(a: Message, b: Message) -> Message:
    """Two assistant messages in a row as the one turn they are to a template."""
    text, reasoning = a.text + b.text, a.reasoning + b.reasoning
    return replace(a, text=text, reasoning=reasoning, calls=a.calls + b.calls, items=a.items + b.items)


def in_call_order(messages: Iterable[Message]) -> tuple[Message, ...]:
    """The messages, tool answers in the order of their calls: most templates tell them apart by place alone."""
    ordered: list[Message] = []
    places: dict[str, int] = {}
    for is_tool, group in groupby(messages, key=lambda message: message.role == "tool"):
        if is_tool:
            ordered += sorted(group, key=lambda message: places.get(message.call_id, len(places)))
        else:
            ordered += group
            places = {call.id: i for i, call in enumerate(ordered[-1].calls)}
    return tuple(ordered)


def clean(text: str) -> str:
    """The text with lone surrogates, which no tokenizer can encode, replaced."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def json_text(value: object) -> str:
    """The value as readable JSON; escaped where it holds lone surrogates, so that they stay what they are."""
    text = json.dumps(value, ensure_ascii=False)
    return text if clean(text) == text else json.dumps(value)


def read_role(item: Mapping, where: str, known: Mapping[str, str] = ROLES) -> str:
    """Our role for the item's. Raises BadMessage."""
    name = item.get("role")
    role = known.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadMessage(f"{where}.role: {shortened(name)} found, one of {', '.join(known)} is wanted")
    return role


def read_text(content: object, where: str) -> str:
    """The text of a content field: a string, a list of text parts, or null. Raises BadMessage."""
    return "".join(read_parts(content, where))


def read_parts(content: object, where: str) -> list[str]:
    """The texts of a content field, one for each part. Raises BadMessage."""
    if content is None:
        return []
    if isinstance(content, str):
        return [clean(content)]
    if not isinstance(content, list):
        raise BadMessage(f"{where}: {type(content).__name__} found, a string or a list of text parts is wanted")
    return [read_part(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _message(item: object, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise BadMessage(f"{where}: {type(item).__name__} found, an object is wanted")
    role = read_role(item, where)
    parts = read_parts(item.get("content"), f"{where}.content")
    if role == "system":
        parts = [_BILLING.sub("", part) for part in parts]
    text = "".join(parts)
    if role != "assistant":
        return Message(role, text, call_id=str(item.get("tool_call_id") or ""))
    return Message(role, text, _reasoning(item), _calls(item.get("tool_calls"), f"{where}.tool_calls"))


def read_part(part: object, where: str) -> str:
    """The text of one part of a content field. Raises BadMessage."""
    if isinstance(part, str):
        return clean(part)
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise BadMessage(f"{where}: part type {shortened(kind)} found, only text parts can be read by this model")
    text = part.get("refusal") if kind == "refusal" else part.get("text")
    if not isinstance(text, str):
        raise BadMessage(f"{where}.text: {type(text).__name__} found, a string is wanted")
    return clean(text)


def _reasoning(item: Mapping) -> str:
    for name in ("reasoning_content", "reasoning"):
        if isinstance(item.get(name), str):
            return clean(item[name])
    blocks = item.get("thinking_blocks")
    texts = [b.get("thinking") for b in blocks if isinstance(b, Mapping)] if isinstance(blocks, list) else []
    return clean("".join(t for t in texts if isinstance(t, str)))


def _calls(raw: object, where: str) -> tuple[ToolCall, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise BadMessage(f"{where}: {type(raw).__name__} found, a list is wanted")
    return tuple(_call(item, f"{where}[{i}]") for i, item in enumerate(raw))


def _call(item: object, where: str) -> ToolCall:
    function = item.get("function") if isinstance(item, Mapping) else None
    if not isinstance(item, Mapping) or not isinstance(function, Mapping):
        raise BadMessage(f"{where}: an object with `function` is wanted")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        raise BadMessage(f"{where}.function.name: {shortened(name)} found, a string is wanted")
    text = arguments if isinstance(arguments, str) else json_text(arguments or {})
    return ToolCall(str(item.get("id") or ""), clean(name), clean(text))


def _tool(item: object, where: str) -> Tool:
    function = item.get("function") if isinstance(item, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise BadMessage(f"{where}.function.name: {shortened(name)} found, a string is wanted")
    kept = {name: function[name] for name in _TOOL_FIELDS if function.get(name) is not None}
    return Tool(clean(name), clean(json_text({"type": "function", "function": kept})))
