"""The official clients are the judges: whatever the pieces, the events add up to the plain body."""

import asyncio
import json
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState

from lego.capture.dialects import converse
from lego.capture.events import Stream, stream_of
from lego.capture.wire import Dialect, Reply
from lego.chat.messages import Message, ToolCall

REQUESTS: dict[Dialect, dict[str, Any]] = {
    Dialect.CHAT: {
        "model": "m",
        "messages": [{"role": "user", "content": "U"}],
        "stream_options": {"include_usage": True},
    },
    Dialect.RESPONSES: {
        "model": "m",
        "input": "U",
        "tools": [
            {"type": "custom", "name": "patch"},
            {"type": "namespace", "name": "team", "tools": [{"type": "function", "name": "ask"}]},
        ],
    },
    Dialect.MESSAGES: {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "U"}]},
}
CALLS = (ToolCall("call_1", "bash", '{"command": "ls", "n": 1.0}'), ToolCall("call_2", "bash", "{}"))


def reply(reasoning: str = "", text: str = "", calls: tuple[ToolCall, ...] = (), truncated: bool = False) -> Reply:
    return Reply(
        id="5e55" * 4 + "00",
        message=Message("assistant", text, reasoning, calls),
        truncated=truncated,
        prompt_tokens=100,
        output_tokens=20,
        cached_tokens=60,
        reasoning_tokens=7,
    )


def body_of(dialect: Dialect, answer: Reply) -> dict[str, Any]:
    async def sample(_: object) -> Reply:
        return answer

    return asyncio.run(converse(dialect, REQUESTS[dialect], sample))


def stream(dialect: Dialect, answer: Reply) -> Stream:
    return stream_of(dialect, answer.id, REQUESTS[dialect], answer.prompt_tokens, answer.cached_tokens)


def whole(dialect: Dialect, answer: Reply, *steps: tuple[str, str]) -> bytes:
    """All events of an answer that was told in these steps, a beat after each."""
    events = stream(dialect, answer)
    pieces = [events.opening(), *(events.progress(*step) + events.beat() for step in steps)]
    return b"".join([*pieces, events.closing(body_of(dialect, answer))])


def events_of(data: bytes) -> list[dict[str, Any]]:
    lines = [line for line in data.decode("ascii").split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def judged(dialect: Dialect, plain: dict[str, Any], data: bytes) -> tuple[Any, Any]:
    """What the official client makes of the body, and of the events."""
    return asyncio.run(_JUDGES[dialect](plain, data))


def _clients(make: Any, plain: dict[str, Any], data: bytes) -> tuple[Any, Any]:
    """Two clients: one is answered with the body, the other with the events."""

    def client(content: bytes, kind: str) -> Any:
        answer = httpx2.MockTransport(lambda _: httpx2.Response(200, content=content, headers={"content-type": kind}))
        return make(api_key="x", max_retries=0, http_client=httpx2.AsyncClient(transport=answer))

    return client(json.dumps(plain).encode(), "application/json"), client(data, "text/event-stream")


async def _chat(plain: dict[str, Any], data: bytes) -> tuple[Any, Any]:
    one, other = _clients(openai.AsyncOpenAI, plain, data)
    request, state = REQUESTS[Dialect.CHAT], ChatCompletionStreamState()
    async for chunk in await other.chat.completions.create(**request, stream=True):
        state.handle_chunk(chunk)
    told = (await one.chat.completions.create(**request)).model_dump()
    return _chat_fields(told), _chat_fields(state.current_completion_snapshot.model_dump())


def _chat_fields(found: dict[str, Any]) -> Any:
    choice = found["choices"][0]
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in choice["message"].get("tool_calls") or []
    ]
    texts = (choice["message"]["content"] or "", choice["message"].get("reasoning_content") or "")
    return texts, calls, choice["finish_reason"], found["id"], found["model"], found["usage"]


async def _responses(plain: dict[str, Any], data: bytes) -> tuple[Any, Any]:
    one, other = _clients(openai.AsyncOpenAI, plain, data)
    async with other.responses.stream(**REQUESTS[Dialect.RESPONSES]) as events:
        found = [event async for event in events]
    items = [event.item for event in found if event.type == "response.output_item.done"]
    final = found[-1].response
    told = await one.responses.create(**REQUESTS[Dialect.RESPONSES])
    assert _dumped(final.output) == _dumped(items), "the events and the last of them differ"
    return _head(told) | {"output": _dumped(told.output)}, _head(final) | {"output": _dumped(items)}


