"""What a program in a box, or a broken engine, may do to the proxy: an answer of its own, and no end of the run."""

import asyncio
import json

import aiohttp
import numpy as np
import pytest

from lego.capture.journal import Origin
from lego.capture.server import Proxy
from lego.capture.session import ContextExceeded, Limits, Session
from lego.chat.messages import Message, ToolCall
from lego.engine.scripted import ScriptedEngine
from lego.records import Sampling
from tests.capture.double import EXPERTS, generation

CALL = '<tool_call>\n{"name": "bash", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
USER = Message("user", "U")
BODY = {"model": "m", "messages": [{"role": "user", "content": "U"}]}


def _proxy(renderer) -> Proxy:
    engine = ScriptedEngine(lambda prompt: [65, 258], experts=None)
    return Proxy(engine=engine, renderer=renderer, sampling=Sampling(), limits=Limits())


async def test_a_body_that_cannot_be_unpacked_is_a_400(renderer):
    async with _proxy(renderer).open() as proxy, proxy.session("t") as handle, aiohttp.ClientSession() as client:
        url, gzip = f"{handle.url}/v1/messages", {"Content-Encoding": "gzip"}
        async with client.post(url, data=b"no gzip at all", headers=gzip) as response:
            assert response.status == 400 and (await response.json())["type"] == "error"
        assert handle.bug is None


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_another_method_than_post_samples_nothing(renderer, method: str):
    async with _proxy(renderer).open() as proxy, proxy.session("t") as handle, aiohttp.ClientSession() as client:
        async with client.request(method, f"{handle.url}/v1/chat/completions", json=BODY) as response:
            assert response.status == 405 and (await response.json())["error"]["message"]
        assert not handle.session.turns


@pytest.mark.parametrize("target", ["*", "a:80", "http://a"])
async def test_odd_targets_get_an_answer(renderer, target: str):
    async with _proxy(renderer).open() as proxy:
        host, port = proxy.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{'CONNECT' if target == 'a:80' else 'OPTIONS'} {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        status = (await asyncio.wait_for(reader.readline(), 5)).split()[1]
        writer.close()
        assert status in (b"400", b"401", b"404")


async def test_a_client_that_waits_for_leave_to_send_gets_it(renderer):
    async with _proxy(renderer).open() as proxy, proxy.session("t") as handle:
        host, port = proxy.url.removeprefix("http://").split(":")
        path, body = handle.url.removeprefix(proxy.url), json.dumps(BODY).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path}/v1/chat/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode())
        assert await asyncio.wait_for(reader.readline(), 5) == b"HTTP/1.1 100 Continue\r\n"
        writer.write(body)
        assert b"HTTP/1.1 200" in await asyncio.wait_for(reader.read(), 5)
        writer.close()


async def test_the_description_of_a_model_is_found_by_its_name(renderer):
    async with _proxy(renderer).open() as proxy, proxy.session("t") as handle, aiohttp.ClientSession() as client:
        async with client.get(f"{handle.url}/v1/models/policy") as response:
            assert (await response.json())["id"] == "policy"
        async with client.get(f"{handle.url}/v1/models/other") as response:
            assert response.status == 404 and (await response.json())["error"]["message"]


async def test_a_session_of_a_proxy_that_is_not_open_is_refused(renderer):
    with pytest.raises(RuntimeError, match="not open"):
        async with _proxy(renderer).session("t"):
            pass


def _asked(session: Session, *messages: Message) -> Message:
    plan = session.plan(messages, ())
    turn = session.add(
        plan, generation(plan.prompt_ids, session._renderer._vocabulary.encode(CALL)), sampling=Sampling()
    )
    return session.answers[turn.index].message


@pytest.mark.parametrize("levels", [90, 600, 5000])
def test_deep_arguments_are_another_answer_and_no_recursion(renderer, levels: int):
    session = Session("abc", renderer, Limits())
    answer = _asked(session, USER)
    deep = '{"a": ' + "[" * levels + "]" * levels + "}"
    told = Message("assistant", calls=(ToolCall(answer.calls[0].id, "bash", deep),))
    assert session.plan((USER, told, Message("user", "V")), ()).parent is None


def test_counting_tokens_changes_nothing(renderer):
    session = Session("abc", renderer, Limits())
    answer = _asked(session, USER)
    session.prompt((USER, answer, Message("user", "V")), ())
    assert session._in_history == set() and not session._histories.beginning((USER, answer), ()).messages[1:]


def test_a_text_that_cannot_fit_is_refused_before_it_is_rendered(renderer):
    session = Session("abc", renderer, Limits(context_tokens=1000))
    with pytest.raises(ContextExceeded, match="prompt of about 3125 tokens, limit 1000"):
        session.plan((Message("user", "x" * 100_000),), (), Origin())
    assert session.journal.refusals == {0: "prompt of about 3125 tokens, limit 1000"}


def test_of_twins_that_say_the_same_a_respelled_history_means_the_one_gone_on_from(renderer):
    session = Session("abc", renderer, Limits())
    plans = [session.plan((USER,), ()) for _ in range(2)]
    output = session._renderer._vocabulary.encode("same<|im_end|>")
    session.add(plans[0], generation(plans[0].prompt_ids, output), sampling=Sampling())
    told = (USER, Message("assistant", "same"), Message("user", "V"))
    assert session.plan(told, ()).parent == 0
    session.add(plans[1], generation(plans[1].prompt_ids, output), sampling=Sampling())
    assert session.plan((USER, Message("assistant", "same "), Message("user", "V")), ()).parent == 0


@pytest.mark.parametrize(
    ("cause", "spoil"),
    [
        ("routing_start", lambda g: {"routing_start": -1}),
        ("logprobs", lambda g: {"logprobs": g.logprobs[:, None]}),
        ("logprobs", lambda g: {"logprobs": g.logprobs - np.float32(9999)}),
        ("routing_experts", lambda g: {"routing": g.routing.astype(np.float32)}),
        ("routing_experts", lambda g: {"routing": g.routing.astype(np.int8)}),
    ],
)
def test_arrays_of_another_kind_fail_the_cross_check(renderer, cause: str, spoil):
    session = Session("abc", renderer, Limits(experts=EXPERTS))
    plan = session.plan((USER,), ())
    made = generation(plan.prompt_ids, [65, 66, 258])
    turn = session.add(plan, type(made)(**{**vars(made), **spoil(made)}), sampling=Sampling())
    assert turn.rejected == cause and session.segments() == ()


def test_rows_of_another_number_of_layers_than_before_fail_the_cross_check(renderer):
    session = Session("abc", renderer, Limits(experts=EXPERTS))
    for index, layers in enumerate((3, 2)):
        plan = session.plan((Message("user", str(index)),), ())
        made = generation(plan.prompt_ids, [65, 66, 258])
        turn = session.add(plan, type(made)(**{**vars(made), "routing": made.routing[:, :layers]}), sampling=Sampling())
        assert turn.rejected == (None if layers == 3 else "routing_rows")
