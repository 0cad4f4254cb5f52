"""The live terminal view of a run: the one file for rich. Without a terminal it prints a line a step."""

import io
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lego.observe.interval import Rate

BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """What a finished step shows. Fidelity numbers are None where no token was trained."""

    step: int
    solve: Rate
    outcomes: Mapping[str, int]
    pearson: float | None
    k3: float | None
    routing_coverage: float | None
    trainable_share: float
    seconds: Mapping[str, float]
    reused: int
    """Verdicts reused for the same task and the same patch."""


@dataclass
class Phase:
    """What the run does right now."""

    name: str = "start"
    done: int = 0
    total: int = 0
    since: float = field(default_factory=time.monotonic)
    outcomes: Counter[str] = field(default_factory=Counter)


def bars(values: Sequence[float]) -> str:
    """Shares of 1 as a row of block characters."""
    return "".join(BARS[min(len(BARS) - 1, int(v * len(BARS)))] for v in values)


def number(value: float | None, form: str) -> str:
    """A number in a format, or a dash where nobody measured it."""
    return "–" if value is None else format(value, form)


def _outcomes(counts: Mapping[str, int]) -> str:
    return " ".join(f"{name} {n}" for name, n in sorted(counts.items(), key=lambda item: -item[1]))


def _seconds(parts: Mapping[str, float]) -> str:
    return " ".join(f"{name} {s:.0f}" for name, s in parts.items())


COLUMNS = ("step", "solve rate, 95 %", "outcomes", "Pearson", "k3", "routing", "trainable", "seconds")


def cells(row: StepRow) -> tuple[str, ...]:
    """A step as the table shows it."""
    return (
        str(row.step),
        str(row.solve),
        _outcomes(row.outcomes) + f" ({row.reused} verdicts reused)",
        number(row.pearson, ".6f"),
        number(row.k3, ".1e"),
        number(row.routing_coverage, ".1%"),
        format(row.trainable_share, ".1%"),
        _seconds(row.seconds),
    )


class View:
    """Holds what is shown; `phase`, `advance` and `step` change it."""

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._rows: list[StepRow] = []
        self._phase = Phase()
        self._console = console
        self._report: Group | None = None
        self.started = time.monotonic()

    def phase(self, name: str, total: int = 0) -> None:
        """A new thing to do, of `total` parts (0: unknown)."""
        self._phase = Phase(name=name, total=total)
        if not self._console.is_terminal:
            self._say(name + (f" ({total})" if total else ""))

    def progress(self, done: int, total: int, text: str) -> None:
        """Where the phase stands."""
        self._phase.done, self._phase.total = done, total
        if text:
            self._phase.name = text

    def advance(self, outcome: str) -> None:
        """One more trial of this phase has ended."""
        self._phase.done += 1
        self._phase.outcomes[outcome] += 1

    def step(self, row: StepRow) -> None:
        """A step is done."""
        self._rows.append(row)
        if not self._console.is_terminal:
            self._say("  ".join(f"{name}: {value}" for name, value in zip(COLUMNS, cells(row), strict=True)))

    def report(self, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> None:
        """The end of the run: a table, and lines below it."""
        table = Table(*columns)
        for row in rows:
            table.add_row(*row)
        self._report = Group(table, *(Text(note) for note in notes))
        self._console.print(self._report, soft_wrap=True)

    def picture(self, path: Path) -> None:
        """The last screen and the report as an SVG file."""
        paper = Console(record=True, width=160, file=io.StringIO())
        paper.print(self)
        if self._report is not None:
            paper.print(self._report)
        paper.save_svg(str(path), title=self._title)

    def __rich__(self) -> Group:
        table = Table(*COLUMNS, expand=True)
        for row in self._rows[-12:]:
            table.add_row(*cells(row))
        curve = bars([row.solve.value for row in self._rows])
        phase = self._phase
        now = f"{phase.name} {phase.done}/{phase.total}" if phase.total else phase.name
        spent = f"{time.monotonic() - phase.since:.0f} s"
        line = f"{self._clock()}  {now}  {_outcomes(phase.outcomes)}  {spent}"
        return Group(Text(f"{self._title}   {curve}", style="bold"), table, Text(line))

    def _say(self, text: str) -> None:
        """A plain line, for output that is no terminal."""
        self._console.print(f"{self._clock()} {text}", highlight=False, markup=False, soft_wrap=True)

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        return f"{minutes:02d}:{seconds:02d}"


@contextmanager
def open_view(title: str, console: Console | None = None) -> Iterator[View]:
    """Shows the view until the context ends; the last state stays on the screen."""
    console = console or Console()
    view = View(title, console)
    if not console.is_terminal:
        yield view
        return
    with Live(view, console=console, refresh_per_second=4):
        yield view
