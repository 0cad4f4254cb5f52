"""A plain SVG of a comparison: bars of throughput, the staleness of what was trained, and throughput by concurrency."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, PANEL, LEFT, ROW = 860, 210, 210, 22
INK, FAINT = "#333333", "#dddddd"
COLOURS = ("#8c8c8c", "#2b6cb0", "#c05621", "#2f855a")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One setting: its throughput against the baseline's, and the text behind its bar."""

    name: str
    ratio: float
    note: str


Line = Mapping[int, float]
"""Values by concurrency."""


def svg(title: str, bars: Sequence[Bar], shares: Mapping[str, Sequence[float]], lines: Mapping[str, Line]) -> str:
    """The whole picture. `shares[name][k]` is the share of trials trained k versions after they started."""
    top = 40
    parts = [_text(14, 24, title, size=15)]
    parts += _bars(bars, top)
    top += ROW * len(bars) + 50
    parts += _shares(shares, top)
    parts += _lines(lines, top)
    height = top + PANEL + 50
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>", ""])


def _bars(bars: Sequence[Bar], top: float) -> list[str]:
    scale = (WIDTH - LEFT - 290) / max(bar.ratio for bar in bars)
    parts = []
    for row, bar in enumerate(bars):
        y, long, colour = top + row * ROW, bar.ratio * scale, COLOURS[0 if bar.ratio == 1 else 1]
        parts += [
            _text(LEFT - 8, y + 14, bar.name, anchor="end"),
            f'<rect x="{LEFT}" y="{y + 3}" width="{long:.1f}" height="{ROW - 7}" fill="{colour}"/>',
            _text(LEFT + long + 6, y + 14, f"{bar.ratio:.2f}×  {bar.note}"),
        ]
    return parts


def _shares(shares: Mapping[str, Sequence[float]], top: float) -> list[str]:
    """Left panel: columns side by side."""
    left, width = 50, 340
    most = max(max(each) for each in shares.values())
    ages = max(len(each) for each in shares.values())
    wide = width / ages / (len(shares) + 0.5)
    parts = [_text(left, top - 8, "share of trials by staleness, versions"), _axis(left, top, width)]
    for place, (name, each) in enumerate(shares.items()):
        parts.append(_legend(left + width - 90, top + 6 + 16 * place, name, COLOURS[place]))
        for age, share in enumerate(each):
            tall = share / most * (PANEL - 40)
            x = left + width * age / ages + wide * (place + 0.25)
            rect = f'<rect x="{x:.1f}" y="{top + PANEL - tall:.1f}" width="{wide:.1f}" height="{tall:.1f}"'
            parts.append(f'{rect} fill="{COLOURS[place]}"/>')
    parts += [
        _text(left + width * (age + 0.5) / ages, top + PANEL + 16, str(age), anchor="middle") for age in range(ages)
    ]
    return parts


def _lines(lines: Mapping[str, Line], top: float) -> list[str]:
    """Right panel: both axes are logarithmic."""
    left, width = 490, 340
    xs = sorted({x for line in lines.values() for x in line})
    ys = [y for line in lines.values() for y in line.values()]
    low, high = math.log10(min(ys)), math.log10(max(ys))

    def place(x: int, y: float) -> tuple[float, float]:
        across = math.log(x / xs[0]) / math.log(xs[-1] / xs[0])
        return left + width * across, top + PANEL - (PANEL - 20) * (math.log10(y) - low) / (high - low) - 4

    parts = [_text(left, top - 8, "trained trials an hour, by concurrent trials"), _axis(left, top, width)]
    for number, (name, line) in enumerate(lines.items()):
        points = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in sorted(line.items()))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[number]}" stroke-width="2"/>')
        parts.append(_legend(left + 10, top + 6 + 16 * number, name, COLOURS[number]))
        for x in (xs[0], xs[-1]):
            at = place(x, line[x])
            parts.append(_text(at[0], at[1] - 6, f"{line[x]:,.0f}", anchor="start" if x == xs[0] else "end"))
    parts += [_text(place(x, ys[0])[0], top + PANEL + 16, str(x), anchor="middle") for x in xs]
    return parts


def _axis(left: float, top: float, width: float) -> str:
    return f'<path d="M{left} {top} V{top + PANEL} H{left + width}" fill="none" stroke="{INK}"/>'


def _legend(x: float, y: float, name: str, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colour}"/>' + _text(x + 15, y + 9, name)


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>'
