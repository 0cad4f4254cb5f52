import asyncio
import json
import socket
import subprocess
import sys
from contextlib import asynccontextmanager

import aiohttp
import anthropic
import numpy as np
import openai
import pytest

from lego.capture.server import Proxy
from lego.capture.session import Limits
from lego.errors import EngineError, UsageError
from lego.records import Drift, Outcome, Sampling
from tests.capture.double import EXPERTS, ScriptedEngine

CALL = 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls", "n": 1.0}}\n</tool_call><|im_end|>'
DONE = "It is done.<|im_end|>"
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "bash", "description": "d", "parameters": SCHEMA}}]
RESPONSES_TOOLS = [{"type": "function", "name": "bash", "description": "d", "strict": False, "parameters": SCHEMA}]
MESSAGES_TOOLS = [{"name": "bash", "description": "d", "input_schema": SCHEMA}]
LIMITS = Limits(context_tokens=4000, experts=EXPERTS)


@asynccontextmanager
async def trial(renderer, answers, *, limits=LIMITS, delay_s=0.0, beat_s=10.0):
    engine = ScriptedEngine(renderer, answers, delay_s)
    sampling = Sampling(max_tokens=300)
    proxy = Proxy(engine=engine, renderer=renderer, sampling=sampling, limits=limits, beat_s=beat_s)
    async with proxy.open(), proxy.session("t") as handle:
        yield engine, handle


def run(main):
    return asyncio.run(main)


def assert_one_whole_segment(handle, turns):
    fidelity = handle.session.fidelity()
    (segment,) = handle.session.segments()
    assert fidelity.turns == turns and fidelity.trained == fidelity.sampled == segment.mask_T.sum()
    assert segment.routed_T[:-1].all() and not segment.routed_T[-1]
    for turn in handle.session.turns:
        span = slice(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.generation.output_ids))
        assert np.array_equal(segment.ids_T[span], turn.generation.output_ids)
    return segment


@pytest.mark.parametrize("stream", [False, True])
def test_chat_with_the_official_client_is_one_segment(renderer, stream):
    async def main():
        async with trial(renderer, [CALL, DONE]) as (engine, handle):
            client = openai.AsyncOpenAI(base_url=handle.url + "/v1", api_key="x", max_retries=0)
            messages = [
                {"role": "system", "content": "S"},
                {"role": "user", "content": [{"type": "text", "text": "U"}]},
            ]
            first = await chat(client, messages, stream)
            assert first.choices[0].finish_reason == "tool_calls" and first.choices[0].message.content == "I look."
            call = first.choices[0].message.tool_calls[0]
            assert json.loads(call.function.arguments) == {"command": "ls", "n": 1.0}
            told = {
                "id": call.id,
                "type": "function",
                "function": {"name": "bash", "arguments": '{"n":1,"command":"ls"}'},
            }
            messages += [
                {"role": "assistant", "content": [{"type": "text", "text": "I look."}], "tool_calls": [told]},
                {"role": "tool", "tool_call_id": call.id, "content": "file"},
            ]
            last = await chat(client, messages, stream)
            assert last.choices[0].message.content == "It is done." and last.choices[0].finish_reason == "stop"
            assert last.usage.prompt_tokens == len(engine.calls[1].prompt_ids)
            assert last.usage.completion_tokens == len("It is done.") + 1
            assert_one_whole_segment(handle, 2)

    run(main())


async def chat(client, messages, stream):
    arguments = {"model": "m", "messages": messages, "tools": CHAT_TOOLS}
    if not stream:
        return await client.chat.completions.create(**arguments)
    async with client.chat.completions.stream(**arguments, stream_options={"include_usage": True}) as events:
        return await events.get_final_completion()


@pytest.mark.parametrize("stream", [False, True])
def test_responses_with_the_official_client_is_one_segment(renderer, stream):
    async def main():
        async with trial(renderer, [CALL, DONE]) as (engine, handle):
            client = openai.AsyncOpenAI(base_url=handle.url + "/v1", api_key="x", max_retries=0)
            items = [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]}]
            items += [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]}]
            first = await respond(client, items, stream)
            assert [item.type for item in first.output] == ["message", "function_call"]
            assert first.status == "completed" and first.output_text == "I look."
            call = first.output[1]
            items += [item.model_dump(exclude_none=True) for item in first.output]
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": "file"}]
            last = await respond(client, items, stream)
            assert last.output_text == "It is done."
            assert last.usage.input_tokens == len(engine.calls[1].prompt_ids)
            assert last.usage.input_tokens_details.cached_tokens > 0
            assert_one_whole_segment(handle, 2)

    run(main())


