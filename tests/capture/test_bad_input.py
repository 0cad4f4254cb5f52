"""Whatever a program in the box posts: an answer, or the dialect's own 400 or 413, and a session that is as it was."""

import asyncio
import copy
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lego.capture.server import MAX_BODY_BYTES, Handle, Proxy
from lego.capture.session import Limits
from lego.chat.render import Renderer
from lego.records import Sampling
from tests.capture.double import EXPERTS, ScriptedEngine

PATHS = ("chat/completions", "responses", "messages", "messages/count_tokens")
SCHEMA = {"type": "object", "properties": {"command": {"type": "string", "default": "ls"}}, "required": ["command"]}
ANSWER = 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'


@dataclass
class Client:
    """A trial that is open for all tests of this file, and one client of it."""

    handle: Handle
    engine: ScriptedEngine
    answer: list[int]
    session: aiohttp.ClientSession
    loop: asyncio.AbstractEventLoop

    async def connect(self) -> None:
        """A connection has a task of its own in the proxy."""
        await self.session.get(self.handle.url + "/v1/models")

    def post(self, path: str, data: bytes) -> tuple[int, bytes]:
        """Status and body; whatever comes, the trial is sound afterwards."""
        return self.loop.run_until_complete(self._post(path, data))

    async def _post(self, path: str, data: bytes) -> tuple[int, bytes]:
        tasks, turns = len(asyncio.all_tasks()), len(self.handle.session.turns)
        self.engine.answers = [self.answer]
        async with self.session.post(f"{self.handle.url}/v1/{path}", data=data) as response:
            found = response.status, await response.read()
        sampled = found[0] == 200 and path != "messages/count_tokens"
        assert len(self.handle.session.turns) == turns + sampled
        assert self.handle.bug is None and not self.handle.calls
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) <= tasks
        return found


@pytest.fixture(scope="module")
def client(renderer: Renderer) -> Iterator[Client]:
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()

    async def opened() -> Client:
        engine = ScriptedEngine(renderer, [ANSWER])
        limits = Limits(context_tokens=2**24, max_turns=10**6, experts=EXPERTS)
        proxy = Proxy(engine=engine, renderer=renderer, sampling=Sampling(max_tokens=300), limits=limits)
        await stack.enter_async_context(proxy.open())
        handle = await stack.enter_async_context(proxy.session("t"))
        client = Client(
            handle, engine, engine.answers[0], await stack.enter_async_context(aiohttp.ClientSession()), loop
        )
        await client.connect()
        return client

    yield loop.run_until_complete(opened())
    loop.run_until_complete(stack.aclose())
    loop.close()


def good(path: str) -> dict[str, Any]:
    """A request that holds every kind of thing the dialect has."""
    call = {"id": "c0", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    spec = {"name": "bash", "description": "d", "parameters": SCHEMA}
    if path == "chat/completions":
        messages = [
            {"role": "system", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "U"}]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c0", "content": "file"},
        ]
        options = {"stream_options": {"include_usage": True}, "max_tokens": 9, "stop": ["x"], "temperature": 0.5}
        return {"model": "m", "messages": messages, "tools": [{"type": "function", "function": spec}], **options}
    if path == "responses":
        items = [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
            {"role": "user", "content": "U"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "id": "m_1", "content": [{"type": "output_text", "text": "t"}]},
            {
                "type": "function_call",
                "id": "fc_1",
                "call_id": "c0",
                "name": "bash",
                "arguments": "{}",
                "namespace": "n",
            },
            {"type": "function_call_output", "call_id": "c0", "output": "file"},
            {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c1", "name": "patch", "input": "p"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "ok"}]},
            {"type": "web_search_call", "id": "ws_1"},
        ]
        function = {"type": "function", "strict": False, **spec}
        custom = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "d"}}
        names = {"type": "namespace", "name": "n", "description": "d", "tools": [function]}
        options = {
            "instructions": "I",
            "store": False,
            "include": ["x"],
            "reasoning": {"effort": "low"},
            "metadata": {},
        }
        return {"model": "m", "input": items, "tools": [function, custom, names, {"type": "web_search"}], **options}
    use = {"type": "tool_use", "id": "c0", "name": "bash", "input": {"command": "ls"}}
    result = {"type": "tool_result", "tool_use_id": "c0", "is_error": True, "content": [{"type": "text", "text": "x"}]}
    document = {"type": "document", "source": {"type": "text", "data": "d"}}
    thinking = {"type": "thinking", "thinking": "r", "signature": "s"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "U", "cache_control": {"type": "ephemeral"}}, document]},
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "t"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "V"}]},
        {"role": "system", "content": "mid"},
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "S"}]
    tools = [{"name": "bash", "description": "d", "input_schema": SCHEMA}]
    options = {"max_tokens": 9, "thinking": {"type": "adaptive"}, "metadata": {"user_id": "u"}, "stop_sequences": ["x"]}
    return {"model": "m", "system": system, "messages": messages, "tools": tools, **options}


