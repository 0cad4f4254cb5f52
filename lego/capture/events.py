"""Server-sent events: an answer as the stream of its dialect, by pieces while it grows or all at its end.

Whatever the pieces, the events add up to the plain body.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from lego.capture.bodies import messages_head, responses_head, text_blocks, text_items
from lego.capture.wire import Body, Dialect, model_of


class Stream(Protocol):
    """The events of one answer: opening at once, progress or a beat while it is sampled, then closing or failure."""

    def opening(self) -> bytes: ...
    def beat(self) -> bytes: ...

    def progress(self, reasoning: str, text: str) -> bytes:
        """What is new in texts that begin with those of the call before; `reasoning` is whole once there is text."""
        ...

    def closing(self, body: Body) -> bytes:
        """The rest of the body."""
        ...

    def failure(self, error: Body) -> bytes: ...


def stream_of(dialect: Dialect, reply_id: str, request: Body, prompt_tokens: int, cached_tokens: int) -> Stream:
    """The stream of one call. Messages tells the prompt's tokens first."""
    match dialect:
        case Dialect.CHAT:
            return ChatStream(reply_id, request)
        case Dialect.RESPONSES:
            return ResponsesStream(reply_id, request)
        case Dialect.MESSAGES:
            return MessagesStream(reply_id, messages_head(reply_id, request, prompt_tokens, cached_tokens))


class _Growth:
    """Texts by name, and what is new in them."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    def news(self, name: str, whole: str) -> str:
        told = self._told.get(name, "")
        assert whole.startswith(told), f"{name} was told otherwise"
        self._told[name] = whole
        return whole[len(told) :]


class _InOrder:
    """Parts of an answer one after the other: each is begun, filled with what is new, and ended by the next."""

    def __init__(self) -> None:
        self._growth = _Growth()
        self._parts: list[Body] = []

    def _grown(self, parts: Sequence[Body]) -> Iterator[bytes]:
        for index, part in enumerate(parts):
            if index == len(self._parts):
                yield from self._ended()
                self._parts.append(part)
                yield from self._begun(index, part)
            new = self._growth.news(str(index), _text_of(part))
            assert not new or index == len(self._parts) - 1, f"part {index} grew after its end"
            self._parts[index] = part
            if new:
                yield from self._filled(index, part, new)

    def _ended(self) -> Iterator[bytes]:
        if self._parts:
            yield from self._end(len(self._parts) - 1, self._parts[-1])

    def _begun(self, index: int, part: Body) -> Iterator[bytes]: ...
    def _filled(self, index: int, part: Body, new: str) -> Iterator[bytes]: ...
    def _end(self, index: int, part: Body) -> Iterator[bytes]: ...


class ChatStream:
    """chat.completion.chunk events."""

    def __init__(self, reply_id: str, request: Body) -> None:
        self._head = {"id": f"chatcmpl-{reply_id}", "object": "chat.completion.chunk", "created": int(time.time())}
        self._head["model"] = model_of(request)
        options = request.get("stream_options")
        self._usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
        self._growth = _Growth()

    def opening(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def beat(self) -> bytes:
        # A chunk and no comment: clients count chunks as signs of life.
        return self._chunk({})

    def progress(self, reasoning: str, text: str) -> bytes:
        texts = {"reasoning_content": reasoning, "content": text}
        news = {name: self._growth.news(name, whole) for name, whole in texts.items()}
        return b"".join(self._chunk({name: new}) for name, new in news.items() if new)

    def closing(self, body: Body) -> bytes:
        choice = body["choices"][0]
        message = choice["message"]
        out = [self.progress(message.get("reasoning_content") or "", message["content"] or "")]
        calls = enumerate(message.get("tool_calls") or [])
        out += [self._chunk({"tool_calls": [{"index": i} | call]}) for i, call in calls]
        out += [self._chunk({}, choice["finish_reason"])]
        out += [_data(self._head | {"choices": [], "usage": body["usage"]})] if self._usage else []
        return b"".join(out) + b"data: [DONE]\n\n"

    def failure(self, error: Body) -> bytes:
        return _data(error)

    def _chunk(self, delta: Body, finish: str | None = None) -> bytes:
        return _data(self._head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


class ResponsesStream(_InOrder):
    """The event life of a Responses object: every item added, filled and done, numbers without a gap."""

    def __init__(self, reply_id: str, request: Body) -> None:
        super().__init__()
        self._id = reply_id
        self._head = responses_head(reply_id, request)
        self._number = 0

    def opening(self) -> bytes:
        return self._event("created", response=self._head) + self.beat()

    def beat(self) -> bytes:
        # An event and no comment: Codex counts events as signs of life.
        return self._event("in_progress", response=self._head)

    def progress(self, reasoning: str, text: str) -> bytes:
        return b"".join(self._grown(text_items(self._id, reasoning, text)))

    def closing(self, body: Body) -> bytes:
        items = [*self._grown(body["output"]), *self._ended()]
        return b"".join(items) + self._event(body["status"], response=body)

    def failure(self, error: Body) -> bytes:
        failed = dict(self._head) | {"status": "failed", "error": error.get("error")}
        return self._event("failed", response=failed)

    def _begun(self, index: int, part: Body) -> Iterator[bytes]:
        blank = {"content": [], "encrypted_content": None, "arguments": "", "input": ""}
        started = dict(part) | {name: empty for name, empty in blank.items() if name in part}
        yield self._event("output_item.added", output_index=index, item=started | {"status": "in_progress"})
        for at, content in _contents(index, part):
            yield self._event("content_part.added", **at, part=content | {"text": ""})

    def _filled(self, index: int, part: Body, new: str) -> Iterator[bytes]:
        for at, content in _contents(index, part):
            yield self._event(f"{content['type']}.delta", **at, delta=new, logprobs=[])
        if part["type"] in _CALL_EVENTS:
            yield self._event(f"{_CALL_EVENTS[part['type']]}.delta", **_place(index, part), delta=new)

    def _end(self, index: int, part: Body) -> Iterator[bytes]:
        for at, content in _contents(index, part):
            yield self._event(f"{content['type']}.done", **at, text=content["text"], logprobs=[])
            yield self._event("content_part.done", **at, part=content)
        if part["type"] in _CALL_EVENTS:
            whole = {name: part[name] for name in ("name", "arguments", "input") if name in part}
            yield self._event(f"{_CALL_EVENTS[part['type']]}.done", **_place(index, part), **whole)
        yield self._event("output_item.done", output_index=index, item=part)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": f"response.{kind}", "sequence_number": self._number} | fields
        self._number += 1
        return _named(event)


_CALL_EVENTS = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}


def _place(index: int, item: Body) -> dict[str, Any]:
    return {"output_index": index, "item_id": item["id"]}


def _contents(index: int, item: Body) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The content parts of an item, each with its place."""
    for i, content in enumerate(item.get("content", ())):
        yield _place(index, item) | {"content_index": i}, content