def _dumped(items: list[Any]) -> list[Any]:
    """The items without what the client itself puts in."""
    return [item.model_dump(exclude={"parsed_arguments": True, "content": {"__all__": {"parsed"}}}) for item in items]


def _head(response: Any) -> dict[str, Any]:
    return response.model_dump(include={"id", "status", "usage", "model", "incomplete_details"})


async def _messages(plain: dict[str, Any], data: bytes) -> tuple[Any, Any]:
    one, other = _clients(anthropic.AsyncAnthropic, plain, data)
    async with other.messages.stream(**REQUESTS[Dialect.MESSAGES]) as events:
        streamed = await events.get_final_message()
    told = await one.messages.create(**REQUESTS[Dialect.MESSAGES])
    return told.model_dump(), streamed.model_dump()


_JUDGES = {Dialect.CHAT: _chat, Dialect.RESPONSES: _responses, Dialect.MESSAGES: _messages}

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["\r\n", "\u2028 a", "data: {"]
)
names = st.sampled_from(["bash", "patch", "team__ask"])
arguments = st.sampled_from(
    [
        "{}",
        "",
        '{"command": "ls", "n": 1e3}',
        '{"input": "a\\nb"}',
        '{"a": ',
        "[1]",
        '{"x": NaN}',
        '{"x": 1e999}',
        '"s"',
    ]
)
calls = st.lists(st.tuples(names, arguments), max_size=3).map(
    lambda found: tuple(ToolCall(f"call_{i}", name, text) for i, (name, text) in enumerate(found))
)


@st.composite
def told(draw: st.DrawFn) -> tuple[Reply, list[tuple[str, str]]]:
    """An answer, and the steps in which it is told."""
    answer = reply(draw(texts), draw(texts), draw(calls), draw(st.booleans()))
    reasoning, text = answer.message.reasoning, answer.message.text
    cuts = sorted(draw(st.lists(st.integers(0, len(reasoning) + len(text)), max_size=5)))
    steps = [(reasoning[:cut], text[: max(cut - len(reasoning), 0)]) for cut in cuts]
    return answer, steps


@pytest.mark.parametrize("dialect", Dialect)
@settings(max_examples=60, deadline=None)
@given(case=told())
def test_the_streamed_answer_is_the_plain_one_however_it_was_cut(dialect: Dialect, case: Any) -> None:
    answer, steps = case
    plain, streamed = judged(dialect, body_of(dialect, answer), whole(dialect, answer, *steps))
    assert streamed == plain


def steps_of_a_character(answer: Reply) -> list[tuple[str, str]]:
    reasoning, text = answer.message.reasoning, answer.message.text
    return [(reasoning[:i], "") for i in range(len(reasoning) + 1)] + [
        (reasoning, text[:i]) for i in range(len(text) + 1)
    ]


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize(
    "answer",
    [
        reply("think", "I look.", CALLS),
        reply("think"),
        reply(),
        reply(text="It is done."),
        reply(calls=CALLS),
        reply("think", truncated=True),
        reply(calls=(ToolCall("call_1", "write", json.dumps({"text": "0123456789" * 20_000})),)),
        reply(calls=(ToolCall("call_1", "patch", json.dumps({"input": "é\n" * 100})),)),
        reply(calls=(ToolCall("call_1", "team__ask", ""),)),
    ],
)
def test_each_kind_of_answer_is_one_answer_told_at_once_or_by_characters(dialect: Dialect, answer: Reply) -> None:
    plain = body_of(dialect, answer)
    for steps in ([], steps_of_a_character(answer)):
        expected, streamed = judged(dialect, plain, whole(dialect, answer, *steps))
        assert streamed == expected


@pytest.mark.parametrize("dialect", Dialect)
def test_progress_sends_only_what_is_new_and_what_is_certain_at_once(dialect: Dialect) -> None:
    events = stream(dialect, reply())
    assert b"first" in events.progress("first", "") and events.progress("first", "") == b""
    grown = events.progress("first second", "")
    assert b" second" in grown and b"first" not in grown
    assert b"word" in events.progress("first second", "word")


