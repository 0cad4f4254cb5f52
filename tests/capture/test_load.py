"""Many sessions at once, long ones, and the end of the proxy while they run."""

import asyncio
import time
import tracemalloc
from contextlib import AsyncExitStack

import aiohttp
import numpy as np

from lego.capture.server import Handle, Proxy
from lego.capture.session import Limits, Session
from lego.chat.messages import Message
from lego.engine.scripted import ScriptedEngine, made_up_routing
from lego.records import Generation, Sampling, VersionSpan

BODY = {"model": "m", "messages": [{"role": "user", "content": "U"}]}


def _proxy(renderer, **engine) -> tuple[Proxy, ScriptedEngine]:
    scripted = ScriptedEngine(lambda prompt: [65, 66, 258], experts=None, **engine)
    return Proxy(engine=scripted, renderer=renderer, sampling=Sampling(), limits=Limits()), scripted


async def test_a_thousand_open_sessions_answer_at_once_and_leave_nothing(renderer):
    proxy, engine = _proxy(renderer, seconds=1.0)
    async with proxy.open(), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        before = len(asyncio.all_tasks())
        async with AsyncExitStack() as stack:
            handles = [await stack.enter_async_context(proxy.session(str(n))) for n in range(1000)]
            bodies = await asyncio.gather(*(_answer(client, handle) for handle in handles))
            assert all(body["choices"][0]["message"]["content"] == "bc" for body in bodies)
            assert all(len(handle.session.turns) == 1 for handle in handles)
            assert len({call.session for call in engine.calls}) == 1000
        assert not proxy._secrets and not proxy._keys
        await client.close()
        await asyncio.sleep(0.2)
        assert len(asyncio.all_tasks()) <= before


async def _answer(client: aiohttp.ClientSession, handle: Handle) -> dict:
    async with client.post(f"{handle.url}/v1/chat/completions", json=BODY) as response:
        return await response.json()


async def test_the_end_of_the_proxy_ends_streams_and_engine_calls(renderer):
    proxy, engine = _proxy(renderer, seconds=60)
    before = len(asyncio.all_tasks())
    async with AsyncExitStack() as stack, aiohttp.ClientSession() as client:
        await stack.enter_async_context(proxy.open())
        handle = await stack.enter_async_context(proxy.session("t"))
        url = f"{handle.url}/v1/chat/completions"
        streams = [await client.post(url, json=BODY | {"stream": True}) for _ in range(5)]
        start = time.monotonic()
        await stack.aclose()
        assert time.monotonic() - start < 2 and len(engine.cancelled) == 5 and len(streams) == 5
        assert {turn.rejected for turn in handle.session.turns} == {"cancelled"}
    await asyncio.sleep(0.1)
    assert len(asyncio.all_tasks()) <= before


async def test_text_reaches_the_client_while_more_is_sampled(renderer):
    text = [*(65 + np.arange(40) % 26).tolist(), 258]
    engine = ScriptedEngine(lambda prompt: text, experts=None, chunks=[1], chunk_seconds=0.02)
    proxy = Proxy(engine=engine, renderer=renderer, sampling=Sampling(), limits=Limits())
    async with proxy.open(), proxy.session("t") as handle, aiohttp.ClientSession() as client:
        async with client.post(f"{handle.url}/v1/chat/completions", json=BODY | {"stream": True}) as response:
            seen = b""
            while seen.count(b'"content": "') < 4:
                seen += await response.content.readany()
            assert not handle.session.turns
            seen += await response.read()
        assert seen.endswith(b"data: [DONE]\n\n") and len(handle.session.turns) == 1


async def test_what_was_sampled_for_a_client_that_went_is_counted(renderer):
    engine = ScriptedEngine(lambda prompt: [65] * 50 + [258], experts=None, chunks=[1], chunk_seconds=0.05)
    proxy = Proxy(engine=engine, renderer=renderer, sampling=Sampling(), limits=Limits())
    async with proxy.open(), proxy.session("t") as handle, aiohttp.ClientSession() as client:
        response = await client.post(f"{handle.url}/v1/chat/completions", json=BODY | {"stream": True})
        await asyncio.sleep(0.3)
        response.close()
        await asyncio.sleep(1)
        (turn,) = handle.session.turns
        assert turn.rejected == "cancelled" and 0 < len(turn.generation.output_ids) < 50
        assert handle.session.fidelity().excluded == {"cancelled": len(turn.generation.output_ids)}


def test_a_trial_of_100k_tokens_with_routing_holds_them_once(renderer):
    layers, experts, each, size = 48, 128, 8, 100_000
    session = Session("abc", renderer, Limits(context_tokens=10**6, experts=experts))
    history = [Message("user", "x" * (size // 2))]
    payload, peaks = size * layers * each, []
    tracemalloc.start()
    try:
        for turn in range(3):
            plan = session.plan(tuple(history), ())
            made = _made(plan, layers, experts, each)
            tracemalloc.reset_peak()
            session.add(plan, made, sampling=Sampling())
            peaks.append(tracemalloc.get_traced_memory()[1])
            history += [session.answers[turn].message, Message("user", "y" * (size // 4))]
        held, _ = tracemalloc.get_traced_memory()
        (segment,) = session.segments()
        peaks.append(tracemalloc.get_traced_memory()[1])
        del session, plan, made
        shipped, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert segment.routing_TLK is not None and segment.routing_TLK.dtype == np.uint8
    assert segment.routed_T[:-1].all() and len(segment.ids_T) > size
    assert held < 1.2 * payload and shipped < 1.2 * payload and max(peaks) < 2.5 * payload


def _made(plan, layers: int, experts: int, each: int) -> Generation:
    output = np.asarray([65, 66, 258], np.int32)
    ids = np.concatenate([plan.prompt_ids, output])
    return Generation(
        prompt_len=len(plan.prompt_ids),
        output_ids=output,
        logprobs=np.asarray([-1, -1, -1], np.float32),
        routing=made_up_routing(ids, layers, experts, each)[plan.routing_start :].copy(),
        routing_start=plan.routing_start,
        versions=(VersionSpan(version=0, start=0, stop=3),),
        finish="stop",
    )
