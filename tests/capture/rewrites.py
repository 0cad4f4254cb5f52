"""What harnesses do to their own history before they send it again, as functions on JSON request bodies.

Each takes a whole request body of any dialect and returns another; the name in its docstring is the
harness that was seen doing it. What a function has nothing to do with stays as it is.
"""

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from decimal import Decimal
from typing import Any

from lego.capture.wire import Dialect

Body = dict[str, Any]
Rewrite = Callable[[Body], Body]

_EDIT = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "replace_all": {"type": "boolean", "default": False}},
}
_BASH = {"type": "object", "properties": {"command": {"type": "string"}}}
SCHEMAS = {"bash": _BASH, "edit": _EDIT}
DEFAULTS = {"edit": {"replace_all": False}}


# The plain harness: sends what it was answered, byte for byte.


def opening(dialect: Dialect, system: str = "S", user: str = "U") -> Body:
    """The first request of a run."""
    tools = [{"name": name, "description": "d", "parameters": schema} for name, schema in SCHEMAS.items()]
    if dialect is Dialect.CHAT:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return {"messages": messages, "tools": [{"type": "function", "function": tool} for tool in tools]}
    if dialect is Dialect.RESPONSES:
        items = [_item("developer", system), _item("user", user)]
        return {"input": items, "tools": [{"type": "function", "strict": False} | tool for tool in tools]}
    blocks = [{"type": "text", "text": "x-anthropic-billing-header: cch=0;"}, {"type": "text", "text": system}]
    tools = [{"name": tool["name"], "description": "d", "input_schema": tool["parameters"]} for tool in tools]
    return {"system": blocks, "messages": [{"role": "user", "content": user}], "tools": tools, "max_tokens": 9}


def _item(role: str, text: str) -> Body:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def told(body: Body, answer: Body) -> Body:
    """The history with our answer at its end."""
    if "output" in answer:
        return _longer(body, *answer["output"])
    if "choices" in answer:
        return _longer(body, answer["choices"][0]["message"])
    return _longer(body, {"role": "assistant", "content": answer["content"]})


def with_results(body: Body, answer: Body, texts: list[str]) -> Body:
    """The history with a result for each call of the answer."""
    pairs = list(zip(call_ids(answer), texts, strict=True))
    if "output" in answer:
        return _longer(body, *({"type": "function_call_output", "call_id": i, "output": text} for i, text in pairs))
    if "choices" in answer:
        return _longer(body, *({"role": "tool", "tool_call_id": i, "content": text} for i, text in pairs))
    blocks = [{"type": "tool_result", "tool_use_id": i, "content": text} for i, text in pairs]
    return _longer(body, {"role": "user", "content": blocks})


def with_user(body: Body, text: str) -> Body:
    """The history with a user message at its end."""
    return _longer(body, _item("user", text) if "input" in body else {"role": "user", "content": text})


