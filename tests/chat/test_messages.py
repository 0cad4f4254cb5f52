"""What a harness, or a program in its box, may send: one reading of each shape, or a clear refusal."""

import json
from typing import Any

import pytest

from lego.chat.messages import BadMessage, Message, in_call_order, joined, json_text, read_messages, read_tools


@pytest.mark.parametrize("raw", [{"role": []}, {"role": "user", "content": [{"type": []}]}, {"role": {}}, {}])
def test_a_field_of_the_wrong_kind_is_a_bad_message(raw: dict):
    with pytest.raises(BadMessage):
        read_messages([raw])


def call(*ids: str) -> dict[str, Any]:
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def answer(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": name}


def test_tool_answers_take_the_order_of_their_calls_and_strangers_come_last() -> None:
    told = [call("a", "b"), answer("?"), answer("b"), answer("a"), {"role": "user", "content": "U"}, answer("b")]
    found = in_call_order(read_messages([*told, call("b", "a"), answer("a"), answer("b")]))
    assert [message.text for message in found if message.role == "tool"] == ["a", "b", "?", "b", "b", "a"]


def test_neighbouring_assistant_messages_are_one_turn_with_the_ids_of_both() -> None:
    one, other = Message("assistant", "a", "r", items=("x",)), Message("assistant", "b", "s", items=("y",))
    assert joined(one, other) == Message("assistant", "ab", "rs", items=("x", "y"))
    told = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
    assert read_messages(told) == (Message("assistant", "ab"),)


def test_a_billing_line_goes_from_each_part_of_a_system_message_and_from_nothing_else() -> None:
    line = "x-anthropic-billing-header: cch=1;"
    parts = [{"type": "text", "text": line}, {"type": "text", "text": f"S {line}"}]
    told = [{"role": "system", "content": parts}, {"role": "system", "content": f"{line}\nS"}]
    found = read_messages([*told, {"role": "user", "content": line}])
    assert [message.text for message in found] == [f"S {line}", "S", line]


def test_an_error_shows_a_wrong_value_in_short() -> None:
    with pytest.raises(BadMessage) as caught:
        read_messages([{"role": "w" * 10_000}])
    assert len(str(caught.value)) < 200


def test_of_a_tool_only_what_a_prompt_tells_is_read_in_one_order() -> None:
    function = {"strict": False, "parameters": {"type": "object"}, "description": None, "name": "f", "x": 1}
    (tool,) = read_tools([{"type": "function", "function": function, "cache_control": {}}])
    expected = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": False}}
    assert tool.spec == json.dumps(expected)


@pytest.mark.parametrize("value", ["é", "a\ud800b", "\U0001f600"])
def test_json_is_readable_where_it_can_be_and_always_the_same_value(value: str) -> None:
    assert json.loads(json_text({"x": value})) == {"x": value}
    json_text({"x": value}).encode()
