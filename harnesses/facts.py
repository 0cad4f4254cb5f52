"""What is known of each agent program beyond how it is started, as data, and the table of it in the documentation.

`python -m harnesses.facts docs/harnesses.md` writes the table anew.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

Wire = Literal["chat/completions", "responses", "messages"]
"""A format, by the end of its path."""
BEGIN, END = "<!-- python -m harnesses.facts: begin -->", "<!-- python -m harnesses.facts: end -->"
LIMITS = ("steps", "mistakes", "retries", "silence_s", "command_s", "compact")
"""Fields of a harness that limit its runs, where it has them."""
COLUMNS = ("harness", "release", "its box needs", "speaks", "limits", "session", "sub-agent", "summary")


@dataclass(frozen=True, kw_only=True)
class Label:
    """A header of a request; `holds` is a part of its value that tells this kind of call from others."""

    header: str
    """In small letters."""
    holds: str = ""

    def __str__(self) -> str:
        return f"`{self.header}`" + (f" with `{self.holds}`" if self.holds else "")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What does not follow from a harness's fields and methods; each is held against the program by a test."""

    wires: tuple[Wire, ...]
    """Formats that it can speak, the one by default first."""
    glibc: bool = True
    """Whether its program needs the C library of its box, and that to be glibc."""
    needs: tuple[str, ...] = ()
    """Programs without which it cannot work in a box."""
    session: Label | None = None
    """What names its session, the same in all calls of a run in the default format."""
    subagent: Label | None = None
    """What only the calls of its sub-agents have."""
    summary: Label | Literal["words"] | None = None
    """What tells the call in which it has its history summarised: a label, or only its words; None if it never does."""
    quirks: tuple[str, ...] = ()
    """What else surprises, each in a sentence without its name."""


@runtime_checkable
class Known(Protocol):
    """A harness with facts."""

    @property
    def facts(self) -> Facts: ...


def row(name: str, kind: Any) -> tuple[str, ...]:
    """The cells of a harness class that `known` lists."""
    facts: Facts = kind.facts
    own = {field.name for field in fields(kind)}
    needs = [*(("glibc",) if facts.glibc else ()), *facts.needs]
    return (
        name,
        kind().version,
        ", ".join(needs) or "nothing",
        ", ".join(facts.wires),
        ", ".join(f"`{limit}`" for limit in LIMITS if limit in own) or "none",
        *(str(label or "-") for label in (facts.session, facts.subagent)),
        "never asks" if facts.summary is None else str(facts.summary),
    )


def table(known: Mapping[str, Any]) -> str:
    """All harnesses, in Markdown: the table, then their quirks."""
    rows = [COLUMNS, *(row(name, kind) for name, kind in sorted(known.items()))]
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(COLUMNS))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)) + " |" for cells in rows]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join([*lines, "", *_quirks(known)]) + "\n"


def _quirks(known: Mapping[str, Any]) -> Iterator[str]:
    for name, kind in sorted(known.items()):
        if kind.facts.quirks:
            yield f"- **{name}**: {' '.join(kind.facts.quirks)}"


def written(page: str, known: Mapping[str, Any]) -> str:
    """The page with the table between its marks; ValueError where it has none."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no lines {BEGIN!r} and {END!r} to write between")
    return f"{head}{BEGIN}\n{table(known)}{END}{tail}"


def main(argv: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    from harnesses.known import KNOWN  # whose modules import this one

    if len(argv) != 1:
        sys.stderr.write("usage: python -m harnesses.facts PAGE.md\n")
        return 2
    page = Path(argv[0])
    try:
        page.write_text(written(page.read_text(), KNOWN))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {page}: {error}\n")
        return 2
    return 0


def needed(harness: object) -> Iterable[str]:
    """Programs that the harness's box must have."""
    return harness.facts.needs if isinstance(harness, Known) else ()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
