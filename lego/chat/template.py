"""A model's own chat template, rendered to text from the files of its folder."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lego.chat.messages import Message, Tool
from lego.chat.vocabulary import Vocabulary, read_json
from lego.errors import UsageError
from lego.records import Ids

DATE = datetime(2024, 7, 26)
"""Today, for templates that ask: the same every day, so that a recorded session renders the same again."""

Raw = dict[str, Any]
REFUSALS = (TemplateError, TypeError, ArithmeticError, LookupError, MemoryError, RecursionError)
"""What a template raises for a conversation that it refuses."""


class ChatTemplate:
    """A compiled template; `variables` are the special tokens of the folder."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": DATE.strftime}
        self.source = source
        self._template = environment.from_string(source)
        self._variables = variables

    @classmethod
    def find(cls, folder: Path) -> "ChatTemplate | None":
        """The template of the folder, None if it has none. Raises UsageError for a file that cannot be read."""
        file = folder / "tokenizer_config.json"
        config = read_json(file) if file.exists() else {}
        try:
            source = _source(folder, config)
            return cls(source, _special_tokens(config)) if source is not None else None
        except (OSError, UnicodeError, *REFUSALS) as error:
            raise UsageError(f"{folder}: its chat template cannot be used: {error!r}") from error

    def text(self, messages: Sequence[Raw], tools: Sequence[Raw] | None, *, prompt: bool, **variables: Any) -> str:
        """The conversation as text. Raises one of REFUSALS."""
        given = {"messages": list(messages), "tools": tools, "documents": None, "add_generation_prompt": prompt}
        return self._template.render(**self._variables, **given, **variables)


_END = "\ue000"
"""The text of a probe: what a template writes after it depends on the messages that follow alone."""


class TemplateVocabulary(Vocabulary):
    """A vocabulary with the folder's chat template, as the library's default renderer wants it."""

    def __init__(
        self,
        folder: Path,
        template: ChatTemplate,
        *,
        marks: Sequence[str],
        stop: int | None,
        variables: Mapping[str, Any],
    ) -> None:
        super().__init__(folder, marks, stop)
        self._template = template
        self._variables = variables

    def apply_chat_template(self, messages: list[Raw], **options: Any) -> list[int]:
        return self.encode(self._text(messages, options.get("tools"), prompt=options["add_generation_prompt"]))

    def following(self, last: int | None, new: list[Raw], tools: list[Raw] | None) -> list[int] | None:
        """What the template writes after an answer of a probe when `new` follows; None where it does not append."""
        try:
            told, again = (self._after_answer(exchanges, last, new, tools) for exchanges in (1, 2))
        except REFUSALS:
            return None
        # What depends on the place in the conversation cannot be told from a probe.
        return told if told == again else None

    def _after_answer(
        self, exchanges: int, last: int | None, new: list[Raw], tools: list[Raw] | None
    ) -> list[int] | None:
        calls = [_answered(result) for result in new if result["role"] == "tool"]
        answer: Raw = {"role": "assistant", "content": _END} | ({"tool_calls": calls} if calls else {})
        question: Raw = {"role": "user", "content": "x"}
        probe = [*[question, {"role": "assistant", "content": "x"}] * (exchanges - 1), question, answer]
        before = self.encode(self._text(probe, tools, prompt=False).partition(_END)[2])
        after = self.encode(self._text([*probe, *new], tools, prompt=True).partition(_END)[2])
        if after[: len(before)] != before or self.eos_token_id not in before:
            return None
        closer = len(before) - 1 - before[::-1].index(self.eos_token_id)
        return after[closer if last is None else closer + 1 :] if last in (None, self.eos_token_id) else None

    def _text(self, messages: list[Raw], tools: list[Raw] | None, *, prompt: bool) -> str:
        try:
            return self._template.text(messages, tools, prompt=prompt, **self._variables)
        except TypeError:
            # Some templates, such as DeepSeek V3.1's, want arguments as JSON text.
            return self._template.text(arguments_as_text(messages), tools, prompt=prompt, **self._variables)


def _answered(result: Raw) -> Raw:
    """A call that has this result."""
    function = {"name": result.get("name", "f"), "arguments": {"x": _END}}
    return {"id": result["tool_call_id"], "type": "function", "function": function}