def call_ids(answer: Body) -> list[str]:
    """The ids of the answer's calls."""
    if "output" in answer:
        return [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
    if "choices" in answer:
        return [call["id"] for call in answer["choices"][0]["message"].get("tool_calls") or []]
    return [block["id"] for block in answer["content"] if block["type"] == "tool_use"]


def entries(body: Body) -> list[Body]:
    """The messages, or the items, of a request."""
    return body["input"] if "input" in body else body["messages"]


def _longer(body: Body, *more: Body) -> Body:
    return _with(body, entries(body) + list(more))


def _with(body: Body, changed: list[Body]) -> Body:
    return body | {"input" if "input" in body else "messages": deepcopy(changed)}


def _each(body: Body, change: Callable[[Body], Body | list[Body] | None]) -> Body:
    """Every entry changed; None leaves it out, a list stands for one that is split."""
    found = [change(entry) for entry in deepcopy(entries(body))]
    return _with(body, [e for f in found for e in (f if isinstance(f, list) else [f]) if e is not None])


def is_assistant(entry: Body) -> bool:
    """Whether a model is the author of this message or item."""
    return entry.get("role") == "assistant" or entry.get("type") in ("reasoning", "function_call")


def _blocks(entry: Body, kind: str) -> Iterator[Body]:
    content = entry.get("content")
    yield from (b for b in (content if isinstance(content, list) else ()) if b.get("type") == kind)


# Tool-call arguments.


def _calls(body: Body, change: Callable[[str, str], tuple[str, str]]) -> Body:
    """Every call with the name and arguments that `change` gives for its own."""

    def one(entry: Body) -> Body:
        for call in [c["function"] for c in entry.get("tool_calls") or []]:
            call["name"], call["arguments"] = change(call["name"], call["arguments"])
        if entry.get("type") == "function_call":
            entry["name"], entry["arguments"] = change(entry["name"], entry["arguments"])
        for block in _blocks(entry, "tool_use"):
            block["name"], text = change(block["name"], json.dumps(block["input"]))
            block["input"] = json.loads(text)
        return entry

    return _each(body, one)


def _spelled(body: Body, spell: Callable[[Any], str]) -> Body:
    def change(name: str, arguments: str) -> tuple[str, str]:
        try:
            return name, spell(strict_json(arguments or "{}"))
        except ValueError:
            return name, arguments

    return _calls(body, change)


def strict_json(text: str) -> Any:
    """The value of a JSON text as a parser other than Python's reads it; ValueError for NaN and Infinity."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def js_arguments(body: Body) -> Body:
    """opencode, pi, qwen, cline; claude as objects: JSON.stringify(JSON.parse(x))."""
    return _spelled(body, js_text)


def js_text(value: Any) -> str:
    """JSON.stringify: no spaces, doubles, integer keys first, lone surrogates escaped."""
    if isinstance(value, dict):
        keys = sorted((k for k in value if _is_index(k)), key=int) + [k for k in value if not _is_index(k)]
        return "{" + ",".join(f"{js_text(k)}:{js_text(value[k])}" for k in keys) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(js_text, value)) + "]"
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in text)
    return json.dumps(value) if isinstance(value, bool | None) else _js_number(value)


def _is_index(key: str) -> bool:
    return key.isascii() and key.isdigit() and str(int(key)) == key and int(key) < 2**32 - 1


def _js_number(value: int | float) -> str:
    try:
        number = float(value)
    except OverflowError:
        return "null"
    if number in (float("inf"), float("-inf")):
        return "null"
    sign, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    if number == 0 or not isinstance(exponent, int):
        return "0"
    text, point = "".join(map(str, digits)), len(digits) + exponent
    if 0 < point <= 21:
        text = (text + "0" * exponent) if exponent >= 0 else f"{text[:point]}.{text[point:]}"
    elif -6 < point <= 0:
        text = "0." + "0" * -point + text
    else:
        text = f"{text[0]}{'.' * (len(text) > 1)}{text[1:]}e{point - 1:+d}"
    return "-" * sign + text


def python_arguments(body: Body) -> Body:
    """openhands: json.dumps, and verbatim what it cannot print."""
    return _spelled(body, lambda value: json.dumps(value, allow_nan=False))


def sorted_arguments(body: Body) -> Body:
    """Serialisers of other languages: keys in order, wide spacing."""
    return _spelled(body, lambda value: json.dumps(value, allow_nan=False, sort_keys=True, indent=2) + "\n")


def escaped_arguments(body: Body) -> Body:
    """Serialisers that are careful with HTML: escapes where none are needed."""

    def spell(value: Any) -> str:
        text = json.dumps(value, allow_nan=False).replace("/", "\\/")
        return text.replace("<", "\\u003c").replace(">", "\\u003E")

    return _spelled(body, spell)


def defaults_added(body: Body) -> Body:
    """claude: the schema's defaults, first, in calls that lack them."""

    def change(name: str, arguments: str) -> tuple[str, str]:
        values = _object(arguments)
        missing = {k: v for k, v in DEFAULTS.get(name, {}).items() if values is not None and k not in values}
        return name, js_text(missing | values) if missing and values is not None else arguments

    return _calls(body, change)


def _object(arguments: str) -> Body | None:
    try:
        found = strict_json(arguments or "{}")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


# Calls that could not run.


def _unrunnable(body: Body, change: Callable[[str, str], tuple[str, str]]) -> Body:
    """Calls with malformed arguments changed; over Messages we hand those out in a field of ours."""

    def one(name: str, arguments: str) -> tuple[str, str]:
        values = _object(arguments)
        raw = arguments if values is None else values.get("raw_arguments")
        return change(name, raw) if isinstance(raw, str) and _object(raw) is None else (name, arguments)

    return _calls(body, one)


def invalid_renamed(body: Body) -> Body:
    """opencode: another tool's name and an error for arguments; for unknown tools too."""

    def change(name: str, arguments: str) -> tuple[str, str]:
        return "invalid", js_text({"tool": name, "error": f"Invalid input for tool {name}: JSON parsing failed"})

    known = _unrunnable(body, change)
    return _calls(known, lambda name, text: (name, text) if name in (*SCHEMAS, "invalid") else change(name, text))


def invalid_marked(body: Body) -> Body:
    """openhands: its own note in the place of arguments."""
    note = json.dumps({"_openhands_malformed_tool_call": True, "error": "bad"})
    return _unrunnable(body, lambda name, _: (name, note))


def invalid_wrapped(body: Body) -> Body:
    """claude: the raw text in a field of its own; nothing for nothing."""

    def wrap(arguments: str) -> str:
        return json.dumps({"__unparsedToolInput": {"raw": arguments, "len": len(arguments)}})

    return _unrunnable(body, lambda name, text: (name, wrap(text) if text else "{}"))


def invalid_repaired(body: Body) -> Body:
    """pi, cline, qwen: the object that the arguments begin, else an empty one."""
    return _unrunnable(body, lambda name, text: (name, js_text(_repaired(text))))


def _repaired(arguments: str) -> Body:
    for stop in range(len(arguments), 0, -1):
        for closer in ("", "}", '"}'):
            found = _object(arguments[:stop].rstrip(" ,") + closer)
            if found is not None:
                return found
    return {}


# Text and content shapes.


def _texts(body: Body, change: Callable[[Body], Body]) -> Body:
    """Chat messages with calls, changed."""
    return _each(body, lambda entry: change(entry) if entry.get("tool_calls") else entry)


def none_as_empty(body: Body) -> Body:
    """opencode: null beside calls becomes an empty string."""
    return _texts(body, lambda m: m | {"content": m.get("content") or ""})


def empty_as_none(body: Body) -> Body:
    """pi, qwen, cline: an empty string beside calls becomes null."""
    return _texts(body, lambda m: m | {"content": m.get("content") or None})


def none_missing(body: Body) -> Body:
    """mini: a null content is no key at all."""
    return _texts(body, lambda m: {k: v for k, v in m.items() if k != "content" or v is not None})


def blank_missing(body: Body) -> Body:
    """openhands: a content of null, nothing or white space is no key at all."""
    return _texts(
        body,
        lambda m: {k: v for k, v in m.items() if k != "content" or (v if isinstance(v, list) else (v or "").strip())},
    )


def blank_dropped(body: Body) -> Body:
    """claude, pi, openhands: texts of white space are left out, the rest of the answer stays."""

    def change(entry: Body) -> Body | None:
        content = entry.get("content")
        if not is_assistant(entry) or ("type" in entry and entry["type"] != "message"):
            return entry
        if isinstance(content, list):
            return entry | {"content": [b for b in content if b.get("text", "x").strip()]}
        return entry | {"content": (content or "").strip() and content}

    return _each(body, change)


def as_parts(body: Body) -> Body:
    """openhands: every string becomes a list of one text part; so do results over Messages."""

    def change(entry: Body) -> Body:
        for block in [entry, *_blocks(entry, "tool_result")]:
            if isinstance(block.get("content"), str):
                block["content"] = [{"type": _part(body, entry), "text": block["content"]}]
        return entry

    return _each(body, change)


def _part(body: Body, entry: Body) -> str:
    if "input" not in body:
        return "text"
    return "output_text" if is_assistant(entry) else "input_text"


def as_strings(body: Body) -> Body:
    """claude where the cache mark is gone, Responses clients in their short form: text parts as one string."""

    def change(entry: Body) -> Body:
        content = entry.get("content")
        if entry.get("role") and isinstance(content, list) and all("text" in b for b in content):
            entry["content"] = "".join(b["text"] for b in content)
        return entry

    return _each(body, change)


def cache_mark_moved(body: Body) -> Body:
    """claude: the last user message is a list whose last block has the mark; earlier ones are strings again."""
    last = max(i for i, entry in enumerate(entries(body)) if entry.get("role") == "user")
    moved = as_strings(body)
    entry = entries(as_parts(_with(moved, [entries(moved)[last]])))[0]
    entry["content"][-1]["cache_control"] = {"type": "ephemeral"}
    entries(moved)[last] = entry
    return moved


def billing_changed(body: Body) -> Body:
    """claude: another hash in the first line of the system text."""
    line = {"type": "text", "text": f"x-anthropic-billing-header: cch={len(entries(body))};"}
    return body | {"system": [line, *body["system"][1:]]}


def messages_split(body: Body) -> Body:
    """The parts of one answer as neighbouring messages: Responses items are so, and claude's own log."""

    def change(entry: Body) -> Body | list[Body]:
        if entry.get("role") != "assistant" or "type" in entry:
            return entry
        if isinstance(entry.get("content"), list) and not entry.get("tool_calls"):
            return [entry | {"content": [block]} for block in entry["content"]] or entry
        if entry.get("tool_calls") and entry.get("content"):
            text = {k: v for k, v in entry.items() if k != "tool_calls"}
            return [text, {"role": "assistant", "content": None, "tool_calls": entry["tool_calls"]}]
        return entry

    return _each(body, change)


# Reasoning.


def _reasoning(body: Body, change: Callable[[str], Body]) -> Body:
    """Chat messages with reasoning, its field replaced by what `change` gives."""

    def one(entry: Body) -> Body:
        text = entry.pop("reasoning_content", None)
        return entry if text is None else entry | change(text)

    return _each(body, one)


def reasoning_renamed(body: Body) -> Body:
    """pi keeps the shorter name where it was given it."""
    return _reasoning(body, lambda text: {"reasoning": text})


def reasoning_twice(body: Body) -> Body:
    """mini: LiteLLM's own record of the field beside it."""
    return _reasoning(
        body, lambda text: {"reasoning_content": text, "provider_specific_fields": {"reasoning_content": text}}
    )


def reasoning_as_blocks(body: Body) -> Body:
    """LiteLLM clients of thinking models: a list of thinking blocks."""
    return _reasoning(body, lambda text: {"thinking_blocks": [{"type": "thinking", "thinking": text}]})


def reasoning_trimmed(body: Body) -> Body:
    """qwen."""
    return _reasoning(body, lambda text: {"reasoning_content": text.strip()})


def reasoning_dropped(body: Body) -> Body:
    """openhands, terminus; over Responses and Messages, clients that keep no items and blocks they cannot read."""

    def change(entry: Body) -> Body | None:
        entry.pop("reasoning_content", None)
        if isinstance(entry.get("content"), list):
            entry["content"] = [b for b in entry["content"] if b.get("type") != "thinking"]
        return None if entry.get("type") == "reasoning" else entry

    return _each(body, change)


# Responses items.


def _without(body: Body, *names: str) -> Body:
    def change(entry: Body) -> Body:
        entry = {k: v for k, v in entry.items() if k not in names}
        parts = entry.get("content")
        if isinstance(parts, list):
            entry["content"] = [{k: v for k, v in part.items() if k not in names} for part in parts]
        return entry

    return _each(body, change)


def item_ids_dropped(body: Body) -> Body:
    """Clients that store nothing; codex after a compaction."""
    return _without(body, "id")


def item_state_dropped(body: Body) -> Body:
    """codex, pi: no status, annotations and logprobs."""
    return _without(body, "status", "annotations", "logprobs", "encrypted_content")


def item_fields_added(body: Body) -> Body:
    """codex: fields of its own on calls and messages."""
    more = {"function_call": {"namespace": None}, "message": {"phase": None}}
    return _each(body, lambda entry: entry | more.get(entry.get("type", ""), {}))


def item_types_dropped(body: Body) -> Body:
    """The AI SDK (opencode): messages by their role alone."""
    return _each(body, lambda e: {k: v for k, v in e.items() if k != "type" or v != "message"})


# What breaks a chain, or may.


def _last_answer(body: Body) -> tuple[int, int]:
    """Where the last answer of the model begins and ends; (0, 0) without one."""
    own = [i for i, entry in enumerate(entries(body)) if is_assistant(entry)]
    if not own:
        return 0, 0
    start = own[-1]
    while is_assistant(entries(body)[start - 1]):
        start -= 1
    return start, own[-1] + 1


def turn_deleted(body: Body) -> Body:
    """mini: an answer it cannot use is gone, with a note of its own in its place."""
    return with_user(_with(body, entries(body)[: _last_answer(body)[0] or None]), "Tool call error: bad")


def turn_deleted_note_joined(body: Body) -> Body:
    """claude: an empty answer is gone and a note is one more block of the user message before it."""
    kept, text = entries(body)[: _last_answer(body)[0] or None], "[Your previous response had no visible output.]"
    if kept[-1].get("role") != "user":
        return with_user(_with(body, kept), text)
    before = entries(as_parts(_with(body, kept[-1:])))[0]
    note = {"type": _part(body, before), "text": text}
    return _with(body, [*kept[:-1], before | {"content": [*before["content"], note]}])


def partial_glued(body: Body, partial: str = "cut in the mid") -> Body:
    """cline, qwen: the text of a cut stream in front of the answer that was got by trying again."""
    start, stop = _last_answer(body)

    def change(entry: Body) -> Body:
        content = entry.get("content")
        if isinstance(content, str):
            return entry | {"content": partial + content}
        texts = [b for b in content or [] if b.get("type") in ("text", "output_text")]
        for block in texts[:1]:
            block["text"] = partial + block["text"]
        if entry.get("role") == "assistant" and not texts:
            entry["content"] = [*(content or []), {"type": "text", "text": partial}] if "type" not in entry else content
        return entry

    changed = deepcopy(entries(body))
    changed[start:stop] = [change(e) if e.get("role") == "assistant" else e for e in changed[start:stop]]
    return _with(body, changed)


def results_reversed(body: Body) -> Body:
    """claude: results in the order of completion."""

    def change(entry: Body) -> Body:
        if isinstance(entry.get("content"), list) and any(_blocks(entry, "tool_result")):
            entry["content"] = entry["content"][::-1]
        return entry

    return _each(body, change)


def results_cleared(body: Body) -> Body:
    """opencode's pruning, claude's micro-compaction: old results are a notice."""
    cleared = "[Old tool result content cleared]"

    def change(entry: Body) -> Body:
        for block in _blocks(entry, "tool_result"):
            block["content"] = cleared
        if entry.get("role") == "tool":
            entry["content"] = cleared
        return entry | ({"output": cleared} if entry.get("type") == "function_call_output" else {})

    return _each(body, change)


def answers_trimmed(body: Body) -> Body:
    """Harnesses that edit what the model said: its texts end early."""

    def change(entry: Body) -> Body:
        if not is_assistant(entry):
            return entry
        if isinstance(entry.get("content"), str):
            entry["content"] = entry["content"][:-1]
        for block in [*_blocks(entry, "text"), *_blocks(entry, "output_text")]:
            block["text"] = block["text"][:-1]
        return entry

    return _each(body, change)


def arguments_edited(body: Body) -> Body:
    """Harnesses that change what the model called."""

    def change(name: str, arguments: str) -> tuple[str, str]:
        values = _object(arguments)
        return name, arguments if values is None else js_text(values | {next(iter(values), "command"): "rm"})

    return _calls(body, change)


def calls_renamed(body: Body) -> Body:
    """Harnesses that call a tool by another name."""
    return _calls(body, lambda name, arguments: ("edit" if name == "bash" else "bash", arguments))


def ids_reminted(body: Body) -> Body:
    """gemini: call ids of its own."""
    return json.loads(re.sub(r'"call_(?!id")', '"own_', json.dumps(body)))


def compacted_to_summary(body: Body) -> Body:
    """codex: system and user messages stay, nothing of the model; then a summary as a user's text."""
    kept = _each(body, lambda e: e if e.get("role") in ("system", "developer", "user") and _plain(e) else None)
    return with_user(kept, "Another language model started to solve this problem: summary")


def compacted_to_last_turn(body: Body) -> Body:
    """claude, openhands: a summary in the place of the task, then the last answer and its results verbatim."""
    summary = with_user(_with(body, _head(body)), "This session is being continued: summary")
    start = _last_answer(body)[0]
    return _longer(summary, *(entries(body)[start:] if start else []))


def compacted_to_answer(body: Body) -> Body:
    """opencode: the summary as an answer, the task gone."""
    asked = with_user(_with(body, _head(body)), "What did we do so far?")
    return with_user(_longer(asked, {"role": "assistant", "content": "summary"}), "Continue if you have next steps")


def compacted_with_own_words(body: Body) -> Body:
    """qwen: a summary, then the last calls under a text that no model wrote."""
    start, stop = _last_answer(body)
    words = "Got it. Thanks for the additional context!"
    asked = with_user(_with(body, _head(body)), "<state_snapshot> Resume the prior task")
    if not start:
        return asked

    def change(entry: Body) -> Body:
        return entry | {"content": words} if isinstance(entry.get("content"), str | None) else entry

    return _longer(asked, *map(change, entries(body)[start:stop]), *entries(body)[stop:])


def _head(body: Body) -> list[Body]:
    return [entry for entry in entries(body) if entry.get("role") in ("system", "developer")]


def _plain(entry: Body) -> bool:
    return not any(_blocks(entry, "tool_result"))


def without_tools(body: Body) -> Body:
    """opencode's title, codex's and openhands' summary: no tools."""
    return {k: v for k, v in body.items() if k != "tools"}


_ALL = (js_arguments, python_arguments, sorted_arguments, escaped_arguments, defaults_added)
_ALL += (invalid_renamed, invalid_marked, invalid_wrapped, invalid_repaired, blank_dropped, as_parts, as_strings)
_CHAT = (none_as_empty, empty_as_none, none_missing, blank_missing, messages_split)
_CHAT += (reasoning_renamed, reasoning_twice, reasoning_as_blocks, reasoning_trimmed)
_RESPONSES = (item_ids_dropped, item_state_dropped, item_fields_added, item_types_dropped)
_MESSAGES = (messages_split, cache_mark_moved, billing_changed, results_reversed)
KEEPING: dict[Dialect, tuple[Rewrite, ...]] = {
    Dialect.CHAT: _ALL + _CHAT,
    Dialect.RESPONSES: _ALL + _RESPONSES,
    Dialect.MESSAGES: _ALL + _MESSAGES,
}
"""Rewrites after which a history is still the one that was sampled, by dialect; in any order and number."""

BREAKING: tuple[Rewrite, ...] = (turn_deleted, turn_deleted_note_joined, partial_glued)
BREAKING += (results_cleared, answers_trimmed, arguments_edited, ids_reminted, reasoning_dropped)
BREAKING += (compacted_to_summary, compacted_to_last_turn, compacted_to_answer, compacted_with_own_words)
BREAKING += (without_tools,)
"""Rewrites after which it may be another one; for any dialect."""
