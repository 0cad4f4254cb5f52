"""Three wire formats through LiteLLM: the one file that touches it, and puts right what it gets wrong.

A handler of ours stands where LiteLLM expects a provider. It gets each request as chat-completions
messages, whatever it came as, and its answer leaves in the shape of the request.
"""

import contextvars
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from types import ModuleType
from typing import Any

from lego.chat.messages import BadMessage, Message, Tool, read_messages, read_tools

SAMPLING_FIELDS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_sequences", "logprobs"}
    | {"max_tokens", "max_completion_tokens", "max_output_tokens", "frequency_penalty", "presence_penalty"}
    | {"tool_choice", "parallel_tool_calls", "thinking", "reasoning", "reasoning_effort"}
)
_PROVIDER = "lego"


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


Sample = Callable[[Request], Awaitable[Reply]]


@dataclass
class _Exchange:
    """One call on its way through LiteLLM, which would wrap our errors in its own."""

    sample: Sample
    asked: Mapping[str, object]
    reply: Reply | None = None
    error: Exception | None = None


_exchange: contextvars.ContextVar[_Exchange] = contextvars.ContextVar("lego_exchange")


async def converse(dialect: Dialect, body: Mapping[str, Any], sample: Sample) -> dict[str, Any]:
    """The plain answer body to a request body. Raises BadMessage, and whatever `sample` raises."""
    litellm = load()
    asked = {name: body[name] for name in sorted(SAMPLING_FIELDS) if body.get(name) is not None}
    exchange = _Exchange(sample, asked)
    _exchange.set(exchange)
    entry, correct = _ENTRIES[dialect]
    arguments = entry(body)
    call = {
        Dialect.CHAT: litellm.acompletion,
        Dialect.RESPONSES: litellm.aresponses,
        Dialect.MESSAGES: litellm.anthropic.messages.acreate,
    }[dialect]
    try:
        with _unlogged():
            raw = await call(model=f"{_PROVIDER}/policy", **arguments)
    except Exception as error:  # LiteLLM lets any error of a translator out; ours are told apart first
        if exchange.error is not None:
            raise exchange.error from None
        if exchange.reply is not None:
            raise
        raise BadMessage(f"the request cannot be read: {error}") from error
    assert exchange.reply is not None, "LiteLLM answered without asking the provider"
    answer = raw if isinstance(raw, dict) else raw.model_dump()
    return correct(answer, exchange.reply, body)


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


def _unlogged() -> AbstractContextManager[None]:
    """LiteLLM without its log of prices, which costs as much as the translation and leaves tasks behind."""
    from litellm._internal_context import internal_sub_call

    return internal_sub_call()


def _handler(litellm: ModuleType) -> object:
    from litellm.types.utils import Choices, ModelResponse, Usage
    from litellm.types.utils import Message as WireMessage

    class Handler(litellm.CustomLLM):
        """Hands the call on to its exchange."""

        async def acompletion(self, *args: Any, **kwargs: Any) -> ModelResponse:
            exchange = _exchange.get()
            try:
                request = Request(
                    messages=read_messages(kwargs["messages"]),
                    tools=read_tools(kwargs["optional_params"].get("tools")),
                    asked=exchange.asked,
                )
                exchange.reply = reply = await exchange.sample(request)
            except Exception as error:
                exchange.error = error
                raise
            response = kwargs["model_response"]
            # A price that is known is not worked out.
            response._hidden_params["response_cost"] = 0.0
            message = WireMessage(role="assistant", **_wire_message(reply.message))
            response.choices = [Choices(index=0, finish_reason=_finish(reply), message=message)]
            total = reply.prompt_tokens + reply.output_tokens
            response.usage = Usage(
                prompt_tokens=reply.prompt_tokens, completion_tokens=reply.output_tokens, total_tokens=total
            )
            return response

    return Handler()


def _wire_message(message: Message) -> dict[str, Any]:
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.calls
    ]
    wire: dict[str, Any] = {"content": message.text or (None if calls else "")}
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    return wire | ({"tool_calls": calls} if calls else {})


def _finish(reply: Reply) -> str:
    if reply.truncated:
        return "length"
    return "tool_calls" if reply.message.calls else "stop"


# What goes in. Only fields that reach the prompt: LiteLLM refuses or acts on many others.


def _chat_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"messages": _wanted_list(body, "messages"), **_functions(body)}


def _responses_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    if body.get("previous_response_id"):
        raise BadMessage("previous_response_id: answers are not stored here; send the whole input")
    items = body.get("input")
    if not isinstance(items, str):
        items = [item for item in _wanted_list(body, "input") if _known_item(item)]
    instructions = body.get("instructions")
    return {"input": items, "instructions": instructions or None, "store": False, **_functions(body)}


def _messages_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    # LiteLLM looks for its own proxy's router on every call, 140 ms of CPU, unless it is given one.
    router = object()
    tools = [tool for tool in _tool_list(body) if "input_schema" in tool]
    messages = [_one_string(message) for message in _wanted_list(body, "messages")]
    given = {"messages": messages, "tools": tools or None, "system": body.get("system") or None}
    return {"max_tokens": 1, "litellm_router": router} | {k: v for k, v in given.items() if v is not None}