def raw_messages(
    messages: Sequence[Message],
    *,
    names: Mapping[str, str],
    hide: Callable[[Any], Any] = lambda value: value,
    objects: bool = False,
) -> list[Raw]:
    """Messages in the chat-completions shape; `names` are the names of calls by id.

    With `objects` arguments are JSON objects: text that is none becomes the field "arguments", so that it is not lost.
    """
    return [_raw(message, names, hide, objects) for message in messages]


def arguments_as_text(messages: Sequence[Raw]) -> list[Raw]:
    """The messages with the arguments of calls as JSON text."""

    def told(call: Raw) -> Raw:
        function = call["function"]
        return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [m | {"tool_calls": [told(call) for call in m["tool_calls"]]} if "tool_calls" in m else m for m in messages]


def call_names(messages: Sequence[Message]) -> dict[str, str]:
    return {call.id: call.name for message in messages for call in message.calls}


def raw_tools(tools: Sequence[Tool], hide: Callable[[Any], Any] = lambda value: value) -> list[Raw] | None:
    return [hide(json.loads(tool.spec)) for tool in tools] or None


def first_difference(used: str, told: str, around: int = 60) -> str | None:
    """Where two texts part, with what surrounds that place in each; None if they are equal."""
    if used == told:
        return None
    at = next((i for i, (a, b) in enumerate(zip(used, told, strict=False)) if a != b), min(len(used), len(told)))
    start = max(0, at - around)
    return f"at character {at}: used {used[start : at + around]!r}, template {told[start : at + around]!r}"


class Rendered(Protocol):
    """What a comparison needs of a renderer."""

    @property
    def thinking(self) -> bool: ...
    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    def decode(self, ids: Ids) -> str: ...


def difference(
    renderer: Rendered, folder: Path, messages: Sequence[Message], tools: Sequence[Tool], ids: Ids
) -> str | None:
    """Where a conversation's ids, decoded, part from what the model's own template makes of it; None if nowhere.

    The end is not compared: the template may close an answer that is not. A folder without a template, and a template
    that refuses the conversation, are told as such.
    """
    template = ChatTemplate.find(folder)
    if template is None:
        return f"{folder} has no chat template"
    try:
        told = _own_text(template, messages, tools, enable_thinking=renderer.thinking, thinking=renderer.thinking)
    except REFUSALS as error:
        return f"the template refuses the conversation: {error}"
    stops = [renderer.decode(np.asarray([i], np.int32)) for i in renderer.stop_ids]
    return first_difference(_open_ended(renderer.decode(ids), stops), _open_ended(told, stops))


def _own_text(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool], **variables: Any) -> str:
    prompt = messages[-1].role != "assistant"
    render = partial(template.text, tools=raw_tools(tools), prompt=prompt, **variables)
    # Templates that ask take arguments as they are, and so print them as sampled.
    first = re.search(r"arguments['\"\]]* is string", template.source) is None
    try:
        return render(raw_messages(messages, names=call_names(messages), objects=first))
    except REFUSALS:
        return render(raw_messages(messages, names=call_names(messages), objects=not first))


def _open_ended(text: str, stops: Sequence[str]) -> str:
    text = text.rstrip()
    return next((text.removesuffix(stop).rstrip() for stop in stops if text.endswith(stop)), text)


def _raw(message: Message, names: Mapping[str, str], hide: Callable[[Any], Any], objects: bool) -> Raw:
    raw: Raw = {"role": message.role, "content": hide(message.text)}
    if message.reasoning:
        raw["reasoning_content"] = hide(message.reasoning)
    if message.role == "tool":
        raw |= {"tool_call_id": hide(message.call_id)}
        raw |= {"name": hide(names[message.call_id])} if message.call_id in names else {}
    if message.calls:
        raw["tool_calls"] = [
            {
                "id": hide(call.id),
                "type": "function",
                # A JSON text is taken apart before its strings are hidden: an escape may spell a control token.
                "function": {"name": hide(call.name), "arguments": hide(_arguments(call.arguments, objects))},
            }
            for call in message.calls
        ]
    return raw


def _arguments(text: str, objects: bool) -> Any:
    if not objects:
        return text
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": text}


def _source(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {item["name"]: item["template"] for item in found}
        found = named.get("tool_use", named.get("default"))
    return found if isinstance(found, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
    return {k: v for k, v in found.items() if isinstance(v, str)}


def _raise(text: str) -> None:
    raise TemplateError(text)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **kwargs: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **kwargs)


class _Generation(Extension):
    """`{% generation %}` marks what a model writes; the text is the same without."""

    tags = {"generation"}  # noqa: RUF012  (as the base class declares it)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