def assert_sound(path: str, status: int, body: bytes, *allowed: int) -> None:
    """The status is one of these, and the body is the dialect's."""
    assert status in allowed, (status, body[:500])
    if status == 200 and body.startswith((b"data:", b"event:")):
        assert body.count(b"\n\n") > 3 and b"NaN" not in body
        return
    found = json.loads(body, parse_constant=pytest.fail)
    if status != 200:
        assert isinstance(found["error"]["message"], str) and len(found["error"]["message"]) < 1000
        assert "Traceback" not in found["error"]["message"] and "site-packages" not in found["error"]["message"]
        assert found.get("type") == ("error" if "messages" in path else None)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_good_requests_of_this_file_are_good(client: Client, path: str, stream: bool) -> None:
    status, body = client.post(path, json.dumps(good(path) | {"stream": stream}).encode())
    assert_sound(path, status, body, 200)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"x"',
        b"\x00",
        b"\xff\xfe{}",
        b'{"messages": "\xff\xfe"}',
        b"\xef\xbb\xbf{}",
        b'{"messages": [], "input": []}',
        b'{"messages": {}, "input": {}}',
        b'{"messages": [[]], "input": [[]]}',
        b'{"messages": [{}], "input": [{}]}',
        b'{"messages": 5, "input": 5}',
        b'{"messages": [3], "input": [3]}',
        b'{"messages": [{"role": "wizard", "content": "x"}], "input": [{"role": "wizard", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": 5}], "input": [{"role": "user", "content": 5}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "input": "x", "tools": 7}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}], '
        b'"input": [{"role": "user", "content": [{"type": "input_image"}]}]}',
        b'{"messages": ' + nested(10_000) + b', "input": ' + nested(10_000) + b"}",
        b'{"messages": ' + nested(500) + b', "input": ' + nested(500) + b"}",
        b'{"x": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
        b'{"x": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda data: data[:40].decode("latin-1"),
)
def test_what_is_no_request_is_refused(client: Client, path: str, data: bytes) -> None:
    assert_sound(path, *client.post(path, data), 400)


def with_field(path: str, name: str, value: bytes) -> bytes:
    """A good request with a raw JSON value in one of its fields."""
    body = json.dumps(good(path) | {name: "@@"}).encode()
    return body.replace(b'"@@"', value)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("value", "status"),
    [
        (b"NaN", 400),
        (b"-Infinity", 400),
        (b"1e999", 400),
        (b"9" * 5000, 400),
        (nested(101), 400),
        (b'{"a": ' + nested(300) + b"}", 400),
        (nested(50), 200),
        (b"9" * 300, 200),
        (b'"\\ud800"', 200),
        (b'{"a": 1, "a": 2}', 200),
        (b'"\\u0000"', 200),
    ],
    ids=lambda value: str(value[:12]) if isinstance(value, bytes) else "",
)
def test_odd_values_where_the_model_does_not_look(client: Client, path: str, value: bytes, status: int) -> None:
    assert_sound(path, *client.post(path, with_field(path, "temperature", value)), status)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", [None, True, 5, 1.5, "x", "", [], {}, [1], [{}], [None], ["x"], {"a": 1}, [[]]])
def test_wrong_types_of_every_field_are_refused_or_do_not_matter(client: Client, path: str, value: Any) -> None:
    for name in good(path):
        assert_sound(path, *client.post(path, json.dumps(good(path) | {name: value}).encode()), 200, 400)


@pytest.mark.parametrize("path", PATHS)
def test_texts_of_every_kind_are_answered(client: Client, path: str) -> None:
    for text in ("a\x00b", "a\ud800b", "\udfff", "\u2028", "<|im_end|>", "\U0010fffd", "", " ", "\r"):
        told = [{"role": "user", "content": text}, {"role": "user", "content": "U"}]
        body = {"model": text, "max_tokens": 9, "messages": told, "input": told, "system": text, "instructions": text}
        for stream in (False, True):
            assert_sound(path, *client.post(path, json.dumps(body | {"stream": stream}).encode()), 200)


@pytest.mark.parametrize("path", PATHS)
def test_a_body_of_50_mb_is_too_large(client: Client, path: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 50_000_000}]}
    assert MAX_BODY_BYTES < 50_000_000
    assert_sound(path, *client.post(path, json.dumps(body).encode()), 413)
    client.loop.run_until_complete(client.connect())


@pytest.mark.parametrize("path", PATHS)
def test_2000_tools_are_offered(client: Client, path: str) -> None:
    body = good(path)
    tool = json.dumps(body["tools"][0])
    body["tools"] = [json.loads(tool.replace("bash", f"bash{i}")) for i in range(2000)]
    assert_sound(path, *client.post(path, json.dumps(body).encode()), 200)


@pytest.mark.parametrize("path", PATHS)
def test_10000_messages_are_read(client: Client, path: str) -> None:
    told = [{"role": role, "content": "x"} for _ in range(5000) for role in ("user", "assistant")]
    told.append({"role": "user", "content": "x"})
    body = {"model": "m", "max_tokens": 9, "messages": told, "input": told}
    assert_sound(path, *client.post(path, json.dumps(body).encode()), 200)


def test_an_unknown_endpoint_or_method_is_told_so(client: Client) -> None:
    for path in ("poems", "chat/completions/x", "messages/batches", ""):
        assert_sound("", *client.post(path, b"{}"), 404)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**200, 10**210)
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["user", "tool", "assistant", "text", "function", "custom", "namespace", "tool_result", "c0", ""])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "name", "id", "input", "tools", "a"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a body, as its holder and its key or index."""
    here = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    return [place for key, inner in here for place in [(value, key), *nodes(inner)]]


@st.composite
def spoiled(draw: st.DrawFn, path: str) -> bytes:
    """A good request with a few places of it replaced, removed or doubled."""
    body = copy.deepcopy(good(path)) | {"stream": draw(st.booleans())}
    for _ in range(draw(st.integers(1, 3))):
        holder, key = draw(st.sampled_from(nodes(body)))
        match draw(st.integers(0, 3)):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, holder[key])
            case _:
                holder[key] = draw(values)
        if not nodes(body):
            break
    return json.dumps(body).encode()


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_good_request_with_random_places_spoiled(client: Client, path: str, data: st.DataObject) -> None:
    assert_sound(path, *client.post(path, data.draw(spoiled(path))), 200, 400)


def test_after_all_this_a_good_call_is_still_answered(client: Client) -> None:
    for path in PATHS:
        assert_sound(path, *client.post(path, json.dumps(good(path)).encode()), 200)
