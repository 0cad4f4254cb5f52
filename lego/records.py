"""The frozen records that travel between the parts; written once, where their content is made.

Axes: P prompt tokens, N output tokens, T tokens of a segment, L MoE layers, K experts a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]
Routing = NDArray[np.uint8] | NDArray[np.uint16]


KeepSessions = Literal["none", "odd", "all"]
"""Which sessions of a run stay on disk."""


class Outcome(StrEnum):
    """How a trial ended; only `solved` and `failed` carry a reward."""

    SOLVED = "solved"
    FAILED = "failed"
    TIMEOUT = "timeout"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    CONTEXT_EXCEEDED = "context_exceeded"
    OOM = "oom"
    HARNESS_ERROR = "harness_error"
    SANDBOX_ERROR = "sandbox_error"
    ENGINE_ERROR = "engine_error"
    VERIFIER_ERROR = "verifier_error"
    CANCELLED = "cancelled"


SCORED = frozenset({Outcome.SOLVED, Outcome.FAILED})


class Drift(StrEnum):
    """Why a call did not extend the turn before it and started a new root."""

    NONE = "none"
    FIRST = "first"
    COMPACTION = "compaction"
    EDITED = "edited"
    REASONING_DROPPED = "reasoning_dropped"
    RETRY_TWIN = "retry_twin"
    SIDE_REQUEST = "side_request"
    SUBAGENT = "subagent"
    UNKNOWN = "unknown"


class CallKind(StrEnum):
    """What a model call is for; the recipe says which kinds train (`Rollout.train_calls`)."""

    MAIN = "main"
    SUBAGENT = "subagent"
    SUMMARY = "summary"
    """The harness asks for a summary of its own history (compaction)."""
    SIDE = "side"
    """Titles and the like."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Every sampling field, sent explicitly on each request; never left to a model's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 512
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Output tokens [start, stop) were sampled by these weights."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What the engine sampled for one prompt.

    `routing` holds rows [routing_start, P + N - 1): row i is where token i went. The last sampled
    token never passed the network, so it has no row.
    """

    prompt_len: int
    output_ids: Ids
    logprobs: Floats
    routing: Routing | None
    routing_start: int
    versions: tuple[VersionSpan, ...]
    finish: str
    """`stop`, `length`, or `abort` for what was sampled of an answer that nobody waited for."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A call that sampled tokens: a node of its session's tree."""

    index: int
    parent: int | None
    drift: Drift
    prompt_ids: Ids
    generation: Generation
    sampling: Sampling
    rejected: str | None = None
    """Why this turn is untrainable (a failed invariant, an answer that never arrived); None if it is fine."""
    asked: Mapping[str, object] = field(default_factory=dict)
    """Sampling fields that the harness sent; `sampling` was used."""
    started: float = 0.0
    """Seconds from the start of the trial to the call."""
    seconds: float = 0.0

    @property
    def truncated(self) -> bool:
        """Cut by a limit on its length, whatever the dialect told the harness."""
        return self.generation.finish == "length"


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A root-to-leaf path laid out for training; every sampled token has mask True in exactly one.

    All arrays share axis T. `logprobs_T` and `versions_T` hold 0 and -1 off the mask. Row i of
    `routing_TLK` belongs to input token i, where `routed_T[i]`.
    """

    ids_T: Ids
    mask_T: Mask
    logprobs_T: Floats
    versions_T: Ids
    routing_TLK: Routing | None
    routed_T: Mask
    kind: CallKind = CallKind.MAIN
    """What the segment's own turns are for."""

    def __post_init__(self) -> None:
        n = len(self.ids_T)
        for name in ("mask_T", "logprobs_T", "versions_T", "routed_T"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"segment of {n} ids but {len(getattr(self, name))} in {name}")
        if self.routing_TLK is not None and len(self.routing_TLK) != n:
            raise ValueError(f"segment of {n} ids but {len(self.routing_TLK)} routing rows")

    def window(self, start: int, stop: int) -> "Segment":
        """Tokens [start, stop), in all fields alike; ValueError unless they lie in the segment."""
        if not 0 <= start < stop <= len(self.ids_T):
            raise ValueError(f"window [{start}, {stop}) of {len(self.ids_T)} ids")
        rows = slice(start, stop)
        return Segment(
            ids_T=self.ids_T[rows],
            mask_T=self.mask_T[rows],
            logprobs_T=self.logprobs_T[rows],
            versions_T=self.versions_T[rows],
            routing_TLK=None if self.routing_TLK is None else self.routing_TLK[rows],
            routed_T=self.routed_T[rows],
            kind=self.kind,
        )


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """The token account of one session: sampled = trained + the sum of `excluded`."""

    sampled: int = 0
    trained: int = 0
    excluded: Mapping[str, int] = field(default_factory=dict)
    turns: int = 0
    drift: Mapping[str, int] = field(default_factory=dict)
    faults: Mapping[str, int] = field(default_factory=dict)
    """Turns that failed a cross-check, by the check."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """Turns by what they are for."""
    truncated: bool = False
    """The last turn that trains was cut by a limit on its length."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One finished trial. `reward` is None unless the outcome is scored."""

    task: str
    attempt: int
    split: str
    version: int
    outcome: Outcome
    reward: float | None
    segments: tuple[Segment, ...]
    fidelity: Fidelity
    seconds: Mapping[str, float] = field(default_factory=dict)
    patch: str = ""
    verdict_reused: bool = False
    detail: str = ""
    harness: str = ""
    """Name of the harness that ran."""
    group: int | None = None
    """Number of the trial's group in the run's plan; None for a measurement."""
    recording: str = ""
    """The session file in the run's sessions/, if the session was kept."""

    def __post_init__(self) -> None:
        if (self.reward is None) == (self.outcome in SCORED):
            raise ValueError(f"outcome {self.outcome} with reward {self.reward}")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A segment with its advantage and weight; weights of one trajectory's samples sum to 1."""

    segment: Segment
    advantage: float
    weight: float
    reward: float = 0.0
    """The trial's reward, for algorithms that estimate advantages token by token."""
    trial: str = ""
    """`task/attempt`, for messages."""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How many values lie between neighbouring edges; the first and the last count are of those beyond."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.edges) + 1:
            raise ValueError(f"{len(self.counts)} counts for {len(self.edges)} edges, wanted one more than edges")
