"""Rates with their 95 % intervals."""

from dataclasses import dataclass
from math import sqrt

Z95 = 1.959964


@dataclass(frozen=True)
class Rate:
    """`hits` of `asked`, with Wilson's 95 % score interval (Wilson 1927); an empty rate spans 0 to 1."""

    hits: int
    asked: int

    @property
    def value(self) -> float:
        return self.hits / self.asked if self.asked else 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        if not self.asked:
            return 0.0, 1.0
        n, p, zz = self.asked, self.value, Z95**2
        middle = (p + zz / (2 * n)) / (1 + zz / n)
        half = Z95 / (1 + zz / n) * sqrt(p * (1 - p) / n + zz / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)

    def triple(self) -> list[float]:
        """[value, low, high]."""
        return [self.value, *self.bounds]

    def __str__(self) -> str:
        low, high = self.bounds
        return f"{self.value:.2f} [{low:.2f}, {high:.2f}]" if self.asked else "–"
