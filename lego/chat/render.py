"""Messages and tools to token ids and back: the one file that touches the `renderers` library."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from renderers.base import Renderer as LibraryRenderer
from renderers.base import create_renderer
from renderers.configs import config_from_name

from lego.chat.answer import Answers, Parsed, Partial
from lego.chat.calls import ParsedCall
from lego.chat.families import (
    FAMILIES,
    Family,
    family_name,
    folder_stops,
    grammar_of,
    one_system,
    prepared,
    with_tools,
)
from lego.chat.messages import BadMessage, Message, Tool, ToolCall
from lego.chat.template import (
    REFUSALS,
    ChatTemplate,
    Raw,
    TemplateVocabulary,
    call_names,
    first_difference,
    raw_messages,
    raw_tools,
)
from lego.chat.vocabulary import HarmonyVocabulary, Vocabulary, read_json
from lego.errors import UsageError
from lego.records import Ids

# What the library, harmony and templates raise for messages and tools that they cannot tell.
MOST_CACHED = 200_000
"""Characters of a conversation whose ids are kept for the other trials of its task."""
_REFUSALS = (*REFUSALS, ValueError, KeyError, AttributeError, RuntimeError)


@dataclass(frozen=True, kw_only=True)
class Renderer:
    """Renders for one model. `thinking` False starts each answer with an empty think block."""

    folder: Path
    name: str
    """The family, as `renderers` names it; `default` is the folder's own chat template."""
    thinking: bool = True
    """True leaves the generation prompt as it is: the model decides, or has no thinking at all."""
    stop_ids: tuple[int, ...]
    """Ids that end an answer: the library's, and all that the folder itself names."""
    _family: Family = field(repr=False)
    _vocabulary: Vocabulary | HarmonyVocabulary = field(repr=False)
    _inner: LibraryRenderer = field(repr=False)

    @classmethod
    def load(cls, folder: Path, *, thinking: bool = True, name: str | None = None) -> "Renderer":
        """Reads tokenizer.json and config.json of a local model folder; `name` overrides what they say of the family.

        Raises UsageError.
        """
        template = ChatTemplate.find(folder)
        name = name or family_name(folder, template)
        if name not in FAMILIES:
            raise UsageError(f"renderer {name!r}, one of {', '.join(FAMILIES)} is wanted")
        family = FAMILIES[name]
        if family.always_thinks and not thinking:
            raise UsageError(f"renderer {name}: thinking cannot be switched off in this family")
        if family.thinking == "enable_thinking" and template is not None and family.thinking not in template.source:
            # A model of the family that does not think, or cannot but think, has no switch in its template.
            family = replace(family, thinking=None)
        if name == "default":
            family, vocabulary = _own_family(folder, template, thinking)
        else:
            vocabulary = HarmonyVocabulary(folder) if name == "gpt-oss" else Vocabulary(folder, family.grammar.think)
        inner = _library_renderer(folder, name, family, vocabulary, thinking)
        stops = tuple(dict.fromkeys([*inner.get_stop_token_ids(), *folder_stops(folder)]))
        renderer = cls(
            folder=folder,
            name=name,
            thinking=thinking,
            stop_ids=stops,
            _family=family,
            _vocabulary=vocabulary,
            _inner=inner,
        )
        renderer._check_prompt()
        return renderer

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
        """The whole conversation with the generation prompt; read-only, since trials of a task share it.

        Raises BadMessage for a conversation that the model's template refuses.
        """
        if sum(len(message.text) for message in messages) > MOST_CACHED:
            return self._render(tuple(messages), tuple(tools))
        return self._whole(tuple(messages), tuple(tools))

    def extend(
        self,
        prompt_ids: Ids,
        output_ids: Ids,
        new: Sequence[Message],
        tools: Sequence[Tool],
        calls: Sequence[ToolCall] = (),
    ) -> Ids | None:
        """The exact previous ids and their `continuation`; None if there is none."""
        more = self.continuation(prompt_ids, output_ids, new, tools, calls)
        return None if more is None else np.concatenate([prompt_ids, output_ids, more]).astype(np.int32)

    def continuation(
        self,
        prompt_ids: Ids,
        output_ids: Ids,
        new: Sequence[Message],
        tools: Sequence[Tool],
        calls: Sequence[ToolCall] = (),
    ) -> Ids | None:
        """What comes after an answer: a closer if it lacks one, the new messages, the generation prompt.

        None where the model's template cannot tell them apart from what was before. `calls` are those of the answer
        under the ids that `new` answers; without them results are taken in order.
        """
        if not new or any(message.role == "assistant" for message in new):
            return None
        raw = self._raw_results(prompt_ids, output_ids, new, calls)
        last = int(output_ids[-1]) if len(output_ids) and output_ids[-1] in self._ends else None
        following = self._following(last, raw, tools) if raw is not None else None
        if following is None:
            return None
        closers = self._closers(prompt_ids, output_ids) if last is None else []
        return np.asarray([*closers, *following], np.int32)

    def parse(self, output_ids: Ids, prompt_ids: Ids | None = None, tools: Sequence[Tool] = ()) -> Parsed:
        """Reads an answer; the prompt says whether it starts inside a think block, the tools which types they want."""
        return self._answers.parse(output_ids, prompt_ids, tools)

    def partial(self, output_ids: Ids, prompt_ids: Ids | None = None) -> Partial:
        """What can be told for certain of an unfinished answer: a beginning of what `parse` says of the whole."""
        return self._answers.partial(output_ids, prompt_ids)

    def decode(self, ids: Ids) -> str:
        """The text of the ids, control tokens included."""
        return self._vocabulary.decode(ids.tolist())

    def append_only(self) -> str | None:
        """None if a longer conversation begins with the shorter one's ids; else the first place where it does not.

        Tells of templates that cut earlier thinking, for which `extend` keeps what a whole render would lose.
        """
        ends = [*(i for i, message in enumerate(_PROBE) if message.role == "assistant"), len(_PROBE)]
        try:
            texts = [self.decode(self.render(_PROBE[:end], _PROBE_TOOLS)) for end in ends]
        except BadMessage as error:
            return str(error)
        for shorter, longer, end in zip(texts, texts[1:], ends[1:], strict=False):
            difference = first_difference(shorter, longer[: len(shorter)])
            if difference is not None:
                return f"{_PROBE[end - 1].role} message {end} changes what was before it: {difference}"
        return None

    # Whole conversations

    @cached_property
    def _whole(self) -> Callable[[tuple[Message, ...], tuple[Tool, ...]], Ids]:
        return lru_cache(maxsize=64)(self._render)

    def _render(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> Ids:
        messages = prepared(self._family, messages)
        try:
            raw, specs = self._raw(messages, call_names(messages)), self._specs(tools)
            raw = raw if self._family.tells_tools or not specs else with_tools(raw, specs)
            ids = self._inner.render_ids(raw, tools=specs, add_generation_prompt=True)  # pyright: ignore
        except _REFUSALS as error:
            raise BadMessage(f"messages: the model's template refuses them: {error}") from error
        lead = list(self._vocabulary.lead)
        whole = np.asarray([*([] if ids[: len(lead)] == lead else lead), *self._prompt(ids)], np.int32)
        whole.flags.writeable = False
        return whole

    def _raw(self, messages: Sequence[Message], names: Mapping[str, str]) -> list[Raw]:
        return raw_messages(messages, names=names, hide=self._vocabulary.hide, objects=self._family.objects)

    def _specs(self, tools: Sequence[Tool]) -> Any:
        return raw_tools(tools, self._vocabulary.hide)

    def _prompt(self, ids: list[int]) -> list[int]:
        return ids[: len(ids) - self._family.prefill]

    # What follows an answer

    @cached_property
    def _ends(self) -> frozenset[int]:
        """Ids after which an answer needs no closer."""
        return frozenset(self.stop_ids).union(self._vocabulary.encode(self._family.closer or ""))

    def _closers(self, prompt_ids: Ids, output_ids: Ids) -> list[int]:
        thinks = self._answers.thinks(output_ids, prompt_ids)
        closer = self._family.closer
        stop = [self.stop_ids[0]] if closer is None else self._vocabulary.encode(closer)
        return [*(self._think_end if thinks else []), *stop]

    @property
    def _think_end(self) -> list[int]:
        return self._vocabulary.encode(self._family.grammar.think[1])

    def _following(self, last: int | None, raw: list[Raw], tools: Sequence[Tool]) -> list[int] | None:
        """The ids of new messages after a closed answer, with the generation prompt; `last` None after a cut one."""
        if isinstance(self._vocabulary, TemplateVocabulary):
            return self._vocabulary.following(last, raw, self._specs(tools))
        # The library looks for nothing in the previous ids that we do not know: with a stand-in for them it gives
        # the same, at no cost.
        own = self._inner.get_stop_token_ids()
        before = [*self._think_end, last if last in own else own[0]]
        bridged = self._inner.bridge_to_next_turn(self._generation_prompt[:1], before, raw)  # pyright: ignore
        return None if bridged is None else self._prompt(bridged.token_ids[1 + len(before) :])

    def _raw_results(
        self, prompt_ids: Ids, output_ids: Ids, new: Sequence[Message], calls: Sequence[ToolCall]
    ) -> list[Raw] | None:
        """The new messages; None if it is in doubt which call a result belongs to, where the template says so."""
        new = one_system(new, first=False) if self._family.one_system else new
        results = [message for message in new if message.role == "tool"]
        if not results or not self._family.names_results:
            return self._raw(new, {call.id: call.name for call in calls})
        sampled = self.parse(output_ids, prompt_ids).calls
        told = _told_calls(sampled, [call.id for call in calls], [message.call_id for message in results])
        if any(message.call_id not in told for message in results):
            return None
        names = {name: call.name for name, call in told.items()}
        if self._family.native_ids:
            names |= {call.native_id: call.name for call in sampled}
            new = [replace(m, call_id=told[m.call_id].native_id) if m.role == "tool" else m for m in new]
        return self._raw(new, names)

    # Answers

    def _check_prompt(self) -> None:
        try:
            _ = self._generation_prompt
        except _REFUSALS as error:
            raise UsageError(f"{self.folder}: its chat template refuses a plain question: {error}") from error

    @cached_property
    def _generation_prompt(self) -> list[int]:
        """What a prompt ends in, as ids."""
        raw: Any = [{"role": "user", "content": "x"}]
        whole = self._inner.render_ids(raw, add_generation_prompt=True)
        return self._prompt(whole[len(self._inner.render_ids(raw)) :])

    @cached_property
    def _answers(self) -> Answers:
        prompt = self._generation_prompt
        control = prompt and self._vocabulary.control(self._vocabulary.decode(prompt[:1])) is not None
        start, tail = (prompt[0], 64) if control else (None, len(prompt))
        return Answers(self._vocabulary, self._family.grammar, self.stop_ids, start, tail)


_PROBE_TOOLS = (Tool("f", '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'),)
_PROBE = (
    Message("system", "S"),
    Message("user", "U1"),
    Message("assistant", "A1", "R1", calls=(ToolCall("functions.f:0", "f", '{"a": "1"}'),)),
    Message("tool", "T1", call_id="functions.f:0"),
    Message("assistant", "A2", "R2", calls=(ToolCall("functions.f:1", "f", '{"a": "2"}'),)),
    Message("tool", "T2", call_id="functions.f:1"),
    Message("assistant", "A3", "R3"),
    Message("user", "U2"),
)


def _told_calls(sampled: Sequence[ParsedCall], calls: Sequence[str], results: Sequence[str]) -> dict[str, ParsedCall]:
    """Sampled calls by the ids under which they were handed out; of one call, by its result's."""
    if len(calls) == len(sampled):
        return dict(zip(calls, sampled, strict=True))
    return dict.fromkeys(results, sampled[0]) if len(sampled) == len(results) == 1 else {}


def _library_renderer(
    folder: Path, name: str, family: Family, vocabulary: Vocabulary | HarmonyVocabulary, thinking: bool
) -> LibraryRenderer:
    marks = [mark for mark in (*family.grammar.call, *family.grammar.inner) if mark]
    missing = [mark for mark in marks if name != "default" and vocabulary.control(mark) is None]
    if missing:
        raise UsageError(f"{folder}/tokenizer.json: control tokens missing for {name}: {', '.join(missing)}")
    options: dict[str, Any] = {**family.options, **({family.thinking: thinking} if family.thinking else {})}
    # "all": sampled turns are never rendered again, so thinking is never cut out of them.
    options |= {"thinking_retention": "all"} if name != "default" else {}
    config: Any = type(config_from_name(name))(**options)
    try:
        return create_renderer(vocabulary, config)
    except AssertionError as error:
        raise UsageError(f"{folder}/tokenizer.json does not fit {name}: {error}") from error


def _own_family(folder: Path, template: ChatTemplate | None, thinking: bool) -> tuple[Family, TemplateVocabulary]:
    """What can be told of a model from its template alone."""
    if template is None:
        kind = read_json(folder / "config.json").get("model_type")
        raise UsageError(f"{folder}: no renderer for model_type {kind!r} and no chat template: one of both is wanted")
    family = replace(FAMILIES["default"], grammar=grammar_of(template.source))
    variables = {"enable_thinking": thinking, "thinking": thinking}
    stop = next(iter(folder_stops(folder)), None)
    marks = family.grammar.think
    return family, TemplateVocabulary(folder, template, marks=marks, stop=stop, variables=variables)
