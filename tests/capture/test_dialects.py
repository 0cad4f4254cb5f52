"""What a request of each dialect says to the model, what an answer says to its harness, and what LiteLLM would lose."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lego.capture import dialects, wire
from lego.capture.dialects import converse, read
from lego.capture.wire import Dialect, Reply, Request
from lego.chat.messages import BadMessage, Message, ToolCall, json_text

CHAT, RESPONSES, MESSAGES = Dialect.CHAT, Dialect.RESPONSES, Dialect.MESSAGES
USER = {"role": "user", "content": "U"}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
SPEC = {"type": "function", "function": {"name": "bash", "description": "d", "parameters": SCHEMA}}


def asked(dialect: Dialect, **body: Any) -> Request:
    return asyncio.run(read(dialect, {"model": "m", **body}))


def history(dialect: Dialect, *messages: Mapping[str, Any], **fields: Any) -> tuple[Message, ...]:
    """What is read after a first user message."""
    body = {"input" if dialect is RESPONSES else "messages": [USER, *messages], **fields}
    return asked(dialect, **body).messages[1:]


def bare(message: Message) -> Message:
    """The message without the ids that it was handed out under."""
    return replace(message, items=())


def litellm_alone(dialect: Dialect, *messages: Mapping[str, Any], **fields: Any) -> list[Any]:
    """What LiteLLM makes of the same."""
    litellm, seen = dialects.load(), []

    async def main() -> None:
        dialects._translated.set(seen)
        if dialect is RESPONSES:
            await litellm.aresponses(model="lego/policy", input=[USER, *messages], store=False, **fields)
            return
        told = {"max_tokens": 1, "messages": [USER, *messages], **fields}
        await litellm.anthropic.messages.acreate(model="lego/policy", litellm_router=object(), **told)

    asyncio.run(main())
    return seen[0][1:]


def answer(dialect: Dialect, message: Message, **body: Any) -> dict[str, Any]:
    async def sample(_: Request) -> Reply:
        truncated = bool(body.pop("truncated", False))
        counts = {"prompt_tokens": 100, "output_tokens": 20, "cached_tokens": 60, "reasoning_tokens": 7}
        return Reply(id=REPLY, message=message, truncated=truncated, **counts)

    told = {"messages": [USER], "input": "U", "max_tokens": 9, **body}
    return asyncio.run(converse(dialect, told, sample))


REPLY = "0123456789ab00001"


def assistant(*blocks: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def use(i: int, name: str = "bash", **value: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"c{i}", "name": name, "input": value}


def result(i: int, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"c{i}", "content": content, **fields}


def thinking(value: str, signature: str = "sig") -> dict[str, Any]:
    return {"type": "thinking", "thinking": value, "signature": signature}


def reasoning(item_id: str, value: str) -> dict[str, Any]:
    return {
        "type": "reasoning",
        "id": item_id,
        "summary": [],
        "content": [{"type": "reasoning_text", "text": value}],
        "encrypted_content": None,
    }


def said(item_id: str, value: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": value, "annotations": []}]
    return {"type": "message", "id": item_id, "role": "assistant", "content": content}


def function_call(i: int, name: str = "bash", arguments: str = "{}", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{i}", "name": name, "arguments": arguments, **fields}


def output(i: int, value: Any = "out") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{i}", "output": value}


# All dialects.


def test_one_conversation_reads_the_same_in_all_dialects() -> None:
    arguments = '{"command": "ls é", "n": 1.0}'
    call = {"id": "c0", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    chat = asked(
        CHAT,
        messages=[
            {"role": "system", "content": "S"},
            USER,
            {"role": "assistant", "content": "I look.", "reasoning_content": "hm\n", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c0", "content": "file"},
            {"role": "user", "content": [text("a"), text("b")]},
        ],
        tools=[SPEC],
    )
    responses = asked(
        RESPONSES,
        instructions="S",
        input=[
            USER,
            reasoning("rs_1", "hm\n"),
            said("msg_1", "I look."),
            function_call(0, arguments=arguments),
            output(0, "file"),
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        ],
        tools=[{"type": "function", **SPEC["function"]}],
    )
    messages = asked(
        MESSAGES,
        system="S",
        messages=[
            USER,
            assistant(thinking("hm\n"), text("I look."), use(0, command="ls é", n=1.0)),
            user(result(0, "file"), text("a"), text("b")),
        ],
        tools=[{"name": "bash", "description": "d", "input_schema": SCHEMA}],
    )
    assert chat.tools == responses.tools == messages.tools
    assert chat.messages == tuple(map(bare, responses.messages)) == tuple(map(bare, messages.messages))
    assert chat.messages[2] == Message("assistant", "I look.", "hm\n", (ToolCall("c0", "bash", arguments),))


@pytest.mark.parametrize("dialect", Dialect)
def test_what_the_harness_asked_for_is_kept_whatever_it_is(dialect: Dialect) -> None:
    fields = {"tool_choice": {"type": "auto"}, "stop": ["x"], "max_tokens": 9, "temperature": 0.5, "thinking": {}}
    assert asked(dialect, messages=[USER], input="U", metadata={}, **fields).asked == fields


@pytest.mark.parametrize("dialect", Dialect)
def test_an_unknown_role_is_refused_by_its_place(dialect: Dialect) -> None:
    field = "input" if dialect is RESPONSES else "messages"
    with pytest.raises(BadMessage, match=rf"{field}\[2\]\.role: 'wizard' found, one of"):
        history(dialect, USER, {"role": "wizard", "content": "x"})


def test_litellm_drops_a_message_of_an_unknown_role() -> None:
    assert litellm_alone(MESSAGES, {"role": "wizard", "content": "x"}, USER) == [USER]


@pytest.mark.parametrize("dialect", Dialect)
def test_a_developer_and_a_system_in_the_middle_are_system_messages(dialect: Dialect) -> None:
    found = history(dialect, {"role": "developer", "content": "D"}, USER, {"role": "system", "content": [text("S")]})
    assert found == (Message("system", "D"), Message("user", "U"), Message("system", "S"))


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES])
def test_malformed_arguments_of_a_history_are_kept_as_they_are(dialect: Dialect) -> None:
    bad = '{"value": '
    call = {"id": "c0", "type": "function", "function": {"name": "bash", "arguments": bad}}
    told = (
        {"role": "assistant", "content": None, "tool_calls": [call]}
        if dialect is CHAT
        else function_call(0, "bash", bad)
    )
    assert history(dialect, told)[0].calls == (ToolCall("c0", "bash", bad),)


def test_a_messages_call_may_have_any_input() -> None:
    for value in ({"raw_arguments": "x"}, {}, None, [1], 5):
        (found,) = history(MESSAGES, assistant(use(0) | {"input": value}))
        assert json.loads(found.calls[0].arguments) == ({} if value is None else value)


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", '"x"', '{"x": NaN}', '{"x": 1e999}', "[" * 5000, "1" * 5000])
def test_what_is_no_object_of_json_reaches_a_messages_harness_raw(arguments: str) -> None:
    found = answer(MESSAGES, Message("assistant", calls=(ToolCall("c0", "bash", arguments),)))
    assert found["content"][0]["input"] == {"raw_arguments": arguments}
    json.dumps(found, allow_nan=False)


def test_tool_answers_are_told_in_the_order_of_their_calls() -> None:
    found = history(MESSAGES, assistant(use(0), use(1)), user(result(1, "1"), result(0, "0")))
    assert found[1:] == (Message("tool", "0", call_id="c0"), Message("tool", "1", call_id="c1"))
    found = history(RESPONSES, function_call(0), function_call(1), output(7, "?"), output(1, "1"), output(0, "0"))
    assert [message.text for message in found[1:]] == ["0", "1", "?"]


@pytest.mark.parametrize("dialect", Dialect)
def test_usage_tells_cached_and_reasoning_tokens(dialect: Dialect) -> None:
    usage = answer(dialect, Message("assistant", "t", "r"))["usage"]
    expected = {
        CHAT: {
            "prompt_tokens": 100,
            "completion_tokens": 20,
            "total_tokens": 120,
            "prompt_tokens_details": {"cached_tokens": 60},
            "completion_tokens_details": {"reasoning_tokens": 7},
        },
        RESPONSES: {
            "input_tokens": 100,
            "output_tokens": 20,
            "total_tokens": 120,
            "input_tokens_details": {"cached_tokens": 60},
            "output_tokens_details": {"reasoning_tokens": 7},
        },
        MESSAGES: {
            "input_tokens": 40,
            "cache_read_input_tokens": 60,
            "cache_creation_input_tokens": 0,
            "output_tokens": 20,
        },
    }
    assert usage == expected[dialect]


def test_a_cut_answer_says_so_beside_its_whole_calls() -> None:
    cut = Message("assistant", "t", calls=(ToolCall("c0", "bash", "{}"),))
    assert answer(CHAT, cut, truncated=True)["choices"][0]["finish_reason"] == "length"
    assert answer(MESSAGES, cut, truncated=True)["stop_reason"] == "max_tokens"
    found = answer(RESPONSES, cut, truncated=True)
    assert found["status"] == "incomplete" and found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["type"] for item in found["output"]] == ["message", "function_call"]


def test_what_vendors_own_models_know_is_left_out_of_the_tools() -> None:
    vendors = [{"type": kind} for kind in ("web_search", "local_shell", "tool_search", "image_generation", "mcp")]
    own = {"type": "function", **SPEC["function"]}
    (tool,) = asked(RESPONSES, input="U", tools=[*vendors, own, {"type": "namespace"}]).tools
    assert json.loads(tool.spec) == SPEC
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"name": "bash", "input_schema": SCHEMA}]
    assert [tool.name for tool in asked(MESSAGES, messages=[USER], tools=tools).tools] == ["bash"]


@pytest.mark.parametrize("name", ["description", "parameters", "name"])
@pytest.mark.parametrize("dialect", Dialect)
def test_a_tool_field_of_the_wrong_kind_is_named(dialect: Dialect, name: str) -> None:
    function = SPEC["function"] | {name: 5}
    if dialect is MESSAGES:
        name = name.replace("parameters", "input_schema")
        function["input_schema"] = function["parameters"]
    tool = {"type": "function", "function": function} if dialect is CHAT else function | {"type": None}
    tool |= {"type": "function"} if dialect is RESPONSES else {}
    with pytest.raises(BadMessage, match=rf"tools\[0\].*\.{name}: "):
        asked(dialect, messages=[USER], input="U", tools=[tool])


@pytest.mark.parametrize("dialect", Dialect)
def test_numbers_that_are_no_json_and_deep_bodies_are_refused(dialect: Dialect) -> None:
    deep: list[Any] = []
    for _ in range(wire.MAX_DEPTH):
        deep = [deep]
    for value in (float("nan"), float("inf"), deep):
        with pytest.raises(BadMessage, match="the body has"):
            asked(dialect, messages=[USER], input="U", metadata={"x": value})


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    [" ", "\n", "a\r\n", "<|im_end|>", "\u2028", "data:", "Error: x", "</think>", "{}", "[DONE]"]
)
values = st.dictionaries(texts, st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Messages as a harness may have them: calls are answered, and no two messages of one kind are neighbours."""
    messages: list[Message] = []
    for i in range(draw(st.integers(1, 4))):
        calls = tuple(ToolCall(f"c{i}{j}", f"f{j}", json_text(draw(values))) for j in range(draw(st.integers(0, 2))))
        messages.append(Message("user", draw(texts.filter(bool))))
        messages.append(Message("assistant", draw(texts.filter(str.strip)), draw(texts), calls))
        messages += [Message("tool", draw(texts), call_id=call.id) for call in calls]
        messages += [Message("system", draw(texts.filter(bool)))] if draw(st.booleans()) else []
    return messages