def _wanted_list(body: Mapping[str, Any], name: str) -> list[Any]:
    found = body.get(name)
    if not isinstance(found, list) or not all(isinstance(item, Mapping) for item in found) or not found:
        raise BadMessage(f"{name}: a non-empty list of objects is wanted")
    return found


def _functions(body: Mapping[str, Any]) -> dict[str, Any]:
    """Function tools; kinds that only a vendor's own models know are left out."""
    tools = [tool for tool in _tool_list(body) if tool.get("type") == "function"]
    return {"tools": tools} if tools else {}


def _tool_list(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    raw = body.get("tools") or []
    if not isinstance(raw, list) or not all(isinstance(tool, Mapping) for tool in raw):
        raise BadMessage("tools: a list of objects is wanted")
    return raw


def _known_item(item: Mapping[str, Any]) -> bool:
    return item.get("type", "message") in ("message", "function_call", "function_call_output", "reasoning")


def _one_string(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message, its text-only block list joined: LiteLLM loses an assistant's empty list and all but one block."""
    content = message.get("content")
    plain = isinstance(content, list) and all(isinstance(b, Mapping) and b.get("type") == "text" for b in content)
    if not plain or not isinstance(content, list):
        return dict(message)
    return dict(message) | {"content": "".join(str(block.get("text", "")) for block in content)}


# What comes out.


def _correct_chat(answer: dict[str, Any], reply: Reply, body: Mapping[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant"} | _wire_message(reply.message)
    choice = {"index": 0, "message": message, "finish_reason": _finish(reply), "logprobs": None}
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": "chat.completion",
        "created": answer.get("created") or int(time.time()),
        "model": body.get("model") or "policy",
        "choices": [choice],
        "usage": {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.output_tokens,
            "total_tokens": reply.prompt_tokens + reply.output_tokens,
            "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _correct_responses(answer: dict[str, Any], reply: Reply, body: Mapping[str, Any]) -> dict[str, Any]:
    status = "incomplete" if reply.truncated else "completed"
    return response_head(reply.id, body) | {
        "created_at": answer["created_at"],
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if reply.truncated else None,
        "output": list(_items(answer["output"], reply)),
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens},
            "output_tokens": reply.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.output_tokens,
        },
    }


def response_head(reply_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A Responses object before anything is sampled."""
    return {
        "id": f"resp_{reply_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "model": body.get("model") or "policy",
        "output": [],
        "parallel_tool_calls": True,
        "temperature": body.get("temperature"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "store": False,
        "usage": None,
    }


def _items(output: list[dict[str, Any]], reply: Reply) -> list[dict[str, Any]]:
    """Output items with one identity each, made of the reply's."""
    items: list[dict[str, Any]] = []
    for i, item in enumerate(output):
        match item["type"]:
            case "reasoning":
                items.append(_reasoning_item(f"rs_{reply.id}{i:02x}", reply.message.reasoning))
            case "message" if reply.message.text or not reply.message.calls:
                items.append(_message_item(f"msg_{reply.id}{i:02x}", reply.message.text))
            case "function_call":
                fields = {k: item[k] for k in ("call_id", "name", "arguments")}
                items.append({"type": "function_call", "id": f"fc_{reply.id}{i:02x}", "status": "completed"} | fields)
    return items


def _reasoning_item(item_id: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": item_id, "summary": [], "content": content, "encrypted_content": None}


def _message_item(item_id: str, text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "id": item_id, "status": "completed", "role": "assistant", "content": content}


def _correct_messages(answer: dict[str, Any], reply: Reply, body: Mapping[str, Any]) -> dict[str, Any]:
    stop = "max_tokens" if reply.truncated else "tool_use" if reply.message.calls else "end_turn"
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or "policy",
        "content": _blocks(answer.get("content") or [], reply),
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {
            "input_tokens": reply.prompt_tokens - reply.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reply.cached_tokens,
            "output_tokens": reply.output_tokens,
        },
    }


def _blocks(content: list[dict[str, Any]], reply: Reply) -> list[dict[str, Any]]:
    """Thinking first and signed, then text, then calls with their arguments as an object."""
    thinking = [{"type": "thinking", "thinking": reply.message.reasoning, "signature": reply.id}]
    text = [{"type": "text", "text": reply.message.text}]
    calls = [
        {"type": "tool_use", "id": c.id, "name": c.name, "input": _input(c.arguments)} for c in reply.message.calls
    ]
    assert len(calls) == sum(block.get("type") == "tool_use" for block in content), "LiteLLM lost a call"
    return (thinking if reply.message.reasoning else []) + (text if reply.message.text else []) + calls


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object; what is none is handed over raw, so that the harness can refuse it."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {"raw_arguments": arguments}
    return found if isinstance(found, dict) else {"raw_arguments": arguments}


_ENTRIES = {
    Dialect.CHAT: (_chat_arguments, _correct_chat),
    Dialect.RESPONSES: (_responses_arguments, _correct_responses),
    Dialect.MESSAGES: (_messages_arguments, _correct_messages),
}
