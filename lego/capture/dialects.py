"""Three wire formats to one and back: the one file that touches LiteLLM, and puts right what it gets wrong.

Chat-completions is the form of our own records. A Responses or Messages request goes through LiteLLM to a
handler that stands where LiteLLM expects a provider and keeps the chat-completions messages it is given.
LiteLLM spells assistant turns anew (arguments escaped, long names cut, reasoning trimmed, ids lost or changed),
so those are read here and put in the place of its own.
"""

import contextvars
import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from itertools import groupby
from reprlib import repr as shortened
from types import ModuleType
from typing import Any

from lego.capture.bodies import answer_body
from lego.capture.offers import Offer, offers
from lego.capture.wire import Body, Dialect, Reply, Request, fault_of, name_of, objects
from lego.chat.messages import (
    ROLES,
    BadMessage,
    Message,
    ToolCall,
    clean,
    in_call_order,
    joined,
    json_text,
    read_messages,
    read_part,
    read_parts,
    read_role,
    read_text,
    read_tools,
)

SAMPLING_FIELDS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_sequences", "logprobs"}
    | {"max_tokens", "max_completion_tokens", "max_output_tokens", "frequency_penalty", "presence_penalty"}
    | {"tool_choice", "parallel_tool_calls", "thinking", "reasoning", "reasoning_effort"}
)

_PROVIDER = "lego"
_SPEAKERS = {name: role for name, role in ROLES.items() if role != "tool"}
# About tools that only a vendor's own models have. They are never offered here, so no answer of ours has
# made such an item, and all other text of the history is in other items.
_VENDOR_ITEMS = frozenset(
    {"web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call"}
    | {"computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output"}
    | {"shell_call", "shell_call_output", "tool_search_call", "tool_search_output", "mcp_list_tools"}
    | {"mcp_approval_request", "mcp_approval_response"}
)
_SEALED = re.compile(r"(rs_[0-9a-f]+):(.*)", re.DOTALL)

Sample = Callable[[Request], Awaitable[Reply]]


async def converse(dialect: Dialect, body: Body, sample: Sample) -> dict[str, Any]:
    """The plain answer body to a request body. Raises BadMessage, and whatever `sample` raises."""
    reply = await sample(await read(dialect, body))
    return answer_body(dialect, reply, body)


async def read(dialect: Dialect, body: Body) -> Request:
    """What a request asks. Raises BadMessage."""
    fault = fault_of(body)
    if fault is not None:
        raise BadMessage(f"the body has {fault}")
    asked = {name: body[name] for name in sorted(SAMPLING_FIELDS) if body.get(name) is not None}
    tools = read_tools([offer.tool for offer in offers(dialect, body)])
    return Request(messages=in_call_order(await _HISTORIES[dialect](body)), tools=tools, asked=asked)


# Through LiteLLM.

_translated: contextvars.ContextVar[list[object]] = contextvars.ContextVar("lego_translated")


@cache
def load() -> ModuleType:
    """LiteLLM, imported once (seconds of CPU) and offline."""
    # The only switch LiteLLM offers against fetching its price list while it is imported.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    for name in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
        # A line for each call, and a second handler beside ours.
        logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger(name).handlers.clear()
    litellm.suppress_debug_info = True
    litellm.custom_provider_map = [{"provider": _PROVIDER, "custom_handler": _handler(litellm)}]
    # Otherwise inner system messages of the Messages API become user messages with a note of LiteLLM's.
    entry = {"litellm_provider": _PROVIDER, "mode": "chat", "supports_mid_conversation_system": True}
    litellm.register_model({f"{_PROVIDER}/policy": entry})
    return litellm


def _handler(litellm: ModuleType) -> object:
    from litellm.types.utils import Choices, ModelResponse
    from litellm.types.utils import Message as WireMessage

    class Handler(litellm.CustomLLM):
        """Keeps the messages it is given."""

        async def acompletion(self, *args: Any, **kwargs: Any) -> ModelResponse:
            _translated.get().append(kwargs["messages"])
            response = kwargs["model_response"]
            # A price that is known is not worked out.
            response._hidden_params["response_cost"] = 0.0
            response.choices = [Choices(index=0, finish_reason="stop", message=WireMessage(content=""))]
            return response

    return Handler()


def _unlogged() -> AbstractContextManager[None]:
    """LiteLLM without its log of prices, which costs as much as the translation and leaves tasks behind."""
    from litellm._internal_context import internal_sub_call

    return internal_sub_call()


Entry = Message | dict[str, Any]
"""A part of a history on its way to LiteLLM: an assistant turn as read here, or what is LiteLLM's to read."""