async def respond(client, items, stream):
    tools = [*RESPONSES_TOOLS, {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}, {"type": "namespace"}]
    arguments = {"model": "m", "input": items, "tools": tools, "store": False}
    if not stream:
        return await client.responses.create(**arguments)
    numbers = []
    async for event in await client.responses.create(**arguments, stream=True):
        numbers.append(event.sequence_number)
    assert numbers == list(range(len(numbers))) and event.type == "response.completed"
    return event.response


@pytest.mark.parametrize("stream", [False, True])
def test_messages_with_the_official_client_is_one_segment(renderer, stream):
    async def main():
        async with trial(renderer, [CALL, DONE]) as (engine, handle):
            client = anthropic.AsyncAnthropic(base_url=handle.url, api_key="x", max_retries=0)
            messages = [
                {"role": "user", "content": [{"type": "text", "text": "U", "cache_control": {"type": "ephemeral"}}]}
            ]
            first = await message(client, messages, stream, "aaaaa")
            assert [block.type for block in first.content] == ["text", "tool_use"] and first.stop_reason == "tool_use"
            call = first.content[1]
            assert call.input == {"command": "ls", "n": 1.0}
            messages[0] = {"role": "user", "content": "U"}
            messages += [
                {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "file"}]},
                {"role": "system", "content": "mid"},
            ]
            last = await message(client, messages, stream, "bbbbb")
            assert last.content[0].text == "It is done." and last.stop_reason == "end_turn"
            assert last.usage.input_tokens + last.usage.cache_read_input_tokens == len(engine.calls[1].prompt_ids)
            text = renderer.decode(engine.calls[1].prompt_ids)
            assert "<|im_start|>system\nmid<|im_end|>" in text and "billing" not in text
            assert_one_whole_segment(handle, 2)

    run(main())


async def message(client, messages, stream, cch):
    system = [{"type": "text", "text": f"x-anthropic-billing-header: cch={cch};"}, {"type": "text", "text": "S"}]
    arguments = {"model": "m", "max_tokens": 999, "messages": messages, "system": system, "tools": MESSAGES_TOOLS}
    if not stream:
        return await client.messages.create(**arguments)
    async with client.messages.stream(**arguments) as events:
        return await events.get_final_message()


def test_count_tokens_is_the_real_prompt_length(renderer):
    async def main():
        async with trial(renderer, [DONE]) as (engine, handle):
            client = anthropic.AsyncAnthropic(base_url=handle.url, api_key="x", max_retries=0)
            asked = {
                "model": "m",
                "system": "S",
                "messages": [{"role": "user", "content": "U"}],
                "tools": MESSAGES_TOOLS,
            }
            counted = await client.messages.count_tokens(**asked)
            await client.messages.create(**asked, max_tokens=9)
            assert counted.input_tokens == len(engine.calls[0].prompt_ids) and len(handle.session.turns) == 1

    run(main())


def test_the_recipes_sampling_is_used_and_the_harness_s_is_recorded(renderer):
    async def main():
        async with trial(renderer, [DONE]) as (engine, handle):
            client = openai.AsyncOpenAI(base_url=handle.url + "/v1", api_key="x", max_retries=0)
            user = [{"role": "user", "content": "U"}]
            await client.chat.completions.create(model="m", messages=user, temperature=0, top_p=0.9, max_tokens=7)
            assert [call.sampling for call in engine.calls] == [Sampling(max_tokens=300)]
            assert handle.session.turns[0].asked == {"temperature": 0, "top_p": 0.9, "max_tokens": 7}

    run(main())


