"""What capture cost and kept of one session, in numbers that people can check. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lego.capture.session import Session
from lego.capture.tape import common
from lego.chat.messages import Message, Tool
from lego.records import Fidelity, Ids, Turn

Difference = Callable[[Sequence[Message], Sequence[Tool], Ids], str | None]
"""How ids differ from what the model's own chat template makes of messages and tools; None if they do not."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """One session. Token counts are over all its calls."""

    fidelity: Fidelity
    prompt_tokens: int
    resent_tokens: int
    """Prompt tokens that an earlier call of the session had begun with."""
    differences: tuple[str, ...]
    """Where a conversation is not what the template would have made of it whole, one line a segment."""

    def lines(self) -> Iterator[str]:
        """For people."""
        f = self.fidelity
        share = f"{f.trained / f.sampled:.1%}" if f.sampled else "none"
        yield f"{f.turns} turns, drift {_counts(f.drift)}; rejected by a cross-check: {_counts(f.faults)}"
        yield f"{f.sampled} tokens sampled, {share} trainable; excluded {_counts(f.excluded)}"
        resent = f"{self.resent_tokens / self.prompt_tokens:.1%}" if self.prompt_tokens else "none"
        yield f"{self.prompt_tokens} prompt tokens in all calls, {resent} of them re-sent context"
        if f.turns:
            yield from self.differences or ("every conversation reads as the model's own chat template would tell it",)


def audit(session: Session, difference: Difference) -> Audit:
    """Counts, and the re-render check of the last turn of each path."""
    turns = session.turns
    return Audit(
        fidelity=session.fidelity(),
        prompt_tokens=sum(len(turn.prompt_ids) for turn in turns),
        resent_tokens=sum(_resent(turn, turns[: turn.index]) for turn in turns),
        differences=tuple(_differences(session, difference)),
    )


def _resent(turn: Turn, earlier: Sequence[Turn]) -> int:
    """The longest beginning of this prompt that an earlier turn's prompt and answer share."""
    return max((common(turn.prompt_ids, _whole(before)) for before in earlier), default=0)


def _whole(turn: Turn) -> Ids:
    return np.concatenate([turn.prompt_ids, turn.generation.output_ids])


def _differences(session: Session, difference: Difference) -> Iterator[str]:
    inner = {turn.parent for turn in session.turns}
    for turn in session.turns:
        answer = session.answers.get(turn.index)
        if turn.index in inner or answer is None:
            continue
        history = session.plan_of(turn.index).history
        found = difference((*history.messages, answer.message), history.tools, _whole(turn))
        if found is not None:
            yield f"not as the model's own chat template tells it whole: turn {turn.index}: {found}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "none"