def told_in_responses(message: Message) -> list[dict[str, Any]]:
    calls = [function_call(0, call.name, call.arguments) | {"call_id": call.id} for call in message.calls]
    match message.role:
        case "assistant":
            return [reasoning("rs_1", message.reasoning), said("msg_1", message.text), *calls]
        case "tool":
            return [output(0, message.text) | {"call_id": message.call_id}]
        case role:
            return [{"role": role, "content": message.text}]


def told_in_messages(message: Message) -> dict[str, Any]:
    calls = [{"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)} for c in message.calls]
    match message.role:
        case "assistant":
            return assistant(thinking(message.reasoning), text(message.text), *calls)
        case "tool":
            return user(result(0, message.text) | {"tool_use_id": message.call_id})
        case role:
            return {"role": role, "content": message.text}


@settings(max_examples=100, deadline=None)
@given(told=conversations())
def test_what_was_told_is_what_is_read(told: list[Message]) -> None:
    items = [item for message in told for item in told_in_responses(message)]
    assert list(map(bare, history(RESPONSES, *items))) == told
    assert list(map(bare, history(MESSAGES, *map(told_in_messages, told)))) == told


# Messages.


def test_the_error_of_a_tool_reaches_the_prompt() -> None:
    told = (
        assistant(use(0), use(1), use(2)),
        user(result(0, "boom", is_error=True), result(1, "fine", is_error=False)),
    )
    assert [message.text for message in history(MESSAGES, *told)[1:]] == ["Error: boom", "fine"]
    assert [message["content"] for message in litellm_alone(MESSAGES, *told)[1:]] == ["boom", "fine"]


@pytest.mark.parametrize("own", ["Error: x", "error: x", "ERROR: x"])
def test_an_error_that_says_so_is_not_told_twice(own: str) -> None:
    assert history(MESSAGES, assistant(use(0)), user(result(0, [text(own)], is_error=True)))[1].text == own


def test_tool_results_may_be_blocks_or_nothing() -> None:
    told = (assistant(use(0), use(1), use(2)), user(result(0, [text("a"), text("b")]), result(1, None), result(2, [])))
    assert [message.text for message in history(MESSAGES, *told)[1:]] == ["ab", "", ""]


def test_text_beside_tool_results_stays_in_its_place() -> None:
    told = (
        assistant(use(0), use(1)),
        user(result(0, "zero"), text("mid"), result(1, "one"), text("af"), text("ter")),
    )
    found = [(message.role, message.text) for message in history(MESSAGES, *told)[1:]]
    assert found == [("tool", "zero"), ("user", "mid"), ("tool", "one"), ("user", "after")]
    assert [message["role"] for message in litellm_alone(MESSAGES, *told)[1:]] == ["tool", "tool", "user"]


@pytest.mark.parametrize(
    "blocks",
    [
        [thinking("hm\n"), text("t"), use(0)],
        [text("t"), thinking("hm\n"), use(0)],
        [thinking("h", "sig"), thinking("m\n", ""), text("t"), use(0)],
        [{"type": "redacted_thinking", "data": "x"}, thinking("hm\n"), text("t"), use(0)],
    ],
)
def test_thinking_is_read_wherever_it_stands_and_its_signature_is_a_join_key(blocks: list[Any]) -> None:
    (found,) = history(MESSAGES, assistant(*blocks))
    assert bare(found) == Message("assistant", "t", "hm\n", (ToolCall("c0", "bash", "{}"),)) and found.items == ("sig",)


def test_litellm_puts_a_line_between_two_thinking_blocks() -> None:
    assert litellm_alone(MESSAGES, assistant(thinking("a"), thinking("b")), USER)[0]["reasoning_content"] == "a\nb"


def test_a_signature_without_its_thinking_is_still_a_join_key() -> None:
    for blocks in ([thinking(""), text("t")], [thinking("")]):
        assert history(MESSAGES, assistant(*blocks), USER)[0].items == ("sig",)


def test_our_own_messages_answer_reads_back_as_itself_and_under_its_id() -> None:
    mine = Message("assistant", "I look.", "hm\n", (ToolCall("c0", "bash", '{"command": "ls"}'),))
    content = answer(MESSAGES, mine)["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use"] and content[0]["signature"] == REPLY
    (found,) = history(MESSAGES, assistant(*content))
    assert bare(found) == mine and found.items == (REPLY,)


def test_an_assistant_message_of_blank_text_keeps_its_place() -> None:
    told = (assistant(text(" \n")), USER, assistant(), USER)
    assert [message.role for message in history(MESSAGES, *told)] == ["assistant", "user"] * 2
    assert [message["role"] for message in litellm_alone(MESSAGES, *told)] == ["user", "user"]


def test_arguments_are_readable_text_and_long_names_whole() -> None:
    name = "n" * 100
    tools = [{"name": name, "input_schema": SCHEMA}]
    request = asked(MESSAGES, messages=[USER, assistant(use(0, name, command="é")), user(result(0, "z"))], tools=tools)
    assert request.messages[1].calls == (ToolCall("c0", name, '{"command": "é"}'),) and request.tools[0].name == name
    function = litellm_alone(MESSAGES, assistant(use(0, name, command="é")), USER)[0]["tool_calls"][0]["function"]
    assert function["name"] != name and function["arguments"] == '{"command": "\\u00e9"}'


def test_ids_of_calls_are_whole_on_both_sides() -> None:
    told = (assistant(use(0) | {"id": "f.a:0"}), user(result(0, "z") | {"tool_use_id": "f.a:0"}))
    found = history(MESSAGES, *told)
    assert (found[0].calls[0].id, found[1].call_id) == ("f.a:0", "f.a:0")
    assert litellm_alone(MESSAGES, *told)[1]["tool_call_id"] == "f_a_0"


def test_lone_surrogates_of_arguments_stay_what_they_are() -> None:
    (found,) = history(MESSAGES, assistant(use(0, command="a\ud800b")))
    assert json.loads(found.calls[0].arguments) == {"command": "a\ud800b"}


def test_documents_are_text_and_images_are_refused_by_their_place() -> None:
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    blocks = {"type": "document", "source": {"type": "content", "content": [text("E")]}}
    assert history(MESSAGES, user(plain, blocks)) == (Message("user", "DE"),)
    assert litellm_alone(MESSAGES, user(plain, blocks), USER) == [USER]
    with pytest.raises(BadMessage, match=r"messages\[2\]\.content\[0\]\.content\[1\]: part type 'image' found"):
        history(MESSAGES, assistant(use(0)), user(result(0, [text("a"), {"type": "image", "source": {}}])))


def test_a_tool_that_was_looked_up_is_named() -> None:
    found = history(MESSAGES, assistant(use(0)), user(result(0, [{"type": "tool_reference", "tool_name": "Edit"}])))
    assert found[1].text == "[tool Edit]"


@pytest.mark.parametrize("shape", ["string", "blocks"])
def test_the_billing_line_is_dropped_and_nothing_else(shape: str) -> None:
    line = "x-anthropic-billing-header: cc_version=1; cch={};"

    def read_with(cch: str) -> tuple[Message, ...]:
        first = line.format(cch)
        system = f"{first}\nS\n{first}" if shape == "string" else [text(first), text(f"S\n{first}")]
        return asked(MESSAGES, system=system, messages=[{"role": "user", "content": first}]).messages

    assert read_with("aaaaa")[0] == Message("system", f"S\n{line.format('aaaaa')}")
    assert read_with("aaaaa")[1] == Message("user", line.format("aaaaa"))


def test_a_request_of_claude_code_is_read() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    request = asked(
        MESSAGES,
        stream=True,
        max_tokens=32000,
        thinking={"type": "adaptive", "display": "summarized"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        metadata={"user_id": '{"session_id": "s"}'},
        some_new_beta=[1],
        system=[text("x-anthropic-billing-header: cch=1;"), text("S") | cached],
        messages=[user(text("U") | cached), {"role": "system", "content": "mid"}],
        tools=[
            {"name": "Bash", "description": "d", "input_schema": SCHEMA | {"$schema": "x"}, **cached},
            {"name": "Later", "description": "d", "input_schema": SCHEMA, "defer_loading": True},
        ],
    )
    assert request.messages == (Message("system", "S"), Message("user", "U"), Message("system", "mid"))
    assert [tool.name for tool in request.tools] == ["Bash", "Later"]
    assert json.loads(request.tools[0].spec)["function"].keys() == {"name", "description", "parameters"}


# Responses.


def test_our_own_items_read_back_as_one_message_under_all_their_ids() -> None:
    mine = Message("assistant", "I look.", " hm\n", (ToolCall("c0", "bash", "{}"), ToolCall("c1", "bash", '{"a": ')))
    items = answer(RESPONSES, mine)["output"]
    assert [item["id"] for item in items] == [f"rs_{REPLY}00", f"msg_{REPLY}01", f"fc_{REPLY}02", f"fc_{REPLY}03"]
    (found,) = history(RESPONSES, *items)
    assert bare(found) == mine and found.items == tuple(item["id"] for item in items)


def test_ids_outlive_texts_that_a_harness_drops() -> None:
    empty = {"type": "reasoning", "id": "rs_1", "summary": []}
    assert history(RESPONSES, empty, said("msg_1", ""), USER)[0].items == ("rs_1", "msg_1")
    assert history(RESPONSES, empty, USER)[0].items == ("rs_1",)
    assert litellm_alone(RESPONSES, empty, USER) == [USER]


def test_each_run_of_items_is_one_message_with_its_own_ids() -> None:
    told = (
        reasoning("rs_1", "a"),
        function_call(0, id="fc_1"),
        output(0),
        said("msg_2", "b"),
        USER,
        said("msg_3", "c"),
    )
    found = history(RESPONSES, *told)
    assert [message.items for message in found if message.role == "assistant"] == [
        ("rs_1", "fc_1"),
        ("msg_2",),
        ("msg_3",),
    ]


def test_reasoning_is_verbatim_and_a_summary_only_stands_in_for_it() -> None:
    both = reasoning("rs_1", " a\n") | {"summary": [{"type": "summary_text", "text": "s"}]}
    assert history(RESPONSES, both, USER)[0].reasoning == " a\n"
    assert litellm_alone(RESPONSES, both, USER)[0]["reasoning_content"] == "a"
    assert history(RESPONSES, both | {"content": None}, USER)[0].reasoning == "s"


def test_reasoning_comes_back_from_a_client_that_brings_only_its_sealed_form() -> None:
    mine, *_ = answer(RESPONSES, Message("assistant", "t", " hm:\n"))["output"]
    brought = {"type": "reasoning", "encrypted_content": mine["encrypted_content"], "summary": []}
    (found, _) = history(RESPONSES, brought, USER)
    assert found == Message("assistant", reasoning=" hm:\n", items=(mine["id"],))
    foreign = brought | {"encrypted_content": "gAAAAABm:x"}
    assert history(RESPONSES, foreign, USER)[0] == Message("assistant")


FREEFORM = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: patch"},
}


def test_a_freeform_tool_is_a_function_of_one_string() -> None:
    (tool,) = asked(RESPONSES, input="U", tools=[FREEFORM]).tools
    function = json.loads(tool.spec)["function"]
    assert function["parameters"]["properties"] == {"input": {"type": "string"}}
    assert function["description"].startswith("Edits files.") and "start: patch" in function["description"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"input": "*** Begin é\\n"}', "*** Begin é\n"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "a", "b": 1}', '{"input": "a", "b": 1}'),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ("*** Begin", "*** Begin"),
    ],
)
def test_a_freeform_call_goes_out_as_plain_input_and_comes_back_as_it_was_sampled(arguments: str, told: str) -> None:
    mine = Message("assistant", calls=(ToolCall("c0", "apply_patch", arguments),))
    (item,) = answer(RESPONSES, mine, tools=[FREEFORM])["output"]
    assert (item["type"], item["name"], item["call_id"], item["input"]) == (
        "custom_tool_call",
        "apply_patch",
        "c0",
        told,
    )
    found = history(RESPONSES, item, {"type": "custom_tool_call_output", "call_id": "c0", "output": [text("ok")]})
    assert found == (replace(mine, items=(item["id"],)), Message("tool", "ok", call_id="c0"))


