"""Messages and tools to token ids and back: the one file that touches the `renderers` library."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from tokenizers import Tokenizer

from lego.chat.messages import Message, Tool
from lego.errors import UsageError
from lego.records import Ids

MODEL_TYPES = ("qwen3", "qwen3_moe")

# A private code point hides control-token text of a message from the search for control tokens; a
# message that holds the code point itself gets it doubled up in the same way.
_MARK = "\U0010fffd"
_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A sampled tool call; `valid` says whether the verbatim `arguments` are a JSON object."""

    name: str
    arguments: str
    valid: bool


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer read back from its ids; `truncated` when no stop token ended it."""

    content: str
    reasoning: str
    calls: tuple[ParsedCall, ...]
    truncated: bool


@dataclass(frozen=True, kw_only=True)
class Renderer:
    """Renders for one model. `thinking` False starts each answer with an empty think block."""

    folder: Path
    thinking: bool = True
    """True leaves the generation prompt plain: the model decides, or has no thinking at all."""
    _vocabulary: "_Vocabulary" = field(repr=False)
    _inner: Qwen3Renderer = field(repr=False)

    @classmethod
    def load(cls, folder: Path, *, thinking: bool = True) -> "Renderer":
        """Reads tokenizer.json and config.json of a local model folder. Raises UsageError."""
        _check_model_type(folder)
        vocabulary = _Vocabulary(folder)
        # "all": sampled turns are never rendered again, so thinking is never cut out of them.
        config = Qwen3RendererConfig(enable_thinking=thinking, thinking_retention="all")
        _check_control_tokens(folder, vocabulary)
        inner = Qwen3Renderer(vocabulary, config)
        return cls(folder=folder, thinking=thinking, _vocabulary=vocabulary, _inner=inner)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        return tuple(self._inner.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
        """The whole conversation with the generation prompt; read-only, since trials of a task share it."""
        return self._whole(tuple(messages), tuple(tools))

    @cached_property
    def _whole(self) -> Callable[[tuple[Message, ...], tuple[Tool, ...]], Ids]:
        return lru_cache(maxsize=64)(self._render)

    def _render(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> Ids:
        ids = self._inner.render_ids(self._raw(messages), tools=self._specs(tools), add_generation_prompt=True)
        whole = np.asarray(ids, np.int32)
        whole.flags.writeable = False
        return whole

    def extend(self, prompt_ids: Ids, output_ids: Ids, new: Sequence[Message], tools: Sequence[Tool]) -> Ids | None:
        """The exact previous ids, the closer if the answer lacks one, and the new messages; None if it cannot."""
        previous = np.concatenate([prompt_ids, output_ids]).astype(np.int32)
        bridged = self._inner.bridge_to_next_turn(
            prompt_ids.tolist(), output_ids.tolist(), self._raw(new), tools=self._specs(tools)
        )
        if bridged is None:
            return None
        ids = np.asarray(bridged.token_ids, np.int32)
        return ids if np.array_equal(ids[: len(previous)], previous) else None

    def parse(self, output_ids: Ids, prompt_ids: Ids | None = None) -> Parsed:
        """Reads an answer; the prompt says whether it starts inside a think block."""
        ids = output_ids.tolist()
        prompt = prompt_ids.tolist() if prompt_ids is not None else None
        found = self._inner.parse_response(ids, prompt_ids=prompt)
        truncated = not ids or ids[-1] not in self.stop_ids
        calls = tuple(call for call in map(_call, found.tool_calls) if call is not None)
        return Parsed(self._content(ids, found), found.reasoning_content or "", calls, truncated)

    def decode(self, ids: Ids) -> str:
        """The text of the ids, control tokens included."""
        return self._vocabulary.decode(ids.tolist())

    def _content(self, ids: list[int], found: ParsedResponse) -> str:
        """Text before the calls, what lies between them, and blocks that cannot be delivered as calls."""
        pieces, at = [found.content], None
        for block in found.tool_calls:
            if block.token_span is not None:
                if at is not None:
                    pieces.append(self._vocabulary.decode(ids[at : block.token_span[0]]).strip())
                at = block.token_span[1]
            if _call(block) is None:
                closer = "" if block.status is ToolCallParseStatus.UNCLOSED_BLOCK else "\n</tool_call>"
                pieces.append(f"<tool_call>\n{block.raw}{closer}")
        if at is not None:
            tail = [i for i in ids[at:] if i not in self.stop_ids]
            pieces.append(self._vocabulary.decode(tail).strip())
        return "\n".join(piece for piece in pieces if piece)

    def _raw(self, messages: Sequence[Message]) -> Any:
        return [self._raw_message(message) for message in messages]

    def _raw_message(self, message: Message) -> dict[str, Any]:
        hide = self._vocabulary.hide
        raw: dict[str, Any] = {"role": message.role, "content": hide(message.text)}
        if message.reasoning:
            raw["reasoning_content"] = hide(message.reasoning)
        if message.calls:
            raw["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": hide(c.name), "arguments": hide(c.arguments)}}
                for c in message.calls
            ]
        return raw

    def _specs(self, tools: Sequence[Tool]) -> Any:
        return [json.loads(self._vocabulary.hide(tool.spec)) for tool in tools] or None


class _Vocabulary:
    """The tokenizer as `renderers` wants it: control tokens only where the template wrote them."""

    name_or_path: str
    unk_token_id: int | None = None
    eos_token_id: int | None = None

    def __init__(self, folder: Path) -> None:
        text = _read(folder / "tokenizer.json")
        self.name_or_path = str(folder)
        try:
            bare = json.loads(text) | {"added_tokens": [], "post_processor": None}
        except (ValueError, TypeError) as error:
            raise UsageError(f"{folder / 'tokenizer.json'} is not a tokenizer: {error}") from error
        self._full = Tokenizer.from_str(text)
        self._plain = Tokenizer.from_str(json.dumps(bare))
        self._control = {token.content: i for i, token in self._full.get_added_tokens_decoder().items()}
        names = sorted(self._control, key=len, reverse=True)
        self._search = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def hide(self, text: str) -> str:
        """Marks control-token text so that `encode` takes it for plain text."""
        text = text.replace(_MARK, _MARK + "0")
        return self._search.sub(lambda m: m[0][0] + _MARK + "1" + m[0][1:], text)

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        ids: list[int] = []
        at = 0
        for match in self._search.finditer(text):
            ids += self._encode_plain(text[at : match.start()])
            ids.append(self._control[match[0]])
            at = match.end()
        return ids + self._encode_plain(text[at:])

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        shown = text.replace(_MARK + "1", "").replace(_MARK + "0", _MARK) if _MARK in text else text
        return self._plain.encode(shown, add_special_tokens=False).ids

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        return self._full.decode(list(token_ids), skip_special_tokens=False)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._full.token_to_id(tokens)


def _call(block: ParsedToolCall) -> ParsedCall | None:
    """The block as a call that a harness can answer; None for half a call or one without a name."""
    if block.status is ToolCallParseStatus.OK and isinstance(block.name, str):
        return _whole_call(block, block.name)
    name = _NAME.search(block.raw)
    start = _ARGUMENTS.search(block.raw)
    if block.status is not ToolCallParseStatus.INVALID_JSON or not name or not start:
        return None
    return ParsedCall(name[1], block.raw[start.end() :].removesuffix("}").strip(), False)


def _whole_call(block: ParsedToolCall, name: str) -> ParsedCall:
    if isinstance(block.arguments, str):
        return ParsedCall(name, block.arguments, _is_object(block.arguments))
    text = _verbatim(block.raw, block.arguments)
    return ParsedCall(name, text, isinstance(block.arguments, dict))


def _verbatim(raw: str, value: Any) -> str:
    """The source text of the arguments as sampled, not as some serialiser would print them again."""
    for match in reversed(list(_ARGUMENTS.finditer(raw))):
        try:
            found, end = json.JSONDecoder().raw_decode(raw, match.end())
        except ValueError:
            continue
        if found == value:
            return raw[match.end() : end]
    return json.dumps(value, ensure_ascii=False)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"model folder {path.parent}: cannot read {path.name} ({error.strerror})") from error


def _check_model_type(folder: Path) -> None:
    found = json.loads(_read(folder / "config.json")).get("model_type")
    if found not in MODEL_TYPES:
        raise UsageError(f"{folder}/config.json: model_type {found!r}, one of {', '.join(MODEL_TYPES)} is wanted")


def _check_control_tokens(folder: Path, vocabulary: _Vocabulary) -> None:
    wanted = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
    wanted += ("<tool_response>", "</tool_response>", "<think>", "</think>")
    missing = [token for token in wanted if vocabulary.convert_tokens_to_ids(token) is None]
    if missing:
        raise UsageError(f"{folder}/tokenizer.json: control tokens missing: {', '.join(missing)}")
