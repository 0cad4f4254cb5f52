"""An answer read back from its ids: reasoning, text and tool calls, the same for every beginning of it.

The parsers of `renderers` are not used: they strip parameters, find closers in decoded text, guess GLM's
start state, drop prose after a call, and say other things of a beginning than of the whole.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, Protocol

import numpy as np

from lego.chat.calls import Lexeme, ParsedCall, Reader, json_call, recipient, schemas_of, text_of
from lego.chat.messages import Tool
from lego.records import Ids


class Decodes(Protocol):
    """What an answer needs of a vocabulary."""

    def control(self, token: str) -> int | None: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def settled(self, ids: Ids) -> int: ...


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer read back from its ids; `truncated` when no stop token ended it."""

    content: str
    reasoning: str
    calls: tuple[ParsedCall, ...]
    truncated: bool
    reasoning_tokens: int
    """Sampled tokens inside the think block, its own marks not counted."""


@dataclass(frozen=True, slots=True)
class Partial:
    """What is certain of an unfinished answer: each text is a beginning of the whole answer's."""

    reasoning: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """How a family writes an answer. Each name is a control token, or plain text where the vocabulary has none."""

    think: tuple[str, str] = ("<think>", "</think>")
    call: tuple[str, str] = ("", "")
    read_call: Reader = json_call
    inner: tuple[str, ...] = ()
    """Marks inside a call."""
    section: tuple[str, ...] = ()
    """Marks around all calls."""
    harmony: bool = False
    """Messages with a header each, instead of marks."""
    bare: bool = False
    """A call is a whole answer that is JSON."""


class Part(NamedTuple):
    """One stretch of an answer: `reasoning`, `text`, `call` (closed or not), or the `break` before calls."""

    kind: str
    lexemes: Sequence[Lexeme]
    closed: bool = True


