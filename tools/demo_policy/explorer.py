"""Dialogues of a random explorer: it looks at a function, makes one random edit that applies, and sees no verdict."""

import ast
import json
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from lego.chat.messages import Message, Tool, ToolCall, read_tools
from lego.chat.render import Renderer
from lego.tasks.mutate import VIEW, Edit, Function, candidates, functions
from tools.demo_policy.vocabulary import END_OF_TURN, edit_text

SYSTEM = "You fix bugs."
MOST_LINES = 985
"""Line numbers stay below 1000: one token each."""


@dataclass(frozen=True)
class Source:
    """One file of a package; `path` is what commands say, relative to the package's root."""

    path: str
    text: str

    @property
    def lines(self) -> list[str]:
        return self.text.split("\n")


@dataclass(frozen=True)
class Place:
    """A function and the 13 lines a look at it shows, renumbered to start at `line` of `path`."""

    path: str
    name: str
    line: int
    view: tuple[str, ...]
    length: int

    def edits(self) -> tuple[Edit, ...]:
        """Every applicable edit in the function as it stands; line numbers are the renumbered ones."""
        own = Function(self.path, self.name, 1, self.length)
        found = candidates(self.view, own)
        return tuple(Edit(edit.line + self.line - 1, edit.old, edit.new) for edit in found)

    def after(self, edit: Edit) -> "Place":
        at = edit.line - self.line
        text = self.view[at].replace(edit.old, edit.new, 1)
        return Place(self.path, self.name, self.line, (*self.view[:at], text, *self.view[at + 1 :]), self.length)

    def numbered(self) -> str:
        """What `nl -ba PATH | sed -n 'LINE,+12p'` prints."""
        return "".join(f"{self.line + i:6d}\t{text}\n" for i, text in enumerate(self.view))