async def _through_litellm(
    entry_point: Callable[..., Awaitable[object]], name: str, entries: list[Entry], **arguments: Any
) -> tuple[Message, ...]:
    """What LiteLLM makes of a history, its argument of that name, with the assistant turns as read here."""
    if not entries:
        raise BadMessage("the request has no message to answer")
    # Of an assistant turn its place is enough.
    arguments[name] = [{"role": e.role, "content": "."} if isinstance(e, Message) else e for e in entries]
    _translated.set(seen := [])
    try:
        with _unlogged():
            await entry_point(model=f"{_PROVIDER}/policy", **arguments)
    except Exception as error:  # LiteLLM lets any error of a translator out
        first_line = str(error).partition("\n")[0]
        raise BadMessage(f"the request cannot be read: {first_line[:200]}") from error
    messages = read_messages(seen[0] if seen else None)
    told = [part for entry in entries for part in _told(entry)]
    start = len(messages) - len(told)
    if [message.role for message in messages[start:]] != [role for role, _ in told]:
        raise BadMessage("the request cannot be read: not all of its messages can be told apart")
    turns = iter([entry for entry in entries if isinstance(entry, Message)])
    read_here = [
        next(turns) if message.role == "assistant" else replace(message, call_id=call_id)
        for message, (_, call_id) in zip(messages[start:], told, strict=True)
    ]
    return (*messages[:start], *read_here)


def _told(entry: Entry) -> list[tuple[str, str]]:
    """What an entry is to become: the role of each message, and the call that it answers."""
    if isinstance(entry, Message):
        return [(entry.role, "")]
    content = entry.get("content")
    if isinstance(content, list):
        return [("tool", result["tool_use_id"]) for result in content]
    return [(entry.get("role", "tool"), entry.get("call_id", ""))]


def _one_turn_each(entries: Iterable[Entry]) -> list[Entry]:
    turns: list[Entry] = []
    for entry in entries:
        last = turns[-1] if turns else None
        if isinstance(entry, Message) and isinstance(last, Message):
            turns[-1] = joined(last, entry)
        else:
            turns.append(entry)
    return turns


# What goes in: the history.


async def _chat_history(body: Body) -> tuple[Message, ...]:
    return read_messages(_wanted(body, "messages"))


async def _responses_history(body: Body) -> tuple[Message, ...]:
    if body.get("previous_response_id"):
        raise BadMessage("previous_response_id: answers are not stored here; send the whole input")
    told = body.get("input")
    items = [{"role": "user", "content": told}] if isinstance(told, str) else _wanted(body, "input")
    entries = _one_turn_each(entry for i, item in enumerate(items) for entry in _item(item, f"input[{i}]"))
    instructions = read_text(body.get("instructions"), "instructions")
    return await _through_litellm(load().aresponses, "input", entries, instructions=instructions or None, store=False)


def _item(item: Body, where: str) -> Iterator[Entry]:
    """An input item: what the assistant said as its message, the rest for LiteLLM."""
    items = (item["id"],) if isinstance(item.get("id"), str) else ()
    match item.get("type") or "message":
        case "message":
            role, text = read_role(item, where, _SPEAKERS), read_text(item.get("content"), f"{where}.content")
            yield Message(role, text, items=items) if role == "assistant" else {"role": role, "content": text}
        case "reasoning":
            text, item_id = _reasoning(item, where)
            yield Message("assistant", reasoning=text, items=items or item_id)
        case "function_call" | "custom_tool_call" as kind:
            arguments = _arguments(item.get("arguments")) if kind == "function_call" else _freeform_arguments(item)
            call = ToolCall(name_of(item, where, "call_id"), _offered_name(item, where), arguments)
            yield Message("assistant", calls=(call,), items=items)
        case "function_call_output" | "custom_tool_call_output":
            output = read_text(item.get("output"), f"{where}.output")
            yield {"type": "function_call_output", "call_id": name_of(item, where, "call_id"), "output": output}
        case str(kind) if kind in _VENDOR_ITEMS:
            return
        case kind:
            raise BadMessage(f"{where}.type: {shortened(kind)} found, which cannot be read here")


