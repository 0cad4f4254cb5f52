"""What every generation must hold before it is trained on."""

import logging
from collections.abc import Sequence

import numpy as np

from lego.records import Generation, Sampling, VersionSpan

log = logging.getLogger(__name__)

FAULTS = frozenset(
    {"prompt_length", "output_ids", "finish", "logprobs", "versions"}
    | {"routing_missing", "routing_start", "routing_rows", "routing_experts", "routing_repeats"}
)
"""What `fault` may find."""
FLOOR = -9000.0
"""vLLM writes -9999 for a logprob that is NaN or -inf."""


def fault(
    generation: Generation,
    sampling: Sampling,
    *,
    prompt_len: int,
    routing_start: int,
    experts: int | None,
    shape: tuple[int, ...] | None = None,
) -> str | None:
    """The first invariant that a generation breaks, as a word to count by; None if it keeps all.

    `prompt_len` ids were sent and rows from `routing_start` on are missing; `experts` is None where none are captured;
    `shape` is that of the rows before, layers by experts.
    """
    n = len(generation.output_ids)
    logprobs = generation.logprobs
    if generation.prompt_len != prompt_len:
        log.error("prompt: %d tokens sent, the engine saw %d", prompt_len, generation.prompt_len)
        return "prompt_length"
    if generation.output_ids.ndim != 1 or n == 0 or n > sampling.max_tokens:
        return "output_ids"
    if generation.finish not in ("stop", "length"):
        return "finish"
    if logprobs.shape != (n,) or not ((logprobs > FLOOR) & (logprobs < 1e-3)).all():
        return "logprobs"
    if not _covers(generation.versions, n):
        return "versions"
    return None if experts is None else _routing_fault(generation, routing_start, experts, shape)


def _covers(spans: Sequence[VersionSpan], n: int) -> bool:
    at = 0
    for span in spans:
        if span.start != at or span.stop <= at:
            return False
        at = span.stop
    return at == n


def _routing_fault(generation: Generation, start: int, experts: int, shape: tuple[int, ...] | None) -> str | None:
    rows = generation.routing
    if rows is None:
        return "routing_missing"
    if not 0 <= generation.routing_start <= start:
        return "routing_start"
    wanted = generation.prompt_len + len(generation.output_ids) - 1 - generation.routing_start
    if rows.ndim != 3 or len(rows) != wanted or rows.shape[1:] != (shape or rows.shape[1:]):
        log.error("routing: %d rows wanted, shape %s found", wanted, rows.shape)
        return "routing_rows"
    if rows.dtype not in (np.uint8, np.uint16) or (rows.size and int(rows.max()) >= experts):
        return "routing_experts"
    ranked = np.sort(rows, axis=-1)
    return "routing_repeats" if bool((ranked[..., 1:] == ranked[..., :-1]).any()) else None