@dataclass(frozen=True)
class Wire:
    """How one harness shows itself to a model: its tools, its call and its result texts."""

    name: str
    tools: tuple[dict, ...]
    tool: str
    key: str

    def system(self, rng: random.Random) -> str:
        if self.name == "codex":
            return SYSTEM
        date = f"20{rng.randrange(24, 30)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"
        return f"{SYSTEM}\nCurrent date: {date}\nCurrent working directory: /repo"

    def call(self, command: str) -> str:
        """The arguments of a call, as the policy writes them."""
        return json.dumps({self.key: command}, ensure_ascii=False)

    def result(self, output: str, rng: random.Random, code: int = 0) -> str:
        if self.name == "codex":
            seconds = rng.choice((0.0, rng.random() / 10, rng.random()))
            head = f"Chunk ID: {rng.randrange(16**6):06x}\nWall time: {seconds:.4f} seconds\n"
            size = -(-len(output.encode()) // 4)
            return f"{head}Process exited with code {code}\nOriginal token count: {size}\nOutput:\n{output}"
        return (output or "(no output)") + (f"\n\nCommand exited with code {code}" if code else "")


@dataclass(frozen=True)
class Dialogue:
    """Ids of one dialogue and what the explorer would say at each of its own positions.

    `targets` are (position, next id, probability); positions past `branch` hold a line number each, an
    alternative to the one at `branch`, so every line's edits are taught by one dialogue.
    """

    ids: list[int]
    targets: list[tuple[int, int, float]]
    branch: int
    alternatives: int


def wires(tools: dict[str, list[dict]]) -> dict[str, Wire]:
    return {
        "codex": Wire("codex", tuple(tools["codex"]), "exec_command", "cmd"),
        "pi": Wire("pi", tuple(tools["pi"]), "bash", "command"),
    }


def read_sources(root: Path, prefix: str = "") -> Iterator[Source]:
    """Python files below a folder that parse and are no tests."""
    for file in sorted(root.rglob("*.py")):
        path = prefix + file.relative_to(root).as_posix()
        if any(word in path for word in ("test", "docs/", "site-packages", "idlelib", "lib2to3", "encodings/")):
            continue
        try:
            text = file.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        yield Source(path, text)


def places(source: Source, excluded: frozenset[tuple[str, int]] = frozenset()) -> Iterator[Place]:
    """Functions worth exploring (2 to 12 applicable edits) that are not excluded as (path, line)."""
    lines = source.lines
    for function in functions(source.text, source.path):
        if (source.path, function.line) in excluded or function.line > MOST_LINES:
            continue
        place = place_of(source.path, lines, function)
        if 2 <= len(place.edits()) <= 12 and max(map(len, place.view)) <= 110:
            yield place


def place_of(path: str, lines: Sequence[str], function: Function) -> Place:
    view = tuple(lines[function.line - 1 : function.line - 1 + VIEW])
    return Place(path, function.name, function.line, view, function.end - function.line + 1)


def view_command(path: str, line: int) -> str:
    return f"nl -ba {path} | sed -n '{line},+12p'"


def edit_command(path: str, edit: Edit) -> str:
    return f"sed -i '{edit.line}{edit_text(edit.old, edit.new)}{path}"


class Writer:
    """Writes the explorer's dialogues in exactly the tokens the proxy sends and sees; `folder` holds the tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.renderer = Renderer.load(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.end_id = self.tokenizer.token_to_id(END_OF_TURN)
        self._call_id = self.tokenizer.token_to_id("<tool_call>")
        self._start_ids = (self.tokenizer.token_to_id("<|im_start|>"), self._id("assistant\n"))
        self.done_ids = [self._id("Done."), self.end_id]

    def prompt(self, wire: Wire, instruction: str, rng: random.Random) -> list[int]:
        messages = [Message("system", wire.system(rng)), Message("user", instruction)]
        return self.renderer.render(messages, read_tools(list(wire.tools))).tolist()

    def dialogue(self, wire: Wire, place: Place, test: str, rng: random.Random) -> Dialogue:
        edits = place.edits()
        chosen = rng.choice(edits)
        messages = [
            Message("system", wire.system(rng)),
            Message("user", f"{place.path}:{place.line} {test} fails."),
            _call(wire, view_command(place.path, place.line)),
            Message("tool", wire.result(place.numbered(), rng), call_id="1"),
            _call(wire, edit_command(place.path, chosen)),
            Message("tool", wire.result("", rng), call_id="1"),
        ]
        ids = [*self.renderer.render(messages, _layout(wire, rng)).tolist(), *self.done_ids]
        return self._taught(ids, self._own(ids), edits, chosen)

    def _own(self, ids: list[int]) -> list[int]:
        """Positions of what the policy says itself: after each `<|im_start|>assistant` to the end of the turn."""
        own, speaking = [], False
        for i, token in enumerate(ids):
            if speaking:
                own.append(i)
            speaking = (speaking and token != self.end_id) or (i > 0 and (ids[i - 1], token) == self._start_ids)
        return own

    def _taught(self, ids: list[int], own: list[int], edits: Sequence[Edit], chosen: Edit) -> Dialogue:
        edit_id = self._id(edit_text(chosen.old, chosen.new))
        at = max(i for i, token in enumerate(ids) if token == edit_id) - 1
        hard = [(i - 1, ids[i], 1.0) for i in own if i not in (at, at + 1)]
        lines = sorted({edit.line for edit in edits})
        others = [line for line in lines if line != chosen.line]
        soft = [(at - 1, self._id(str(line)), sum(e.line == line for e in edits) / len(edits)) for line in lines]
        for position, line in ((at, chosen.line), *((len(ids) + i, line) for i, line in enumerate(others))):
            there = [edit for edit in edits if edit.line == line]
            soft.extend((position, self._id(edit_text(e.old, e.new)), 1 / len(there)) for e in there)
        return Dialogue([*ids, *(self._id(str(line)) for line in others)], hard + soft, at, len(others))

    def _id(self, text: str) -> int:
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens, not 1")
        return ids[0]


def _call(wire: Wire, command: str) -> Message:
    return Message("assistant", calls=(ToolCall("1", wire.tool, wire.call(command)),))


def _layout(wire: Wire, rng: random.Random) -> tuple[Tool, ...]:
    """The tools with their `strict` field or, as some gateways send them, without it."""
    bare = [{**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}} for tool in wire.tools]
    return read_tools(rng.choices((list(wire.tools), bare), (0.7, 0.3))[0])