class MessagesStream(_InOrder):
    """Messages events: one block after the other, each started, filled and stopped."""

    def __init__(self, reply_id: str, head: Body) -> None:
        super().__init__()
        self._id, self._head = reply_id, head

    def opening(self) -> bytes:
        return self._event("message_start", message=self._head)

    def beat(self) -> bytes:
        return self._event("ping")

    def progress(self, reasoning: str, text: str) -> bytes:
        return b"".join(self._grown(text_blocks(self._id, reasoning, text)))

    def closing(self, body: Body) -> bytes:
        stop = {"stop_reason": body["stop_reason"], "stop_sequence": None}
        end = self._event("message_delta", delta=stop, usage=body["usage"]) + self._event("message_stop")
        return b"".join([*self._grown(body["content"]), *self._ended(), end])

    def failure(self, error: Body) -> bytes:
        return self._event("error", error=error.get("error"))

    def _begun(self, index: int, part: Body) -> Iterator[bytes]:
        blank = {"thinking": "", "signature": "", "text": "", "input": {}}
        started = {name: blank.get(name, value) for name, value in part.items()}
        yield self._event("content_block_start", index=index, content_block=started)

    def _filled(self, index: int, part: Body, new: str) -> Iterator[bytes]:
        kind, name = _DELTAS[part["type"]]
        yield self._event("content_block_delta", index=index, delta={"type": kind, name: new})

    def _end(self, index: int, part: Body) -> Iterator[bytes]:
        if part["type"] == "thinking":
            signed = {"type": "signature_delta", "signature": part["signature"]}
            yield self._event("content_block_delta", index=index, delta=signed)
        yield self._event("content_block_stop", index=index)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return _named({"type": kind} | fields)


_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def _text_of(part: Body) -> str:
    """What fills an item or a block."""
    match part:
        case {"content": contents}:
            return "".join(content["text"] for content in contents)
        case {"arguments": text} | {"thinking": text} | {"text": text}:
            return text
        case {"type": "tool_use", "input": value}:
            return json.dumps(value, ensure_ascii=False)
        case _:
            return part["input"]


def _named(event: Body) -> bytes:
    return f"event: {event['type']}\n".encode() + _data(event)


def _data(event: Body) -> bytes:
    # ASCII only: U+2028 and lone surrogates would break line readers and encoders.
    return b"data: " + json.dumps(event).encode() + b"\n\n"
