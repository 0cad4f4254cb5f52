"""Answers as bodies of each wire format, under ids that can be told again.

LiteLLM has no part in them: it has no slot for our ids and signatures, loses details of usage, and keeps the calls
of every answer in one cache for all.
"""

import time
from typing import Any

from lego.capture.offers import Offer, offers
from lego.capture.wire import Body, Dialect, Reply, model_of, object_of
from lego.chat.messages import ToolCall


def answer_body(dialect: Dialect, reply: Reply, body: Body) -> dict[str, Any]:
    """The plain answer to a request body."""
    return _ANSWERS[dialect](reply, body)


def _chat_answer(reply: Reply, body: Body) -> dict[str, Any]:
    message = reply.message
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.calls
    ]
    wire: dict[str, Any] = {"role": "assistant", "content": message.text or (None if calls else "")}
    wire |= {"reasoning_content": message.reasoning} if message.reasoning else {}
    wire |= {"tool_calls": calls} if calls else {}
    finish = "length" if reply.truncated else "tool_calls" if calls else "stop"
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model_of(body),
        "choices": [{"index": 0, "message": wire, "finish_reason": finish, "logprobs": None}],
        "usage": {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.output_tokens,
            "total_tokens": reply.prompt_tokens + reply.output_tokens,
            "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
        },
    }


def _responses_answer(reply: Reply, body: Body) -> dict[str, Any]:
    return responses_head(reply.id, body) | {
        "status": "incomplete" if reply.truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if reply.truncated else None,
        "output": _items(reply, body),
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens},
            "output_tokens": reply.output_tokens,
            "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
            "total_tokens": reply.prompt_tokens + reply.output_tokens,
        },
    }


def responses_head(reply_id: str, body: Body) -> dict[str, Any]:
    """A Responses object before anything is sampled. Of the request only the model: no client reads the rest here."""
    return {
        "id": f"resp_{reply_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": model_of(body),
        "output": [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "store": False,
        "usage": None,
    }


def _items(reply: Reply, body: Body) -> list[dict[str, Any]]:
    calls = reply.message.calls
    items = text_items(reply.id, reply.message.reasoning, reply.message.text, blank=not calls)
    known = {offer.offered: offer for offer in offers(Dialect.RESPONSES, body)} if calls else {}
    for call in calls:
        items.append(_call_item(reply.id, len(items), call, known.get(call.name) or Offer(call.name)))
    return items


def text_items(reply_id: str, reasoning: str, text: str, blank: bool = False) -> list[dict[str, Any]]:
    """The first output items; `blank` asks for a message even without text."""
    items: list[dict[str, Any]] = []
    if reasoning:
        item_id = _item_id("rs", reply_id, 0)
        content = [{"type": "reasoning_text", "text": reasoning}]
        # The AI SDK brings back of a reasoning item this field alone, and nothing of one without it.
        fields = {"summary": [], "content": content, "encrypted_content": f"{item_id}:{reasoning}"}
        items.append({"type": "reasoning", "id": item_id} | fields)
    if text or blank:
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        fields = {"status": "completed", "role": "assistant", "content": content}
        items.append({"type": "message", "id": _item_id("msg", reply_id, len(items))} | fields)
    return items


def _item_id(prefix: str, reply_id: str, index: int) -> str:
    return f"{prefix}_{reply_id}{index:02x}"


def _call_item(reply_id: str, index: int, call: ToolCall, offer: Offer) -> dict[str, Any]:
    """A call under the names that its harness knows it by."""
    common = {"status": "completed", "call_id": call.id, "name": offer.name}
    common |= {"namespace": offer.namespace} if offer.namespace else {}
    if not offer.custom:
        item_id = _item_id("fc", reply_id, index)
        return {"type": "function_call", "id": item_id, **common, "arguments": call.arguments}
    match object_of(call.arguments):
        case {"input": str(text), **rest} if not rest:
            prefix = "ctc"
        case _:
            # Not what was asked for: the harness is to see and refuse all of it, and the id tells its echo apart.
            prefix, text = "fc", call.arguments
    return {"type": "custom_tool_call", "id": _item_id(prefix, reply_id, index), **common, "input": text}


def _messages_answer(reply: Reply, body: Body) -> dict[str, Any]:
    message = reply.message
    stop = "max_tokens" if reply.truncated else "tool_use" if message.calls else "end_turn"
    head = messages_head(reply.id, body, reply.prompt_tokens, reply.cached_tokens)
    usage = head["usage"] | {"output_tokens": reply.output_tokens}
    content = text_blocks(reply.id, message.reasoning, message.text)
    content += [{"type": "tool_use", "id": c.id, "name": c.name, "input": _input(c.arguments)} for c in message.calls]
    return head | {"content": content, "stop_reason": stop, "usage": usage}


def messages_head(reply_id: str, body: Body, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """A Messages object before anything is sampled."""
    return {
        "id": f"msg_{reply_id}",
        "type": "message",
        "role": "assistant",
        "model": model_of(body),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt_tokens - cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached_tokens,
            "output_tokens": 0,
        },
    }


def text_blocks(reply_id: str, reasoning: str, text: str) -> list[dict[str, Any]]:
    """The first content blocks: thinking, signed with the reply's id, then text."""
    thinking = [{"type": "thinking", "thinking": reasoning, "signature": reply_id}] if reasoning else []
    return thinking + ([{"type": "text", "text": text}] if text else [])


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object; what is none is handed over raw, so that the harness can refuse it."""
    found = object_of(arguments)
    return {"raw_arguments": arguments} if found is None else found


_ANSWERS = {
    Dialect.CHAT: _chat_answer,
    Dialect.RESPONSES: _responses_answer,
    Dialect.MESSAGES: _messages_answer,
}
