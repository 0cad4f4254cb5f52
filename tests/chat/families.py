"""One tiny model folder for each family, and how its model spells an answer."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lego.chat.render import Renderer
from lego.records import Ids
from tests.tiny import SPECIALS, byte_tokenizer, write_chat_model

Call = tuple[str, Mapping[str, Any]]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
GLM = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", *SPECIALS]
GLM += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
TOOL_WORDS = ("tool▁calls", "tool▁call", "tool▁outputs", "tool▁output")
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"]
DEEPSEEK += [f"<｜{word}▁{end}｜>" for word in TOOL_WORDS for end in ("begin", "end")]
KIMI = ["<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "<|endoftext|>"]
KIMI += ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"]
KIMI += ["<|tool_call_argument_begin|>", "<|tool_call_end|>"]
KIMI += ["<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"]
HARMONY = {"<|return|>": 200002, "<|constrain|>": 200003, "<|channel|>": 200005, "<|start|>": 200006}
HARMONY |= {"<|end|>": 200007, "<|message|>": 200008, "<|call|>": 200012}
LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ '\n<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str
    model_type: str
    specials: Sequence[str]
    stop: str
    """What the model ends an answer with."""
    calls: Callable[[Sequence[Call]], str]
    think: tuple[str, str] | None = None
    """What the model writes before and after its thinking; None for a model that does not think."""
    template: str | None = None
    text: Callable[[str], str] = str
    loose: str = ""
    """Added for a second folder of one family."""

    def __str__(self) -> str:
        return self.name + self.loose

    def write(self, folder: Path) -> Path:
        ids = HARMONY if self.name == "gpt-oss" else None
        tokenizer = byte_tokenizer(self.specials, ids)
        return write_chat_model(folder, self.model_type, tokenizer, eos=self.stop, template=self.template)

    def answer(self, text: str = "", reasoning: str = "", calls: Sequence[Call] = ()) -> str:
        """An answer without its end; only thinking models are given reasoning."""
        start, end = self.think or ("", "")
        thought = start + reasoning + end if self.think else ""
        return thought + (self.text(text) if text else "") + (self.calls(calls) if calls else "")


def sampled(renderer: Renderer, text: str) -> Ids:
    """Ids whose control-token text is control tokens, as a model samples them."""
    return np.asarray(renderer._vocabulary.encode(text), np.int32)


def _json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _hermes(calls: Sequence[Call]) -> str:
    return "".join(
        f'\n<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _xml(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        values = "".join(f"<parameter={k}>\n{plain(v)}\n</parameter>\n" for k, v in arguments.items())
        return f"\n<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"

    return "".join(one(*call) for call in calls)


def _glm(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        values = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n" for k, v in arguments.items())
        return f"\n<tool_call>{name}\n{values}</tool_call>"

    return "".join(one(*call) for call in calls)


def _deepseek(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _kimi(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for n, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _harmony(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(a)}<|call|>"
        for name, a in calls
    )


def _llama(calls: Sequence[Call]) -> str:
    (name, arguments), *_ = calls
    return f'{{"name": "{name}", "parameters": {_json(arguments)}}}'


FAMILIES = (
    Family(
        name="qwen3",
        model_type="qwen3",
        specials=SPECIALS,
        stop="<|im_end|>",
        calls=_hermes,
        think=("<think>\n", "\n</think>\n\n"),
    ),
    Family(
        name="qwen3.5",
        model_type="qwen3_5_moe",
        specials=[*SPECIALS, *VISION],
        stop="<|im_end|>",
        calls=_xml,
        think=("", "\n</think>\n\n"),
    ),
    Family(
        name="qwen3.6",
        model_type="qwen3_5",
        specials=[*SPECIALS, *VISION],
        stop="<|im_end|>",
        calls=_xml,
        think=("", "\n</think>\n\n"),
        template="{{ enable_thinking }}{{ preserve_thinking }}",
    ),
    Family(
        name="glm-4.5",
        model_type="glm4_moe",
        specials=GLM,
        stop="<|user|>",
        calls=_glm,
        think=("\n<think>", "</think>\n"),
    ),
    Family(
        name="glm-5", model_type="glm_moe_dsa", specials=GLM, stop="<|observation|>", calls=_glm, think=("", "</think>")
    ),
    Family(
        name="deepseek-v3",
        model_type="deepseek_v3",
        specials=DEEPSEEK,
        stop="<｜end▁of▁sentence｜>",
        calls=_deepseek,
    ),
    Family(
        name="deepseek-r1",
        model_type="deepseek_v3",
        specials=[*DEEPSEEK, "<think>", "</think>"],
        stop="<｜end▁of▁sentence｜>",
        calls=_deepseek,
        think=("", "\n</think>\n\n"),
        template="{{ '<｜Assistant｜><think>\\n' }}",
    ),
    Family(
        name="deepseek-r1",
        loose=" with think tags as plain text",
        model_type="deepseek_v3",
        specials=DEEPSEEK,
        stop="<｜end▁of▁sentence｜>",
        calls=_deepseek,
        think=("", "\n</think>\n\n"),
        template="{{ '<｜Assistant｜><think>\\n' }}",
    ),
    Family(
        name="kimi-k2",
        loose=" with think tags as plain text",
        model_type="kimi_k2",
        specials=KIMI,
        stop="<|im_end|>",
        calls=_kimi,
        think=("<think>", "</think>"),
    ),
    Family(
        name="kimi-k2.5",
        model_type="kimi_k25",
        specials=[*KIMI, "<think>", "</think>"],
        stop="<|im_end|>",
        calls=_kimi,
        think=("", "</think>"),
    ),
    Family(
        name="gpt-oss",
        model_type="gpt_oss",
        specials=[],
        stop="<|return|>",
        calls=_harmony,
        think=("<|channel|>analysis<|message|>", "<|end|>"),
        text="<|start|>assistant<|channel|>final<|message|>{}<|end|>".format,
    ),
    Family(
        name="llama-3",
        model_type="llama",
        specials=LLAMA,
        stop="<|eot_id|>",
        calls=_llama,
        template="{{ 'Cutting Knowledge Date: ' }}",
    ),
    Family(
        name="default",
        model_type="other",
        specials=SPECIALS,
        stop="<|im_end|>",
        calls=_hermes,
        think=("<think>", "</think>"),
        template=CHATML,
    ),
)
ONE_CALL = ("llama-3", "gpt-oss")
"""Families whose model writes one call in an answer."""