def test_room_left_clamps_the_answer_and_truncation_shows_in_each_dialect(renderer):
    async def main():
        limits = Limits(context_tokens=400, experts=EXPERTS)
        async with trial(renderer, ["x" * 500] * 3, limits=limits) as (_engine, handle):
            user = [{"role": "user", "content": "U"}]
            client = openai.AsyncOpenAI(base_url=handle.url + "/v1", api_key="x", max_retries=0)
            long = [{"role": "user", "content": "U" * 300}]
            first = await client.chat.completions.create(model="m", messages=long)
            second = await client.responses.create(model="m", input="U")
            assert first.choices[0].finish_reason == "length"
            assert first.usage.total_tokens == 400
            assert (second.status, second.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            claude = anthropic.AsyncAnthropic(base_url=handle.url, api_key="x", max_retries=0)
            third = await claude.messages.create(model="m", max_tokens=5, messages=user)
            assert third.stop_reason == "max_tokens"

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_limit_is_refused_in_the_words_of_each_dialect(renderer, stream):
    async def main():
        async with trial(renderer, [], limits=Limits(context_tokens=50)) as (_, handle):
            user = [{"role": "user", "content": "U" * 100}]
            client = openai.AsyncOpenAI(base_url=handle.url + "/v1", api_key="x", max_retries=0)
            with pytest.raises(openai.BadRequestError, match="maximum context length is 50 tokens") as caught:
                await client.chat.completions.create(model="m", messages=user, stream=stream)
            assert caught.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match="maximum context length"):
                await client.responses.create(model="m", input="U" * 100, stream=stream)
            claude = anthropic.AsyncAnthropic(base_url=handle.url, api_key="x", max_retries=0)
            with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 50 maximum"):
                await claude.messages.create(model="m", max_tokens=5, messages=user, stream=stream)
            assert handle.session.breach.outcome is Outcome.CONTEXT_EXCEEDED and not handle.session.turns

    run(main())


def test_the_turn_limit_is_refused_without_a_retry(renderer):
    async def main():
        async with trial(renderer, [DONE], limits=Limits(max_turns=1, experts=EXPERTS)) as (_, handle):
            client = openai.AsyncOpenAI(base_url=handle.url + "/v1", api_key="x", max_retries=0)
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "U"}])
            with pytest.raises(openai.BadRequestError, match="turn limit"):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "V"}])
            assert handle.session.breach.outcome is Outcome.TURN_LIMIT

    run(main())


def test_unknown_and_closed_trials_get_the_dialect_s_own_error(renderer):
    async def main():
        async with trial(renderer, [DONE]) as (_, handle):
            root = handle.url.split("/t/")[0]
            user = {"model": "m", "messages": [{"role": "user", "content": "U"}]}
            by_key = openai.AsyncOpenAI(base_url=root + "/v1", api_key=handle.key, max_retries=0)
            assert (await by_key.chat.completions.create(**user)).choices[0].message.content == "It is done."
            with pytest.raises(openai.AuthenticationError):
                await openai.AsyncOpenAI(base_url=root + "/v1", api_key="no", max_retries=0).chat.completions.create(
                    **user
                )
            with pytest.raises(openai.NotFoundError):
                await openai.AsyncOpenAI(base_url=root + "/t/no/v1", api_key="x", max_retries=0).responses.create(
                    input="U"
                )
            with pytest.raises(anthropic.NotFoundError) as caught:
                claude = anthropic.AsyncAnthropic(base_url=root + "/t/no", api_key="x", max_retries=0)
                await claude.messages.create(**user, max_tokens=1)
            assert caught.value.body["type"] == "error"
            handle.session.close()
            with pytest.raises(openai.NotFoundError, match="over"):
                await by_key.chat.completions.create(**user)

    run(main())


def test_a_handed_over_listener_serves_the_same_session_on_any_path(renderer):
    async def main():
        async with trial(renderer, [DONE, DONE]) as (_, handle):
            listener = socket.create_server(("127.0.0.1", 0))
            async with handle.serve(listener):
                url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
                client = openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0)
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "U"}])
                assert (await client.models.list()).data[0].id == "policy"
            assert len(handle.session.turns) == 1

    run(main())


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_stops_the_engine_and_is_no_training_data(renderer, path, stream):
    async def main():
        async with trial(renderer, [DONE], delay_s=60, beat_s=0.05) as (engine, handle):
            user = [{"role": "user", "content": "U"}]
            body = {"model": "m", "max_tokens": 9, "stream": stream, "messages": user, "input": "U"}
            before = len(asyncio.all_tasks())
            with pytest.raises(asyncio.TimeoutError):
                async with aiohttp.ClientSession() as client, asyncio.timeout(0.5):
                    response = await client.post(f"{handle.url}/v1/{path}", json=body)
                    await response.read()
            async with asyncio.timeout(1):
                await asyncio.gather(*handle.calls, return_exceptions=True)
            assert engine.cancelled
            assert [turn.rejected for turn in handle.session.turns] == ["cancelled"]
            assert not handle.session.segments() and len(asyncio.all_tasks()) <= before + 2

    run(main())


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_beats_come_while_sampling_and_are_events(renderer, path):
    async def main():
        async with trial(renderer, [DONE], delay_s=0.5, beat_s=0.1) as (_, handle):
            body = {"stream": True, "max_tokens": 9, "messages": [{"role": "user", "content": "U"}], "input": "U"}
            async with aiohttp.ClientSession() as client, client.post(f"{handle.url}/v1/{path}", json=body) as response:
                first = await response.content.readany()
                assert first and not handle.session.turns
                text = (first + await response.read()).decode()
            assert text.count("data: ") > 6 and "\n:" not in text

    run(main())


