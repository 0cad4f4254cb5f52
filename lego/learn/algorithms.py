"""The objectives a recipe can choose, as plain values; `losses.py` has their functions."""

from dataclasses import dataclass
from typing import Literal

Normalise = Literal["token", "sequence"]


def _check(low: float, high: float, normalise: str) -> None:
    if not 0 <= low < 1:
        raise ValueError(f"clip_low={low}: want 0 <= clip_low < 1, the ratio is kept above 1 - clip_low")
    if high < 0:
        raise ValueError(f"clip_high={high}: want clip_high >= 0, the ratio is kept below 1 + clip_high")
    if normalise not in ("token", "sequence"):
        raise ValueError(f"normalise={normalise!r}: want 'token' or 'sequence'")


@dataclass(frozen=True, kw_only=True)
class GSPO:
    """Sequence-level ratio: exp of the mean log-ratio over the sampled tokens of a segment."""

    clip_low: float = 3e-4
    """The sequence ratio is clipped below 1 - clip_low."""
    clip_high: float = 4e-4
    """The sequence ratio is clipped above 1 + clip_high."""
    normalise: Normalise = "sequence"
    """Mean over segments by their weight ("sequence"), or over tokens ("token")."""

    def __post_init__(self) -> None:
        _check(self.clip_low, self.clip_high, self.normalise)


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Token-level ratio, clipped on both sides (with unequal bounds: DAPO's clip-higher)."""

    clip_low: float = 0.2
    """The token ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The token ratio is clipped above 1 + clip_high."""
    normalise: Normalise = "token"
    """Mean over tokens ("token"), or over segments by their weight ("sequence")."""

    def __post_init__(self) -> None:
        _check(self.clip_low, self.clip_high, self.normalise)


Algorithm = GSPO | GRPO
