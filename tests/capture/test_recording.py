"""A session on disk is the session, and happens again the same way, or says where it does not."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import openai
import pytest

from lego.capture.again import again, differences, first_difference
from lego.capture.journal import Event, Step
from lego.capture.recording import Recording, read, record, write
from lego.capture.server import Proxy
from lego.capture.session import Limits
from lego.errors import UsageError
from lego.records import Sampling
from tests.capture.double import EXPERTS, ScriptedEngine

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
DONE = "<think>\nhm\n</think>\n\nIt is done.<|im_end|>"
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
LIMITS = Limits(context_tokens=3000, experts=EXPERTS)


async def _trial(renderer) -> Recording:
    """A call, its repeat by a client that went away, the tool's result, a side request, a prompt over the limit."""
    engine = ScriptedEngine(renderer, [CALL, DONE, DONE])
    proxy = Proxy(engine=engine, renderer=renderer, sampling=Sampling(max_tokens=300), limits=LIMITS)
    async with proxy.open(), proxy.session("t") as handle:
        client = openai.AsyncOpenAI(base_url=handle.url + "/v1", api_key="x", max_retries=0)
        user = {"role": "user", "content": "U é 😀"}
        first = await client.chat.completions.create(model="m", messages=[user], tools=TOOLS, temperature=0.5)
        engine.seconds = 60
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="m", messages=[user], tools=TOOLS, timeout=0.3)
        engine.seconds = 0
        told = first.choices[0].message.model_dump(include={"role", "content", "tool_calls"})
        result = {"role": "tool", "tool_call_id": told["tool_calls"][0]["id"], "content": "file"}
        await client.chat.completions.create(model="m", messages=[user, told, result], tools=TOOLS)
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a title"}])
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "U" * 4000}])
        handle.session.lost(2)
        return record(handle.session, renderer)


@pytest.fixture(scope="module")
def recording(renderer) -> Recording:
    return asyncio.run(_trial(renderer))


def _same_arrays(a: Recording, b: Recording) -> bool:
    pairs = [(x, y) for s, t in zip(a.turns, b.turns, strict=True) for x, y in _arrays(s, t)]
    return all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in pairs)


def _arrays(s, t):
    yield s.prompt_ids, t.prompt_ids
    for name in ("output_ids", "logprobs", "routing"):
        if getattr(s.generation, name) is not None:
            yield getattr(s.generation, name), getattr(t.generation, name)


def test_a_session_comes_back_from_disk_whole(recording, tmp_path):
    write(recording, tmp_path / "s.npz", routing=True)
    back = read(tmp_path / "s.npz")
    assert (back.uid, back.limits, back.events, back.calls) == (
        recording.uid,
        recording.limits,
        recording.events,
        recording.calls,
    )
    assert back.origins == recording.origins and _same_arrays(recording, back)
    plain = ("index", "parent", "drift", "sampling", "rejected", "asked", "started", "seconds")
    for a, b in zip(recording.turns, back.turns, strict=True):
        assert [getattr(a, name) for name in plain] == [getattr(b, name) for name in plain]
        assert a.generation.versions == b.generation.versions and a.generation.finish == b.generation.finish


def test_it_happens_again_the_same_way(recording, renderer, tmp_path):
    assert {event.step for event in recording.events} == {Step.PLAN, Step.ADD, Step.ABANDON, Step.LOST}
    for routing in (False, True):
        write(recording, tmp_path / "s.npz", routing=routing)
        back = read(tmp_path / "s.npz")
        session = asyncio.run(again(back, renderer))
        assert list(differences(back, session, renderer.decode)) == []
        assert [turn.rejected for turn in session.turns] == [None, "cancelled", "undelivered", None]
        assert session.answers.keys() == {0, 2, 3} and len(session.journal.origins) == 5


def test_another_tree_is_told_with_the_first_token_that_differs(recording, renderer):
    origins = [replace(o, body=json.loads(json.dumps(o.body).replace("file", "fine"))) for o in recording.origins]
    session = asyncio.run(again(replace(recording, origins=tuple(origins)), renderer))
    (line,) = differences(recording, session, renderer.decode)
    assert line.startswith("turn 2: token ") and "<tool_response>\\nfi' came 'le\\n" in line


def test_the_first_difference_may_be_an_end(renderer):
    a, b = np.asarray([32, 33], np.int32), np.asarray([32, 33, 34], np.int32)
    assert (
        first_difference(a, b, renderer.decode) == "token 2 of the prompt was None, is 34: after 'AB' came '', now 'C'"
    )


def test_numbers_are_binary_and_histories_are_kept_once(recording, renderer, tmp_path):
    messages = [{"role": "user", "content": "x" * 1000 + str(n)} for n in range(100)]
    bodies = [{"messages": messages[:n]} for n in range(1, 100)]
    origins = tuple(replace(recording.origins[0], body=body) for body in bodies)
    plans = [Event(step=Step.PLAN, call=call) for call in range(len(bodies))]
    events = (*plans, *(event for event in recording.events if event.step is not Step.PLAN))
    write(replace(recording, origins=origins, events=events), tmp_path / "s.npz", routing=True)
    with np.load(tmp_path / "s.npz") as file:
        assert len(file["text"]) < 150_000 and file["output_ids"].dtype == np.int32
        assert len(file["prompt_ids"]) < sum(len(turn.prompt_ids) for turn in recording.turns)
    assert [origin.body for origin in read(tmp_path / "s.npz").origins] == bodies


def test_routing_stays_off_the_disk_unless_it_is_asked_for(recording, tmp_path):
    write(recording, tmp_path / "s.npz")
    back = read(tmp_path / "s.npz")
    assert back.limits.experts is None and all(turn.generation.routing is None for turn in back.turns)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no zip", b"\x93NUMPY nothing"])
def test_a_file_that_is_no_session_is_a_usage_error(tmp_path, content):
    (tmp_path / "s.npz").write_bytes(content)
    with pytest.raises(UsageError, match=r"s\.npz is no session file"):
        read(tmp_path / "s.npz")


def test_a_cut_file_is_a_usage_error(recording, tmp_path):
    write(recording, tmp_path / "s.npz")
    whole = (tmp_path / "s.npz").read_bytes()
    for size in (len(whole) // 3, len(whole) // 2, len(whole) - 10):
        (tmp_path / "s.npz").write_bytes(whole[:size])
        with pytest.raises(UsageError):
            read(tmp_path / "s.npz")


def test_a_missing_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read(tmp_path / "s.npz")