def test_an_engine_failure_is_told_and_kept_for_the_trial(renderer):
    async def main():
        async with trial(renderer, []) as (engine, handle):
            engine.error = EngineError("dead replica")
            client = openai.AsyncOpenAI(base_url=handle.url + "/v1", api_key="x", max_retries=0)
            user = [{"role": "user", "content": "U"}]
            with pytest.raises(openai.InternalServerError, match="dead replica"):
                await client.chat.completions.create(model="m", messages=user)
            with pytest.raises(openai.APIError, match="dead replica"):
                async for _ in await client.chat.completions.create(model="m", messages=user, stream=True):
                    pass
            assert handle.engine_error is engine.error

    run(main())


@pytest.mark.parametrize(
    ("label", "trained"),
    [({}, False), ({"x-lego-request": "compaction"}, True), ({"x-codex-turn-metadata": '{"kind":"compaction"}'}, True)],
)
def test_a_call_without_tools_is_trained_where_its_label_says_that_it_compacts(renderer, label, trained):
    async def main():
        async with trial(renderer, [CALL, DONE]) as (_, handle):
            client = openai.AsyncOpenAI(base_url=handle.url + "/v1", api_key="x", max_retries=0)
            user = {"role": "user", "content": "U"}
            await client.chat.completions.create(model="m", messages=[user], tools=CHAT_TOOLS)
            asked = {"role": "user", "content": "Sum up: it listed the files."}
            await client.chat.completions.create(model="m", messages=[asked], extra_headers=label)
            fidelity = handle.session.fidelity()
            assert (fidelity.trained == fidelity.sampled) is trained
            drift = Drift.COMPACTION if trained else Drift.SIDE_REQUEST
            assert handle.session.turns[-1].drift is drift

    run(main())


def test_a_malformed_call_reaches_the_harness_and_its_repair_still_joins(renderer):
    bad = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls", }\n</tool_call><|im_end|>'

    async def main():
        async with trial(renderer, [bad, DONE]) as (_, handle):
            client = openai.AsyncOpenAI(base_url=handle.url + "/v1", api_key="x", max_retries=0)
            messages: list = [{"role": "user", "content": "U"}]
            call = (await chat(client, messages, False)).choices[0].message.tool_calls[0]
            assert call.function.arguments == '{"command": "ls",'
            told = {"id": call.id, "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
            messages += [{"role": "assistant", "content": None, "tool_calls": [told]}]
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "file"}]
            await chat(client, messages, False)
            assert_one_whole_segment(handle, 2)

    run(main())


def test_malformed_arguments_of_a_foreign_history_are_rendered_verbatim(renderer):
    async def main():
        async with trial(renderer, [DONE]) as (engine, handle):
            client = openai.AsyncOpenAI(base_url=handle.url + "/v1", api_key="x", max_retries=0)
            told = {"id": "call_other", "type": "function", "function": {"name": "bash", "arguments": '{"value": '}}
            messages = [
                {"role": "user", "content": "U"},
                {"role": "assistant", "content": None, "tool_calls": [told]},
                {"role": "tool", "tool_call_id": "call_other", "content": "invalid arguments"},
            ]
            await chat(client, messages, False)
            assert '"arguments": {"value": }' in renderer.decode(engine.calls[0].prompt_ids)
            assert handle.session.turns[0].drift is Drift.FIRST

    run(main())