def _reasoning(item: Body, where: str) -> tuple[str, tuple[str, ...]]:
    """The text of a reasoning item, its summary where there is no more, and the id that `text_items` sealed."""
    sealed = item.get("encrypted_content")
    mine = _SEALED.match(sealed) if isinstance(sealed, str) else None
    text = mine[2] if mine else ""
    for name in ("summary", "content"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(
            isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts
        ):
            raise BadMessage(f"{where}.{name}: a list of parts with `text` is wanted")
        text = "".join(part["text"] for part in parts) or text
    return read_text(text, where), (mine[1],) if mine else ()


def _arguments(value: object) -> str:
    """Arguments as text; none at all are an empty object."""
    return clean(value) if isinstance(value, str) else json_text({} if value is None else value)


def _freeform_arguments(item: Body) -> str:
    """The arguments that a custom tool's input was sampled as; `_call_item` gave what was no proper input as it is."""
    text = read_text(item.get("input"), "input")
    return text if str(item.get("id")).startswith("fc_") else json_text({"input": text})


def _offered_name(item: Body, where: str) -> str:
    namespace = item.get("namespace")
    return Offer(name_of(item, where), namespace if isinstance(namespace, str) else "").offered


async def _messages_history(body: Body) -> tuple[Message, ...]:
    told = enumerate(_wanted(body, "messages"))
    entries = _one_turn_each(entry for i, message in told for entry in _entries(message, f"messages[{i}]"))
    system = [{"type": "text", "text": text} for text in read_parts(body.get("system"), "system") if text]
    # LiteLLM looks for its own proxy's router on every call, 140 ms of CPU, unless it is given one.
    arguments = {"max_tokens": 1, "litellm_router": object()} | ({"system": system} if system else {})
    return await _through_litellm(load().anthropic.messages.acreate, "messages", entries, **arguments)


def _entries(message: Body, where: str) -> Iterator[Entry]:
    """A message with its blocks in their order, which LiteLLM changes: it tells all tool results first."""
    role = read_role(message, where, _SPEAKERS)
    placed = [(part, f"{where}.content[{i}]") for i, part in enumerate(_parts(message.get("content"), where))]
    if role == "assistant":
        yield Message(role)
        yield from (_block_said(block, place) for block, place in placed)
        return
    for is_result, group in groupby(placed, key=lambda pair: role == "user" and _kind(pair[0]) == "tool_result"):
        if is_result:
            yield {"role": role, "content": [_result(block, place) for block, place in group]}
        elif text := "".join(_block_text(block, place) for block, place in group):
            yield {"role": role, "content": text}


def _parts(content: object, where: str) -> list[Any]:
    if content is not None and not isinstance(content, str | list):
        raise BadMessage(f"{where}.content: {type(content).__name__} found, a string or a list of blocks is wanted")
    return content if isinstance(content, list) else [content] if content else []


def _kind(block: object) -> object:
    return block.get("type") if isinstance(block, Mapping) else None


def _block_said(block: Any, where: str) -> Message:
    """One block of an assistant message, as a message."""
    match _kind(block):
        case "thinking":
            signature = block.get("signature")
            items = (signature,) if isinstance(signature, str) and signature else ()
            return Message("assistant", reasoning=read_text(block.get("thinking"), f"{where}.thinking"), items=items)
        case "redacted_thinking":
            return Message("assistant")
        case "tool_use":
            return Message(
                "assistant",
                calls=(ToolCall(name_of(block, where, "id"), name_of(block, where), _arguments(block.get("input"))),),
            )
        case _:
            return Message("assistant", _block_text(block, where))


def _result(block: Body, where: str) -> dict[str, Any]:
    """A tool result as text; an error says so, since a prompt has no other place for `is_error`."""
    parts = enumerate(_parts(block.get("content"), where))
    text = "".join(_block_text(part, f"{where}.content[{i}]") for i, part in parts)
    if block.get("is_error") is True and not text.lower().startswith("error:"):
        text = f"Error: {text}"
    return {"type": "tool_result", "tool_use_id": name_of(block, where, "tool_use_id"), "content": text}


def _block_text(block: Any, where: str) -> str:
    """The text of a block; LiteLLM drops documents, and a tool reference is one that the prompt has already."""
    match block:
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return read_text(text, where)
        case {"type": "document", "source": {"type": "content", "content": content}}:
            return read_text(content, f"{where}.source.content")
        case {"type": "tool_reference", "tool_name": str(name)}:
            return read_text(f"[tool {name}]", where)
        case _:
            return read_part(block, where)


def _wanted(body: Body, name: str) -> list[Any]:
    found = objects(body.get(name), name)
    if not found:
        raise BadMessage(f"{name}: a list of at least one object is wanted")
    return found


_HISTORIES = {
    Dialect.CHAT: _chat_history,
    Dialect.RESPONSES: _responses_history,
    Dialect.MESSAGES: _messages_history,
}
