"""A model server that answers from a script, in three wire formats: tries a harness without a model."""

import json
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from harnesses.base import End, Endpoint, Harness
from sandbox.base import BoxSpec, Change, ExecResult, Sandbox

PORT = 4000
USAGE = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
CHAT_USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
LARGEST_BODY = 1 << 26


@dataclass(frozen=True)
class Shell:
    """The model calls the harness's shell tool."""

    command: str


@dataclass(frozen=True)
class Say:
    """The model answers with text only, which ends the usual run."""

    text: str


@dataclass(frozen=True)
class Fail:
    """The server answers with an HTTP error."""

    status: int
    message: str = "scripted failure"


Step = Shell | Say | Fail


@dataclass(frozen=True)
class Request:
    """One request as it arrived."""

    path: str
    body: Mapping[str, Any]

    @property
    def prompt_chars(self) -> int:
        """Characters of JSON in all that becomes the prompt."""
        parts = ("instructions", "system", "input", "messages", "tools")
        return sum(len(json.dumps(self.body[part])) for part in parts if part in self.body)

    def tool(self) -> Mapping[str, Any]:
        """The tool that runs a shell command: the first that takes `cmd` or `command`."""
        for tool in self.body.get("tools", ()):
            tool = tool.get("function", tool)
            schema = tool.get("parameters") or tool.get("input_schema") or {}
            fields = {"cmd", "command"} & set(schema.get("properties", ()))
            if fields:
                return {"name": tool["name"], "field": fields.pop()}
        raise ValueError(f"no shell tool among the {len(self.body.get('tools', ()))} tools of {self.path}")


@asynccontextmanager
async def rehearse(script: Sequence[Step], sock: socket.socket) -> AsyncIterator[list[Request]]:
    """Serves `script` on a listening socket, its last step for ever; yields the growing list of requests."""
    requests: list[Request] = []

    async def answer(http: web.Request) -> web.StreamResponse:
        request = Request(path=http.path, body=await http.json())
        step = script[min(len(requests), len(script) - 1)]
        requests.append(request)
        if isinstance(step, Fail):
            error = {"message": step.message, "type": "server_error", "code": None, "param": None}
            return web.json_response({"type": "error", "error": error}, status=step.status)
        text = "".join(_events(request, step, len(requests)))
        return web.Response(text=text, content_type="text/event-stream")

    app = web.Application(client_max_size=LARGEST_BODY)
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, sock).start()
        yield requests
    finally:
        await runner.cleanup()


@dataclass(frozen=True)
class Performance:
    """How one harness run against a script came out."""

    end: End
    result: ExecResult
    requests: Sequence[Request]
    changes: tuple[Change, ...]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Where harnesses are tried: boxes on a base folder, and the cache that holds the programs."""

    sandbox: Sandbox
    cache: Path
    base: Path
    timeout_s: float = 60.0
    context_tokens: int = 8192
    output_tokens: int = 1024

    async def perform(self, harness: Harness, script: Sequence[Step], instruction: str) -> Performance:
        """Runs `harness` on `instruction` in a fresh box, its model being `script`."""
        endpoint = Endpoint(
            url=f"http://127.0.0.1:{PORT}",
            key="rehearsal",
            model="policy",
            context_tokens=self.context_tokens,
            output_tokens=self.output_tokens,
        )
        command = harness.command(instruction, endpoint)
        async with self.sandbox.open(BoxSpec(base=self.base, mounts=harness.mounts(self.cache))) as box:
            for path, content in command.files.items():
                await box.put(path, content)
            async with rehearse(script, await box.listen(PORT)) as requests:
                result = await box.exec(command.argv, env=command.env, stdin=command.stdin, timeout_s=self.timeout_s)
            await box.kill()
            return Performance(harness.ended(result), result, requests, await box.changes())


def _events(request: Request, step: Shell | Say, number: int) -> Iterable[str]:
    if request.path.endswith("/responses"):
        events = _responses(request, step, number)
    elif request.path.endswith("/messages"):
        events = _messages(request, step, number)
    else:
        return [*(f"data: {json.dumps(chunk)}\n\n" for chunk in _chat(request, step, number)), "data: [DONE]\n\n"]
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]


def _call(request: Request, step: Shell) -> tuple[str, str]:
    tool = request.tool()
    return tool["name"], json.dumps({tool["field"]: step.command})


def _responses(request: Request, step: Shell | Say, number: int) -> Iterable[dict[str, Any]]:
    response = {"id": f"resp_{number}", "object": "response", "created_at": 1, "model": request.body["model"]}
    item: dict[str, Any]
    yield {"type": "response.created", "response": {**response, "status": "in_progress", "output": []}}
    if isinstance(step, Shell):
        name, arguments = _call(request, step)
        item = {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", "name": name}
        yield {"type": "response.output_item.added", "output_index": 0, "item": {**item, "arguments": ""}}
        place = {"item_id": item["id"], "output_index": 0}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **place, "arguments": arguments}
        item["arguments"] = arguments
    else:
        item = {"type": "message", "id": f"msg_{number}", "role": "assistant"}
        part = {"type": "output_text", "text": step.text, "annotations": []}
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        yield {"type": "response.output_item.added", "output_index": 0, "item": {**item, "content": []}}
        yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
        yield {"type": "response.output_text.delta", **place, "delta": step.text}
        yield {"type": "response.output_text.done", **place, "text": step.text}
        item["content"] = [part]
    item["status"] = "completed"
    usage = {**USAGE, "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    yield {
        "type": "response.completed",
        "response": {**response, "status": "completed", "output": [item], "usage": usage},
    }


def _chat(request: Request, step: Shell | Say, number: int) -> Iterable[dict[str, Any]]:
    delta: dict[str, Any] = {"role": "assistant", "content": None}
    if isinstance(step, Shell):
        name, arguments = _call(request, step)
        function = {"name": name, "arguments": arguments}
        delta["tool_calls"] = [{"index": 0, "id": f"call_{number}", "type": "function", "function": function}]
    else:
        delta["content"] = step.text
    reason = "tool_calls" if isinstance(step, Shell) else "stop"
    chunk = {"id": f"chat_{number}", "object": "chat.completion.chunk", "created": 1, "model": request.body["model"]}
    yield {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
    yield {**chunk, "choices": [], "usage": CHAT_USAGE}


def _messages(request: Request, step: Shell | Say, number: int) -> Iterable[dict[str, Any]]:
    usage = {"input_tokens": USAGE["input_tokens"], "output_tokens": 1}
    message = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": request.body["model"]}
    yield {"type": "message_start", "message": {**message, "content": [], "stop_reason": None, "usage": usage}}
    if isinstance(step, Shell):
        name, arguments = _call(request, step)
        block = {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": arguments}
    else:
        block = {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": step.text}
    yield {"type": "content_block_start", "index": 0, "content_block": block}
    yield {"type": "content_block_delta", "index": 0, "delta": delta}
    yield {"type": "content_block_stop", "index": 0}
    reason = {"stop_reason": "tool_use" if isinstance(step, Shell) else "end_turn", "stop_sequence": None}
    yield {"type": "message_delta", "delta": reason, "usage": {"output_tokens": USAGE["output_tokens"]}}
    yield {"type": "message_stop"}
