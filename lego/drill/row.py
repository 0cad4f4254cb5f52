"""What a harness made of a drill, as one row of a table. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lego.capture.keys import canonical
from lego.capture.session import Session
from lego.chat.messages import Message
from lego.drill.exercise import solved
from lego.drill.stage import Drilled, share
from lego.errors import UsageError

LEAST_SHARE = 0.99
BEGIN, END = "<!-- python -m lego.smoke: begin -->", "<!-- python -m lego.smoke: end -->"
COLUMNS = ("harness", "speaks", "turns", "drift", "segments", "trainable", "not trained", "retells", "a bad call")
COLUMNS += ("end", "CPU s", "MiB", "outbound")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one harness made of both runs; all fields but `faults` are the table's columns."""

    cells: tuple[str, ...]
    faults: tuple[str, ...] = ()
    """What must not be, each in a sentence."""


def verdict(plain: Drilled, odd: Drilled) -> Verdict:
    """The row of both runs. Pure."""
    session, fidelity = plain.session, plain.session.fidelity()
    cells = (
        plain.harness,
        ", ".join(sorted({origin.dialect for origin in session.journal.origins})) or "nothing",
        str(fidelity.turns),
        _counts(fidelity.drift),
        str(len(session.segments())),
        f"{share(session):.1%}",
        _counts(fidelity.excluded),
        retold(plain),
        retold(odd, first=True),
        plain.end.error or "its own",
        f"{plain.cost.cpu_s:.1f}",
        f"{plain.cost.memory_mib:.0f}",
        str(plain.cost.outbound),
    )
    return Verdict(cells=cells, faults=tuple(_faults(plain, "plain run")) + tuple(_faults(odd, "run with a bad call")))


def _faults(run: Drilled, name: str) -> Iterator[str]:
    fidelity = run.session.fidelity()
    if run.end.error is not None:
        yield f"{name}: ended with an error: {run.end.error}"
    if not solved(run.changes):
        yield f"{name}: the one-line fix is not what was changed: {[str(change.path) for change in run.changes]}"
    # Counted where each is made: by the engine, in the segments, by cause.
    sampled, excluded = sum(run.engine.sampled), sum(fidelity.excluded.values())
    trained = sum(int(segment.mask_T.sum()) for segment in run.session.segments())
    if sampled != trained + excluded:
        yield f"{name}: {sampled} tokens were sampled, {trained} are trained and {excluded} excluded for a cause"
    if not share(run.session) >= LEAST_SHARE and run.session.turns and name == "plain run":
        yield f"{name}: only {share(run.session):.1%} of sampled tokens are trainable"
    if not run.session.turns:
        yield f"{name}: the model was never asked"
    if run.cost.outbound:
        yield f"{name}: {run.cost.outbound} tries to reach something else than the model"
    if run.left:
        yield f"{name}: left running: {', '.join(run.left)}"


def retold(run: Drilled, *, first: bool = False) -> str:
    """How the harness told the model's answers, or only the first one, when it next asked."""
    found = [_difference(*pair) for pair in _echoes(run.session)]
    words = {word for words in (found[:1] if first else found) for word in words}
    return ", ".join(sorted(words)) or ("as sampled" if found else "never")


def _echoes(session: Session) -> Iterator[tuple[Message, Message | None]]:
    """Each answer, and how the next history tells it, known by the ids of its calls or else by its place."""
    for turn, later in zip(session.turns, session.turns[1:], strict=False):
        answer = session.answers.get(turn.index)
        if answer is None:
            continue
        before = len(session.plan_of(turn.index).history.messages)
        history = session.plan_of(later.index).history.messages
        ids = {call.id for call in answer.message.calls}
        by_id = (m for m in history if m.role == "assistant" and ids & {call.id for call in m.calls})
        by_place = next((m for m in history[before:] if m.role == "assistant"), None)
        yield answer.message, next(by_id, by_place)


def _difference(said: Message, told: Message | None) -> Iterator[str]:
    if told is None:
        yield "turn deleted"
        return
    for part, mine, theirs in (("text", said.text, told.text), ("reasoning", said.reasoning, told.reasoning)):
        if mine != theirs:
            yield f"{part} {'trimmed' if mine.strip() == theirs.strip() else 'changed' if theirs else 'dropped'}"
    if len(said.calls) != len(told.calls):
        yield "calls dropped"
    for mine, theirs in zip(said.calls, told.calls, strict=False):
        if mine.id != theirs.id:
            yield "call ids its own"
        if mine.name != theirs.name:
            yield "tool renamed"
        if mine.arguments != theirs.arguments:
            yield "arguments " + (
                "respelled" if canonical(mine.arguments) == canonical(theirs.arguments) else "changed"
            )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "none"


def table(verdicts: Sequence[Verdict]) -> str:
    """The verdicts in Markdown, which reads well as plain text too."""
    rows = [COLUMNS, *(v.cells for v in verdicts)]
    safe = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in safe) for i in range(len(COLUMNS))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in safe]
    lines.insert(1, "| " + " | ".join("-" * w for w in widths) + " |")
    return "\n".join(lines) + "\n"


def written(page: str, verdicts: Sequence[Verdict]) -> str:
    """The page with these verdicts in its table; rows of harnesses that were not run stay. Raises UsageError."""
    head, begin, rest = page.partition(BEGIN)
    inner, end, tail = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"no lines {BEGIN!r} and {END!r} to write between")
    rows = {v.cells[0]: v for v in [*_read(inner), *verdicts]}
    return f"{head}{BEGIN}\n{table([rows[name] for name in sorted(rows)])}{END}{tail}"


def _read(inner: str) -> Iterator[Verdict]:
    for line in inner.strip().splitlines()[2:]:
        cells = tuple(cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        if len(cells) == len(COLUMNS):
            yield Verdict(cells=cells)
