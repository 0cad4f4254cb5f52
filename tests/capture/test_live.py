"""The whole path against a real server: three dialects, streamed and not, capture what the model computes."""

import asyncio
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from lego.capture.server import Proxy
from lego.capture.session import Limits, Session
from lego.chat.render import Renderer
from lego.engine.vllm_client import VllmEngine
from lego.records import Drift, Sampling
from tests.engine.reference import reference

SYSTEM = "You are a careful agent in a small box."
ASKED = "List the files, please."
CALL, ARGUMENTS, RESULT = "call_before", '{"command": "ls"}', "a.py\nb.py\n"
SAID = ("Go on.", "  one more: \N{PILE OF POO} \u00e9\n", "<tool_response>x</tool_response>", "What did you do?")
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = {"name": "bash", "description": "Runs a command."}


class Chat:
    """A harness that speaks chat completions; its history holds a call and a result from before."""

    def __init__(self, url: str, stream: bool) -> None:
        self.client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", max_retries=0)
        self.stream = stream
        call = {"id": CALL, "type": "function", "function": {"name": "bash", "arguments": ARGUMENTS}}
        self.messages: list[Any] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": ASKED},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": CALL, "content": RESULT},
        ]

    async def turn(self, said: str) -> None:
        self.messages.append({"role": "user", "content": said})
        message = (await self.answer()).choices[0].message
        self.messages.append(message.model_dump(exclude_none=True))

    async def answer(self) -> Any:
        tools: Any = [{"type": "function", "function": TOOL | {"parameters": SCHEMA}}]
        if not self.stream:
            return await self.client.chat.completions.create(model="m", messages=self.messages, tools=tools)
        async with self.client.chat.completions.stream(model="m", messages=self.messages, tools=tools) as events:
            async for _ in events:
                pass
            return events.current_completion_snapshot  # the final one raises where an answer is cut


class Responses:
    """The same in Responses."""

    def __init__(self, url: str, stream: bool) -> None:
        self.client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", max_retries=0)
        self.stream = stream
        self.items: list[Any] = [
            {"role": "user", "content": ASKED},
            {"type": "function_call", "call_id": CALL, "name": "bash", "arguments": ARGUMENTS},
            {"type": "function_call_output", "call_id": CALL, "output": RESULT},
        ]

    async def turn(self, said: str) -> None:
        self.items.append({"role": "user", "content": [{"type": "input_text", "text": said}]})
        self.items += [item.model_dump(exclude_none=True) for item in (await self.answer()).output]

    async def answer(self) -> Any:
        tools = [TOOL | {"type": "function", "parameters": SCHEMA}]
        asked: Any = {"model": "m", "instructions": SYSTEM, "input": self.items, "tools": tools, "store": False}
        if not self.stream:
            return await self.client.responses.create(**asked)
        events: list[Any] = [event async for event in await self.client.responses.create(**asked, stream=True)]
        return events[-1].response


class Messages:
    """The same in Messages."""

    def __init__(self, url: str, stream: bool) -> None:
        self.client = anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0)
        self.stream = stream
        self.said: list[Any] = [{"type": "tool_result", "tool_use_id": CALL, "content": RESULT}]
        call = {"type": "tool_use", "id": CALL, "name": "bash", "input": {"command": "ls"}}
        self.messages: list[Any] = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": [call]}]

    async def turn(self, said: str) -> None:
        self.messages.append({"role": "user", "content": [*self.said, {"type": "text", "text": said}]})
        self.said = []
        blocks = [block.model_dump(exclude_none=True) for block in (await self.answer()).content]
        self.messages.append({"role": "assistant", "content": blocks})

    async def answer(self) -> Any:
        tools = [TOOL | {"input_schema": SCHEMA}]
        asked: Any = {"model": "m", "max_tokens": 999, "system": SYSTEM, "messages": self.messages, "tools": tools}
        if not self.stream:
            return await self.client.messages.create(**asked)
        async with self.client.messages.stream(**asked) as events:
            return await events.get_final_message()


async def trial(proxy: Proxy, harness: Any, stream: bool) -> Session:
    async with proxy.session("t") as handle:
        client = harness(handle.url, stream)
        for said in SAID:
            await client.turn(said)
    return handle.session


async def all_trials(engine: VllmEngine, model: Path, seed: int) -> dict[str, Session]:
    """Six sessions, sampled at the same time with the same seed."""
    proxy = Proxy(
        engine=engine,
        renderer=Renderer.load(model),
        sampling=Sampling(max_tokens=150, seed=seed),
        limits=Limits(context_tokens=4000, experts=engine.model.experts),
    )
    runs = [(harness, stream) for harness in (Chat, Responses, Messages) for stream in (False, True)]
    async with proxy.open(), asyncio.TaskGroup() as group:
        tasks = {f"{run[0].__name__} stream={run[1]}": group.create_task(trial(proxy, *run)) for run in runs}
    return {name: task.result() for name, task in tasks.items()}


# What random weights say with these: 9 has cut answers and whole ones, 38 thinks as well.
@pytest.mark.parametrize("seed", [9, 38])
async def test_all_dialects_streamed_or_not_capture_the_same_and_what_the_model_computes(
    vllm_engine: VllmEngine, tiny_model: Path, seed: int
):
    sessions = await all_trials(vllm_engine, tiny_model, seed)
    first = sessions["Chat stream=False"].turns
    (whole,) = sessions["Chat stream=False"].segments()
    logprobs, experts = reference(tiny_model, whole.ids_T, 1)
    for name, session in sessions.items():
        assert [turn.drift for turn in session.turns] == [Drift.FIRST, Drift.NONE, Drift.NONE, Drift.NONE], name
        for turn, same in zip(session.turns, first, strict=True):
            np.testing.assert_array_equal(turn.prompt_ids, same.prompt_ids, name)
            np.testing.assert_array_equal(turn.generation.output_ids, same.generation.output_ids, name)
        (segment,) = session.segments()
        sampled = segment.mask_T[1:]
        assert sampled.sum() == sum(len(turn.generation.output_ids) for turn in first)
        np.testing.assert_allclose(segment.logprobs_T[1:][sampled], logprobs[sampled], atol=1e-4, err_msg=name)
        assert segment.routing_TLK is not None and segment.routed_T[:-1].all(), name
        np.testing.assert_array_equal(np.sort(segment.routing_TLK[:-1], -1), experts, name)