@pytest.mark.parametrize("steps", [[], [("plan", ""), ("plan A", ""), ("plan A", "te"), ("plan A", "text")]])
def test_messages_events_keep_the_grammar(steps: list[tuple[str, str]]) -> None:
    events = [
        e for e in events_of(whole(Dialect.MESSAGES, reply("plan A", "text", CALLS), *steps)) if e["type"] != "ping"
    ]
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-2]["usage"]["output_tokens"] == 20
    blocks = blocks_of(events[1:-2])
    assert [kind for kind, _ in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks[0][1] == {"thinking_delta": "plan A", "signature_delta": reply().id}
    assert [json.loads(deltas["input_json_delta"]) for _, deltas in blocks[2:]] == [{"command": "ls", "n": 1.0}, {}]


def blocks_of(events: list[dict[str, Any]]) -> list[tuple[str, dict[str, str]]]:
    """The blocks with their joined deltas; each is started once, filled and stopped before the next."""
    blocks: list[tuple[str, dict[str, str]]] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append((event["content_block"]["type"], {}))
            is_open = True
        assert is_open and event["index"] == len(blocks) - 1
        if event["type"] == "content_block_delta":
            kind, text = event["delta"].values()
            blocks[-1][1][kind] = blocks[-1][1].get(kind, "") + text
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    return blocks


def test_messages_without_any_output_still_start_and_stop() -> None:
    kinds = [event["type"] for event in events_of(whole(Dialect.MESSAGES, reply()))]
    assert kinds == ["message_start", "message_delta", "message_stop"]


def test_messages_usage_is_told_first_and_last() -> None:
    usage = {"input_tokens": 40, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 60}
    first, *_, last, _stop = events_of(whole(Dialect.MESSAGES, reply(text="t")))
    assert first["message"]["usage"] == usage | {"output_tokens": 0} and last["usage"] == usage | {"output_tokens": 20}


@pytest.mark.parametrize("steps", [[], [("plan", ""), ("plan A", ""), ("plan A", "te")]])
def test_responses_events_tell_the_whole_life_of_each_item(steps: list[tuple[str, str]]) -> None:
    custom = ToolCall("call_3", "patch", '{"input": "*** Begin"}')
    events = events_of(whole(Dialect.RESPONSES, reply("plan A", "text", (CALLS[0], custom)), *steps))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
    output = events[-1]["response"]["output"]
    lives = [[e for e in events if e.get("output_index") == i] for i in range(len(output))]
    assert [event for life in lives for event in life] == [e for e in events if "output_index" in e]
    for item, life in zip(output, lives, strict=True):
        assert life[0]["type"] == "response.output_item.added" and life[-1]["type"] == "response.output_item.done"
        assert life[0]["item"]["id"] == life[-1]["item"]["id"] == item["id"] and life[-1]["item"] == item
        assert all(event["item_id"] == item["id"] for event in life[1:-1])
    said = [(e["type"], e.get("arguments") or e.get("input") or e.get("text")) for e in events]
    for kind, text in [
        ("reasoning_text.done", "plan A"),
        ("output_text.done", "text"),
        ("function_call_arguments.done", CALLS[0].arguments),
        ("custom_tool_call_input.done", "*** Begin"),
    ]:
        assert (f"response.{kind}", text) in said
        deltas = [e["delta"] for e in events if e["type"] == f"response.{kind}".replace("done", "delta")]
        assert "".join(deltas) == text


def test_a_cut_answer_ends_as_an_incomplete_response() -> None:
    *_, last = events_of(whole(Dialect.RESPONSES, reply(text="It is", truncated=True)))
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_chat_usage_comes_when_asked_for() -> None:
    silent = stream_of(Dialect.CHAT, reply().id, {"model": "m"}, 100, 60)
    assert b'"usage"' not in silent.opening() + silent.closing(body_of(Dialect.CHAT, reply(text="t")))
    assert b'"usage"' in whole(Dialect.CHAT, reply(text="t"))


def test_beats_are_events_that_clients_count() -> None:
    beats = {dialect: stream(dialect, reply()).beat() for dialect in Dialect}
    assert all(b"data: {" in beat and beat.endswith(b"\n\n") for beat in beats.values())
    (chunk,) = events_of(beats[Dialect.CHAT])
    assert chunk["object"] == "chat.completion.chunk" and chunk["choices"][0]["delta"] == {}
    assert beats[Dialect.RESPONSES].startswith(b"event: response.in_progress\n")
    assert beats[Dialect.MESSAGES].startswith(b"event: ping\n")


@pytest.mark.parametrize("dialect", Dialect)
def test_a_failure_after_some_text_reaches_the_client_as_its_error(dialect: Dialect) -> None:
    events = stream(dialect, reply())
    error = {"type": "error", "error": {"type": "api_error", "message": "dead replica", "code": "engine_error"}}
    data = events.opening() + events.progress("", "It is") + events.failure(error)
    if dialect is Dialect.RESPONSES:
        assert events_of(data)[-1]["response"]["error"]["message"] == "dead replica"
        return
    with pytest.raises((openai.APIError, anthropic.APIError), match="dead replica"):
        judged(dialect, body_of(dialect, reply()), data)
