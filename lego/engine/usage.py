"""What engines say of their load, read from their /metrics, and the pool's own account of it. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LINE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)(?: -?\d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one server said of itself at one moment; None: it does not tell."""

    running: int | None = None
    """Answers under way."""
    waiting: int | None = None
    """Answers that wait in the server."""
    kv_usage: float | None = None
    """Share of the cache that running answers hold, 0 to 1; of several cores of one server, the fullest."""
    cache_tokens: int | None = None
    """Tokens whose keys and values fit."""
    prefix_queries: int | None = None
    """Prompt tokens looked up in the prefix cache since the server's start."""
    prefix_hits: int | None = None
    """Those of them that were there."""


@dataclass(frozen=True, kw_only=True)
class LastUpdate:
    """The newest weight update that reached an engine."""

    seconds: float
    """From the call to the last engine's end."""
    bytes: int
    """Size of the weights file."""
    pause_seconds: float
    """The longest time that an engine sampled nothing."""


@dataclass(frozen=True, kw_only=True)
class PoolUsage:
    """The pool in numbers, for metrics; None: nobody measured it."""

    replicas: int = 1
    alive: int = 1
    """Engines that serve now."""
    running: int = 0
    """Calls that an engine is at work on."""
    waiting: int = 0
    """Calls that wait here: for admission, or for an engine to come back."""
    kv_usage: float | None = None
    """Of the fullest engine, 0 to 1."""
    prefix_hit_rate: float | None = None
    """Share of prompt tokens found in a prefix cache since the pool opened, 0 to 1."""
    prefix_hits: int | None = None
    """The same in tokens."""
    restarts: int = 0
    """Engines started again since the pool opened."""
    moved_sessions: int = 0
    """How often a session went on with another engine than before."""
    moved_calls: int = 0
    """How often a call that lost its engine was given to one again."""
    last_update: LastUpdate | None = None

    def metrics(self) -> dict[str, float]:
        """What was measured, by metric name."""
        own = {name: value for name, value in vars(self).items() if name != "last_update"}
        update = {} if self.last_update is None else vars(self.last_update)
        named = {f"engine/{name}": value for name, value in own.items()}
        named |= {f"engine/update_{name}": value for name, value in update.items()}
        return {name: float(value) for name, value in named.items() if value is not None}


def read_metrics(text: str) -> Reading:
    """The few numbers we use of a Prometheus text; ValueError for a line of theirs that cannot be read."""
    found: dict[str, list[tuple[str, float]]] = {}
    for name, labels, value in _samples(text):
        found.setdefault(name, []).append((labels, value))
    usages = [value for _, value in found.get("vllm:kv_cache_usage_perc", ())]
    tokens = [_cache_tokens(labels) for labels, _ in found.get("vllm:cache_config_info", ())]
    return Reading(
        running=_total(found.get("vllm:num_requests_running")),
        waiting=_total(found.get("vllm:num_requests_waiting")),
        kv_usage=max(usages, default=None),
        cache_tokens=sum(tokens) or None,
        prefix_queries=_total(found.get("vllm:prefix_cache_queries_total")),
        prefix_hits=_total(found.get("vllm:prefix_cache_hits_total")),
    )


_WANTED = (
    "vllm:num_requests_running{",
    "vllm:num_requests_waiting{",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
)


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    for line in text.splitlines():
        if not line.startswith(_WANTED):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"/metrics: line {line!r}, wanted `name{{labels}} value`")
        yield match["name"], match["labels"] or "", float(match["value"])


def _cache_tokens(labels: str) -> int:
    """Blocks times tokens of a block; 0 where the server does not say."""
    said = dict(_LABEL.findall(labels))
    blocks, size = said.get("num_gpu_blocks", ""), said.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdecimal() and size.isdecimal() else 0


def _total(samples: list[tuple[str, float]] | None) -> int | None:
    return None if samples is None else round(sum(value for _, value in samples))


class Growth:
    """A counter over the lives of a server: it starts again at 0 when the server does."""

    def __init__(self) -> None:
        self.total: int | None = None
        self._last = 0

    def read(self, count: int | None) -> None:
        """Takes a reading; None changes nothing."""
        if count is not None:
            self.total = (self.total or 0) + (count - self._last if count >= self._last else count)
            self._last = count