def test_a_taken_port_is_a_usage_error(renderer):
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            proxy = Proxy(engine=ScriptedEngine(renderer, []), renderer=renderer, sampling=Sampling(), limits=LIMITS)
            with pytest.raises(UsageError, match="cannot listen"):
                async with proxy.open(port=taken.getsockname()[1]):
                    pass

    run(main())


def test_many_clients_that_go_at_once_leave_no_task_behind(renderer):
    async def main():
        async with trial(renderer, [], delay_s=60) as (_, handle):
            async with aiohttp.ClientSession() as client:
                await client.get(handle.url + "/v1/models")
            before = len(asyncio.all_tasks())
            body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "U"}]}
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.7), aiohttp.ClientSession() as client:
                    posts = [client.post(handle.url + "/v1/chat/completions", json=body) for _ in range(30)]
                    answers = await asyncio.gather(*posts)
                    await asyncio.gather(*(answer.read() for answer in answers))
            await asyncio.sleep(0.1)
            assert len(asyncio.all_tasks()) <= before and not handle.calls
            assert {turn.rejected for turn in handle.session.turns} == {"cancelled"}

    run(main())


def test_leaving_a_session_ends_its_calls_in_flight(renderer):
    async def main():
        engine = ScriptedEngine(renderer, [DONE], 60)
        proxy = Proxy(engine=engine, renderer=renderer, sampling=Sampling(), limits=LIMITS)
        async with proxy.open(), aiohttp.ClientSession() as client:
            async with proxy.session("t") as handle:
                body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "U"}]}
                response = await client.post(handle.url + "/v1/chat/completions", json=body)
                assert response.status == 200
            assert engine.cancelled and not handle.calls
            assert (await client.post(handle.url + "/v1/chat/completions", json=body)).status == 404

    run(main())


def test_two_trials_at_once_do_not_mix(renderer):
    async def main():
        engine = ScriptedEngine(renderer, [CALL, CALL, DONE, DONE], 0.02)
        proxy = Proxy(engine=engine, renderer=renderer, sampling=Sampling(max_tokens=300), limits=LIMITS)
        async with proxy.open(), proxy.session("a") as a, proxy.session("b") as b:
            await asyncio.gather(dialogue(a), dialogue(b))
            assert_one_whole_segment(a, 2)
            assert_one_whole_segment(b, 2)
            ids = {call.id for h in (a, b) for call in h.session.answers[0].message.calls}
            assert len(ids) == 2

    run(main())


async def dialogue(handle):
    client = openai.AsyncOpenAI(base_url=handle.url + "/v1", api_key="x", max_retries=0)
    messages: list = [{"role": "user", "content": "U"}]
    first = (await chat(client, messages, True)).choices[0].message
    calls = [call.model_dump(include={"id", "type", "function"}) for call in first.tool_calls]
    messages += [{"role": "assistant", "content": first.content, "tool_calls": calls}]
    messages += [{"role": "tool", "tool_call_id": calls[0]["id"], "content": "file"}]
    await chat(client, messages, True)


def test_litellm_is_loaded_late_and_offline_and_without_torch():
    code = "import sys, lego.capture.server; print({'litellm', 'torch', 'transformers', 'vllm'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_reasoning_reaches_the_harness_in_each_dialect(renderer):
    answer = "<think>\nplan A\n</think>\n\nok<|im_end|>"

    async def main():
        async with trial(renderer, [answer] * 4) as (_, handle):
            client = openai.AsyncOpenAI(base_url=handle.url + "/v1", api_key="x", max_retries=0)
            user = [{"role": "user", "content": "U"}]
            plain = await client.chat.completions.create(model="m", messages=user)
            items = await client.responses.create(model="m", input="U")
            claude = anthropic.AsyncAnthropic(base_url=handle.url, api_key="x", max_retries=0)
            body = await message(claude, user, False, "a")
            streamed = await message(claude, user, True, "a")
            assert plain.choices[0].message.reasoning_content == "plan A"
            assert [item.type for item in items.output] == ["reasoning", "message"]
            assert items.output[0].content[0].text == "plan A"
            assert [block.type for block in body.content] == ["thinking", "text"]
            assert [block.type for block in streamed.content] == ["thinking", "text"]
            assert streamed.content[0].thinking == "plan A" and streamed.content[0].signature

    run(main())