def test_functions_of_a_namespace_are_offered_called_and_echoed_under_both_names() -> None:
    inner = [{"type": "function", "strict": False, **SPEC["function"]}, FREEFORM]
    tools = [{"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": inner}]
    offered = asked(RESPONSES, input="U", tools=tools).tools
    assert [tool.name for tool in offered] == ["multi_agent_v1__bash", "multi_agent_v1__apply_patch"]
    assert json.loads(offered[0].spec)["function"]["description"] == "Agents.\n\nd"
    calls = (ToolCall("c0", "multi_agent_v1__bash", "{}"), ToolCall("c1", "bash", "{}"))
    mine, other = answer(RESPONSES, Message("assistant", calls=calls), tools=tools)["output"]
    assert (mine["name"], mine["namespace"]) == ("bash", "multi_agent_v1") and "namespace" not in other
    (found,) = history(RESPONSES, mine, other | {"namespace": None})
    assert found.calls == calls


def test_items_of_vendors_own_tools_are_passed_over_and_unknown_ones_refused() -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    assert history(RESPONSES, search, said("msg_1", "a")) == (Message("assistant", "a", items=("msg_1",)),)
    for kind in ("item_reference", "compaction", "mcp_call", "poem", 5, ["message"]):
        with pytest.raises(BadMessage, match=r"input\[1\]\.type: .* found"):
            history(RESPONSES, {"type": kind, "id": "x"})


