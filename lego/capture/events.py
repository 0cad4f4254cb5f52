"""Server-sent events: a plain answer body as the stream of its dialect, so that the two cannot differ."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from lego.capture.dialects import Dialect, response_head

Body = Mapping[str, Any]


class Stream(Protocol):
    """The events of one answer: opening at once, a beat while it is sampled, then closing or failure."""

    def opening(self) -> bytes: ...
    def beat(self) -> bytes: ...
    def closing(self, body: Body) -> bytes: ...
    def failure(self, error: Body) -> bytes: ...


def stream_of(dialect: Dialect, reply_id: str, request: Body) -> Stream:
    """The stream of one call."""
    if dialect is Dialect.CHAT:
        return ChatStream(reply_id, request)
    return ResponsesStream(reply_id, request) if dialect is Dialect.RESPONSES else MessagesStream()


class ChatStream:
    """chat.completion.chunk events."""

    def __init__(self, reply_id: str, request: Body) -> None:
        self._head = {"id": f"chatcmpl-{reply_id}", "object": "chat.completion.chunk", "created": 0}
        self._head["model"] = request.get("model") or "policy"
        options = request.get("stream_options")
        self._usage = isinstance(options, Mapping) and bool(options.get("include_usage"))

    def opening(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def beat(self) -> bytes:
        return self._chunk({})

    def closing(self, body: Body) -> bytes:
        choice = body["choices"][0]
        message = choice["message"]
        deltas = [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
        calls = message.get("tool_calls") or []
        deltas += [{"tool_calls": [{"index": i} | call]} for i, call in enumerate(calls)]
        out = [self._chunk(delta) for delta in deltas] + [self._chunk({}, choice["finish_reason"])]
        # Without being asked for it too: a client that does not want usage reads past it in the last chunk.
        out += [_data(self._head | {"choices": [], "usage": body["usage"]})] if self._usage else []
        return b"".join(out) + b"data: [DONE]\n\n"

    def failure(self, error: Body) -> bytes:
        return _data(error)

    def _chunk(self, delta: Body, finish: str | None = None) -> bytes:
        return _data(self._head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


class ResponsesStream:
    """The event life of a Responses object: every item added, filled and done, numbers without a gap."""

    def __init__(self, reply_id: str, request: Body) -> None:
        self._head = response_head(reply_id, request)
        self._number = 0

    def opening(self) -> bytes:
        return self._event("response.created", response=self._head) + self.beat()

    def beat(self) -> bytes:
        return self._event("response.in_progress", response=self._head)

    def closing(self, body: Body) -> bytes:
        items = [self._item(i, item) for i, item in enumerate(body["output"])]
        return b"".join(items) + self._event(f"response.{body['status']}", response=body)

    def failure(self, error: Body) -> bytes:
        failed = dict(self._head) | {"status": "failed", "error": error.get("error")}
        return self._event("response.failed", response=failed)

    def _item(self, index: int, item: Body) -> bytes:
        blank = {"content": [], "summary": [], "arguments": ""}
        started = dict(item) | {k: v for k, v in blank.items() if k in item} | {"status": "in_progress"}
        where = {"output_index": index, "item_id": item["id"]}
        events = [self._event("response.output_item.added", output_index=index, item=started)]
        events += list(self._filling(item, where))
        return b"".join(events) + self._event("response.output_item.done", output_index=index, item=item)

    def _filling(self, item: Body, where: Body) -> Iterator[bytes]:
        if item["type"] == "function_call":
            text = item["arguments"]
            yield self._event("response.function_call_arguments.delta", **where, delta=text)
            yield self._event("response.function_call_arguments.done", **where, name=item["name"], arguments=text)
            return
        for i, part in enumerate(item["content"]):
            at = {**where, "content_index": i}
            kind = part["type"]
            yield self._event("response.content_part.added", **at, part=dict(part) | {"text": ""})
            extra = {"logprobs": []} if kind == "output_text" else {}
            yield self._event(f"response.{kind}.delta", **at, delta=part["text"], **extra)
            yield self._event(f"response.{kind}.done", **at, text=part["text"], **extra)
            yield self._event("response.content_part.done", **at, part=part)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return f"event: {kind}\n".encode() + _data(event)


class MessagesStream:
    """Messages events: one block after the other, each started, filled and stopped."""

    def opening(self) -> bytes:
        return self.beat()

    def beat(self) -> bytes:
        return self._event("ping")

    def closing(self, body: Body) -> bytes:
        usage = dict(body["usage"])
        start = dict(body) | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
        stop = {"stop_reason": body["stop_reason"], "stop_sequence": None}
        return b"".join(
            [
                self._event("message_start", message=start),
                *(self._block(i, block) for i, block in enumerate(body["content"])),
                self._event("message_delta", delta=stop, usage=usage),
                self._event("message_stop"),
            ]
        )

    def failure(self, error: Body) -> bytes:
        return self._event("error", error=error.get("error"))

    def _block(self, index: int, block: Body) -> bytes:
        start, deltas = _block_parts(block)
        events = [self._event("content_block_start", index=index, content_block=start)]
        events += [self._event("content_block_delta", index=index, delta=delta) for delta in deltas]
        return b"".join(events) + self._event("content_block_stop", index=index)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return f"event: {kind}\n".encode() + _data({"type": kind} | fields)


def _block_parts(block: Body) -> tuple[Body, list[Body]]:
    """A block as it starts, and the deltas that fill it."""
    if block["type"] == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        return dict(block) | {"input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    if block["type"] == "thinking":
        thinking = {"type": "thinking_delta", "thinking": block["thinking"]}
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return dict(block) | {"thinking": "", "signature": ""}, [thinking, signature]
    return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _data(event: Any) -> bytes:
    # ASCII only: U+2028 and lone surrogates would break line readers and encoders.
    return b"data: " + json.dumps(event).encode() + b"\n\n"
