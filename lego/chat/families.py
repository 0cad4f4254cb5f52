"""What `renderers` must be told of each family of models, and which family a model folder is of."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lego.chat.answer import Grammar
from lego.chat.calls import fenced_call, harmony_call, key_value_call, kimi_call, xml_call
from lego.chat.messages import Message
from lego.chat.template import DATE, ChatTemplate, Raw
from lego.chat.vocabulary import read_json

_TAGS = ("<tool_call>", "</tool_call>")
_HERMES = Grammar(call=_TAGS)
_XML = Grammar(call=_TAGS, read_call=xml_call)
_GLM = Grammar(call=_TAGS, read_call=key_value_call, inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))
_DEEPSEEK = Grammar(
    call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    read_call=fenced_call,
    inner=("<｜tool▁sep｜>",),
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
_KIMI = Grammar(
    call=("<|tool_call_begin|>", "<|tool_call_end|>"),
    read_call=kimi_call,
    inner=("<|tool_call_argument_begin|>",),
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """How models of one name differ from others, in what `renderers` asks of its caller and in what it leaves out."""

    grammar: Grammar
    thinking: str | None = None
    """The library's field that switches thinking."""
    always_thinks: bool = False
    objects: bool = False
    """The library takes arguments apart: text that is no JSON object would be lost or raise."""
    one_system: bool = False
    """The template refuses a system message that is not the first."""
    native_ids: bool = False
    """Calls are named by ids of the form functions.NAME:NUMBER."""
    names_results: bool = False
    """A tool message says which function it comes from."""
    tells_tools: bool = True
    """False where the template leaves the tools out: we tell them in the system text."""
    one_call: bool = False
    """The template refuses messages with several calls."""
    closer: str | None = None
    """What closes a cut answer, if not the first stop token; "" if the next message does."""
    prefill: int = 0
    """Ids of the library's generation prompt that the model's own template leaves to the model."""
    options: Mapping[str, Any] = field(default_factory=dict)


_QWEN35 = Family(grammar=_XML, thinking="enable_thinking", objects=True, one_system=True)
# No closer: the next role's mark closes a turn, and the template knows no other.
_GLM5 = Family(grammar=_GLM, thinking="enable_thinking", objects=True, closer="")
FAMILIES = {
    "qwen3": Family(grammar=_HERMES, thinking="enable_thinking"),
    "qwen3.5": _QWEN35,
    "qwen3.6": _QWEN35,
    "qwen3.8": _QWEN35,
    "glm-4.5": _GLM5,
    "glm-5": _GLM5,
    "glm-5.1": _GLM5,
    "glm-5.3": replace(_GLM5, thinking=None, always_thinks=True),
    "deepseek-v3": Family(grammar=replace(_DEEPSEEK, think=("", "")), tells_tools=False),
    "deepseek-r1": Family(grammar=_DEEPSEEK, tells_tools=False, always_thinks=True),
    "gpt-oss": Family(
        grammar=Grammar(think=("", ""), read_call=harmony_call, harmony=True),
        always_thinks=True,
        names_results=True,
        closer="<|end|>",
        # The channel: a model may answer without an analysis.
        prefill=3,
        options={"conversation_start_date": f"{DATE:%Y-%m-%d}"},
    ),
    "kimi-k2": Family(grammar=_KIMI, native_ids=True, names_results=True),
    "kimi-k2.5": Family(grammar=_KIMI, thinking="thinking", native_ids=True, names_results=True),
    "llama-3": Family(grammar=Grammar(think=("", ""), bare=True, section=("<|python_tag|>",)), one_call=True),
    "default": Family(grammar=_HERMES, objects=True, closer=""),
}


def prepared(family: Family, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages as the family's template can take them."""
    if family.one_system:
        messages = one_system(messages, first=True)
    if family.native_ids:
        messages = _with_native_ids(messages)
    if family.one_call:
        messages = tuple(part for message in messages for part in _one_call_each(message))
    return messages


def one_system(messages: Sequence[Message], *, first: bool) -> tuple[Message, ...]:
    """System messages at the start as one; a later one is the user's, since the template refuses it."""
    leading = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages)) if first else 0
    head = [Message("system", "\n\n".join(m.text for m in messages[:leading]))] if leading else []
    return (*head, *(replace(m, role="user") if m.role == "system" else m for m in messages[leading:]))


