"""A stand-in for a harness: one long conversation in each wire format, told whole with every call."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


@dataclass(frozen=True)
class Said:
    """A call that was answered: the answer's own items, and what its tool gave back."""

    answer: Body
    result: str


def chat(system: str, user: Sequence[str], said: Sequence[Said]) -> Body:
    messages: list[Body] = [{"role": "system", "content": system}]
    messages += [{"role": "user", "content": text} for text in user]
    for each in said:
        told = each.answer["choices"][0]["message"]
        messages.append({"role": "assistant", "content": told["content"], "tool_calls": told["tool_calls"]})
        messages.append({"role": "tool", "tool_call_id": told["tool_calls"][0]["id"], "content": each.result})
    function = {"name": "bash", "description": "Runs a command.", "parameters": SCHEMA}
    return {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": function}]}


def responses(system: str, user: Sequence[str], said: Sequence[Said]) -> Body:
    items = [_item("developer", system), *(_item("user", text) for text in user)]
    for each in said:
        items += each.answer["output"]
        call = next(item for item in each.answer["output"] if item["type"] == "function_call")
        items.append({"type": "function_call_output", "call_id": call["call_id"], "output": each.result})
    tool = {"type": "function", "name": "bash", "description": "Runs a command.", "strict": False, "parameters": SCHEMA}
    return {"model": "policy", "input": items, "tools": [tool], "store": False}


def messages(system: str, user: Sequence[str], said: Sequence[Said]) -> Body:
    told: list[Body] = [{"role": "user", "content": [{"type": "text", "text": text} for text in user]}]
    for each in said:
        call = next(block for block in each.answer["content"] if block["type"] == "tool_use")
        told.append({"role": "assistant", "content": each.answer["content"]})
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": each.result}
        told.append({"role": "user", "content": [result]})
    tool = {"name": "bash", "description": "Runs a command.", "input_schema": SCHEMA}
    return {"model": "policy", "max_tokens": 4096, "system": system, "messages": told, "tools": [tool]}


Teller = Callable[[str, Sequence[str], Sequence[Said]], Body]
DIALECTS: Mapping[str, Teller] = {"chat/completions": chat, "responses": responses, "messages": messages}


def _item(role: str, text: str) -> Body:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def call_text(command: str) -> str:
    """What a Qwen3 model samples to call the tool."""
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"I look.\n<tool_call>\n{call}\n</tool_call><|im_end|>"