class Answers:
    """Reads answers of one model. `stops` end an answer; `start` begins the generation prompt, which lies within the
    `tail` last ids of a prompt.
    """

    def __init__(
        self, vocabulary: Decodes, grammar: Grammar, stops: Sequence[int], start: int | None, tail: int
    ) -> None:
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._stops = np.asarray(stops, np.int64)
        self._start = start
        self._tail_len = tail
        self._marks = _HARMONY if grammar.harmony else _marks(grammar)
        tokens = {mark: vocabulary.control(mark) for mark in self._marks}
        self._names = {i: mark for mark, i in tokens.items() if i is not None}
        self._mark_ids = np.asarray(list(self._names), np.int64)
        self._texts = sorted((mark for mark, i in tokens.items() if i is None), key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, self._texts)) + ")") if self._texts else None

    def parse(self, output: Ids, prompt: Ids | None, tools: Sequence[Tool]) -> Parsed:
        """The whole answer. What cannot be delivered as a call, such as half of one, is text."""
        parts = self._parts(output, prompt)
        schemas = schemas_of(tuple(tools))
        calls, texts = [], []
        for part in parts:
            call = self._grammar.read_call(part.lexemes, schemas) if part.kind == "call" and part.closed else None
            if call is not None:
                calls.append(call)
            elif part.kind in ("text", "call"):
                texts.append(self._shown(part))
        truncated = not len(output) or output[-1] not in self._stops
        tokens = sum(lexeme.tokens for part in parts if part.kind == "reasoning" for lexeme in part.lexemes)
        return Parsed(_joined(texts), _reasoning(parts), tuple(calls), bool(truncated), tokens)

    def partial(self, output: Ids, prompt: Ids | None) -> Partial:
        """What is certain so far; nothing after the first sign of a call."""
        parts = self._parts(output[: self._vocabulary.settled(output)], prompt, unfinished=True)
        thoughts = list(takewhile(lambda part: part.kind == "reasoning", parts))
        texts = takewhile(lambda part: part.kind == "text", parts[len(thoughts) :])
        content = _joined([self._shown(part) for part in texts])
        if self._grammar.bare and content.startswith("{"):
            content = ""
        return Partial(_certain(_reasoning(thoughts)), _certain(content))

    def thinks(self, output: Ids, prompt: Ids | None) -> bool:
        """Whether an answer so far is still inside its think block."""
        return any(part.kind == "reasoning" and not part.closed for part in self._parts(output, prompt))

    def _parts(self, output: Ids, prompt: Ids | None, *, unfinished: bool = False) -> list[Part]:
        tail = self._tail(prompt)
        if self._grammar.harmony:
            return _harmony_parts(self._lex(np.concatenate([tail, output])))
        stops = np.flatnonzero(np.isin(output, self._stops))
        lexemes = self._lex(output[: stops[0]] if len(stops) else output)
        if unfinished:
            lexemes[-1] = lexemes[-1]._replace(text=self._without_half_a_mark(lexemes[-1].text))
        return _tagged_parts(self._grammar, lexemes, self._opened(tail))

    def _tail(self, prompt: Ids | None) -> Ids:
        if prompt is None:
            return np.empty(0, np.int32)
        last = prompt[-self._tail_len :]
        starts = np.flatnonzero(last == self._start) if self._start is not None else []
        return last[starts[-1] :] if len(starts) else last[:0] if self._grammar.harmony else last

    def _opened(self, tail: Ids) -> bool:
        """Whether the prompt leaves a think block open: its tail says, not a flag."""
        marks = [x.marker for x in self._lex(tail) if x.marker and x.marker in self._grammar.think]
        return bool(marks) and marks[-1] == self._grammar.think[0]

    def _lex(self, ids: Ids) -> list[Lexeme]:
        found, marker, at = [], "", 0
        for stop in [*np.flatnonzero(np.isin(ids, self._mark_ids)).tolist(), len(ids)]:
            found += self._split(marker, ids[at:stop].tolist())
            if stop < len(ids):
                marker, at = self._names[int(ids[stop])], stop + 1
        return found

    def _split(self, marker: str, ids: list[int]) -> list[Lexeme]:
        """The text of ids without control tokens, split at marks that are plain text in this vocabulary."""
        text = self._vocabulary.decode(ids)
        pieces = self._pattern.split(text) if self._pattern else [text]
        if len(pieces) == 1:
            return [Lexeme(marker, text, len(ids))]
        ends, at = [], 0
        for piece in pieces:
            at += len(piece)
            # Exact for all that a model does; for marks without end, which would take for ever, by their share.
            ends.append(self._tokens(ids, at) if len(pieces) < 20 else len(ids) * at // max(len(text), 1))
        sizes = [b - a for a, b in zip([0, *ends], ends, strict=False)]
        first = Lexeme(marker, pieces[0], sizes[0])
        return [first, *(Lexeme(pieces[i], pieces[i + 1], sizes[i + 1]) for i in range(1, len(pieces), 2))]

    def _tokens(self, ids: list[int], characters: int) -> int:
        """How many of the ids spell so many characters."""
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            enough = len(self._vocabulary.decode(ids[:middle])) >= characters
            low, high = (low, middle) if enough else (middle + 1, high)
        return low

    def _shown(self, part: Part) -> str:
        if part.kind == "text" or self._grammar.harmony:
            return text_of(part.lexemes)
        opener, closer = self._grammar.call
        return opener + text_of(part.lexemes) + (closer if part.closed else "")

    def _without_half_a_mark(self, text: str) -> str:
        """The text without what may become a mark that is plain text in this vocabulary."""
        for size in range(min(len(text), max(map(len, self._texts), default=1) - 1), 0, -1):
            if any(len(mark) > size and mark.startswith(text[-size:]) for mark in self._texts):
                return text[:-size]
        return text


def _certain(text: str) -> str:
    """The text without blanks, and without characters of which the first bytes have come, at its end."""
    while text != (text := text.rstrip().rstrip("\ufffd")):
        pass
    return text


_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")


def _marks(grammar: Grammar) -> tuple[str, ...]:
    return tuple(mark for mark in (*grammar.think, *grammar.call, *grammar.inner, *grammar.section) if mark)


def _joined(texts: Sequence[str]) -> str:
    return "\n".join(text.strip() for text in texts if text.strip())


def _reasoning(parts: Sequence[Part]) -> str:
    return _joined([text_of(part.lexemes) for part in parts if part.kind == "reasoning"])


def _tagged_parts(grammar: Grammar, lexemes: list[Lexeme], opened: bool) -> list[Part]:
    """A think block first, if there is one; then text and calls."""
    opener, closer = grammar.think
    first = 0 if opened else 1 if not lexemes[0].text.strip() else len(lexemes)
    if not opened and (first >= len(lexemes) or lexemes[first].marker != opener):
        return _body(grammar, lexemes)
    # Without a closer the first sign of a call ends the block; calls before a closer are thoughts.
    signs = [closer, (*grammar.section, grammar.call[0])[0]]
    end = next((i for sign in signs if sign and (i := _index(lexemes, first, sign)) is not None), None)
    inside = [Lexeme("" if x.marker == opener else x.marker, *x[1:]) for x in lexemes[first:end]]
    thoughts = Part("reasoning", inside, closed=end is not None)
    rest = lexemes[end:] if end is not None else []
    if rest and rest[0].marker == closer:
        rest = [Lexeme("", rest[0].text), *rest[1:]]
    return [thoughts, *_body(grammar, rest)]


def _index(lexemes: Sequence[Lexeme], start: int, marker: str) -> int | None:
    return next((i for i in range(start, len(lexemes)) if lexemes[i].marker == marker), None)


def _body(grammar: Grammar, lexemes: Sequence[Lexeme]) -> list[Part]:
    opener, closer = grammar.call
    parts: list[Part] = []
    text: list[Lexeme] = []
    call: list[Lexeme] | None = None
    for lexeme in lexemes:
        if call is not None and lexeme.marker != closer:
            call.append(lexeme)
        elif call is not None:
            parts.append(Part("call", call))
            call, text = None, [Lexeme("", lexeme.text)]
        elif lexeme.marker and lexeme.marker in (opener, *grammar.section):
            parts += [Part("text", text), Part("break", ())]
            opened = lexeme.marker == opener
            call, text = ([Lexeme("", lexeme.text)], []) if opened else (None, [Lexeme("", lexeme.text)])
        else:
            text.append(lexeme)
    whole = Part("text", text) if call is None else Part("call", call, closed=False)
    return _bare(grammar, [*parts, whole])


def _bare(grammar: Grammar, parts: list[Part]) -> list[Part]:
    text = text_of([lexeme for part in parts for lexeme in part.lexemes]).strip()
    if not grammar.bare or not text.startswith("{"):
        return parts
    whole = Part("call", [Lexeme("", text)])
    return [whole] if grammar.read_call(whole.lexemes, {}) is not None and text.endswith("}") else parts


def _harmony_parts(lexemes: Sequence[Lexeme]) -> list[Part]:
    """One part for each message; `<|return|>` ends the answer."""
    parts: list[Part] = []
    header, body = None, [lexemes[0]]
    for lexeme in lexemes[1:]:
        marker = lexeme.marker
        if marker in ("<|end|>", "<|call|>", "<|return|>", "<|start|>"):
            parts.append(_message(header, body, closed=marker != "<|start|>"))
            header, body = ("", None) if marker == "<|start|>" else (None, [])
        if marker == "<|return|>":
            body = None
            break
        if marker == "<|message|>" and body is None:
            body = [Lexeme("", *lexeme[1:])]
        elif body is None:
            header = (header or "") + lexeme.marker.replace("<|start|>", "") + lexeme.text
        else:
            body.append(lexeme if marker not in ("<|end|>", "<|call|>") else Lexeme("", *lexeme[1:]))
    return [part for part in [*parts, _message(header, body, closed=False)] if part.kind != "text" or _told(part)]


def _told(part: Part) -> bool:
    return bool(text_of(part.lexemes).strip())


def _message(header: str | None, body: list[Lexeme] | None, *, closed: bool) -> Part:
    if body is None:
        return Part("break", ())
    if header is not None and recipient(header):
        return Part("call", [Lexeme("", header), Lexeme("<|message|>", text_of(body))], closed)
    thought = header is not None and "<|channel|>analysis" in header
    return Part("reasoning" if thought else "text", body, closed)