def _with_native_ids(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with calls numbered through the conversation, as the model numbers them."""
    calls = [call for message in messages for call in message.calls]
    native = {call.id: f"functions.{call.name}:{n}" for n, call in enumerate(calls)}
    return tuple(
        replace(
            message,
            calls=tuple(replace(call, id=native[call.id]) for call in message.calls),
            call_id=native.get(message.call_id, message.call_id),
        )
        for message in messages
    )


def _one_call_each(message: Message) -> list[Message]:
    first, rest = replace(message, calls=message.calls[:1]), message.calls[1:]
    return [first, *(Message(message.role, calls=(call,)) for call in rest)]


def with_tools(raw: list[Raw], specs: list[Raw]) -> list[Raw]:
    """The messages with the tools told in the system text, in the form that DeepSeek's models call them."""
    listed = "\n".join(json.dumps(spec, ensure_ascii=False) for spec in specs)
    text = (
        f"# Tools\n\nYou can call these functions:\n{listed}\n\nTo call one, write its name and its arguments:\n"
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n"
        '```json\n{"ARGUMENT": "VALUE"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )
    leading = next((i for i, message in enumerate(raw) if message["role"] != "system"), len(raw))
    return [*raw[:leading], {"role": "system", "content": text}, *raw[leading:]]


def grammar_of(source: str) -> Grammar:
    known = [("<function=", _XML), ("<arg_key>", _GLM), ("<｜tool▁sep｜>", _DEEPSEEK), (_KIMI.inner[0], _KIMI)]
    return next((grammar for mark, grammar in known if mark in source), _HERMES)


def folder_stops(folder: Path) -> list[int]:
    """The end-of-sequence ids that generation_config.json or config.json names."""
    files = [folder / "generation_config.json", folder / "config.json"]
    configs = [read_json(file) for file in files if file.exists()]
    configs += [nested for config in configs if isinstance(nested := config.get("text_config"), dict)]
    named = [config.get("eos_token_id") for config in configs]
    found = next((ids for ids in named if ids is not None), [])
    return list(found) if isinstance(found, list) else [found]


def family_name(folder: Path, template: ChatTemplate | None) -> str:
    """The family by the config's model type; where types are shared, by the folder's own template."""
    config = read_json(folder / "config.json")
    nested = config.get("text_config")
    kinds = [config.get("model_type"), nested.get("model_type") if isinstance(nested, dict) else None]
    source = template.source if template is not None else ""
    return next((name for kind in kinds if (name := _of_type(str(kind), source)) is not None), "default")


def _of_type(kind: str, source: str) -> str | None:
    match kind.removesuffix("_text").removesuffix("_moe"):
        case "qwen3" | "qwen3_next":
            # Of the same type, but without a renderer: Qwen3-Coder, which calls tools in XML, and Qwen3-Thinking-2507,
            # whose prompt opens the think block.
            opens = "enable_thinking" not in source and "<think>" in source.rpartition("add_generation_prompt")[2]
            return "default" if "<function=" in source or opens else "qwen3"
        case "qwen3_5":
            known = {"reasoning_effort": "qwen3.8", "preserve_thinking": "qwen3.6"}
            return next((name for word, name in known.items() if word in source), "qwen3.5")
        case "glm4" | "glm4_moe_lite":
            return "glm-4.5" if "/nothink" in source or not source else "glm-5"
        case "glm_moe_dsa":
            known = {"Reasoning Effort": "glm-5.3", "defer_loading": "glm-5.1"}
            return next((name for word, name in known.items() if word in source), "glm-5")
        case "deepseek_v3":
            return _deepseek(source)
        case "kimi_k2":
            return "kimi-k2"
        case "kimi_k25":
            return "kimi-k2.5"
        case "gpt_oss":
            return "gpt-oss"
        case "llama":
            return "llama-3" if "Cutting Knowledge Date" in source else None
    return None


def _deepseek(source: str) -> str:
    if "<|im_middle|>" in source:
        return "kimi-k2"
    if "thinking" in source:
        return "default"
    return "deepseek-r1" if "<｜Assistant｜><think>" in source else "deepseek-v3"