def test_stored_answers_are_refused() -> None:
    with pytest.raises(BadMessage, match="previous_response_id: answers are not stored here"):
        asked(RESPONSES, input="U", previous_response_id="resp_1")


def test_a_request_of_codex_is_read() -> None:
    request = asked(
        RESPONSES,
        stream=True,
        store=False,
        instructions="",
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "medium", "summary": "auto"},
        prompt_cache_key="k",
        client_metadata={"a": "b"},
        parallel_tool_calls=True,
        tool_choice="auto",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]},
        ],
        tools=[{"type": "function", "strict": False, **SPEC["function"]}, FREEFORM, {"type": "tool_search"}],
    )
    assert request.messages == (Message("system", "D"), Message("user", "U"))
    assert [tool.name for tool in request.tools] == ["bash", "apply_patch"]
    assert request.asked["reasoning"] == {"effort": "medium", "summary": "auto"}


def test_the_calls_of_an_answer_do_not_lie_in_the_cache_that_litellm_has_for_all_requests() -> None:
    from litellm.responses.litellm_completion_transformation.transformation import TOOL_CALLS_CACHE

    answer(RESPONSES, Message("assistant", calls=(ToolCall("c0", "bash", "{}"),)))
    assert TOOL_CALLS_CACHE.get_cache("c0") is None
