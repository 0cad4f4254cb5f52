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


def fault(
    generation: Generation, sampling: Sampling, *, prompt_len: int, routing_start: int, experts: int | None
) -> str | None:
    """The first invariant that a generation breaks, as a word to count by; None if it keeps all.

    `prompt_len` ids were sent and rows from `routing_start` on are missing; `experts` is None where none are captured.
    """
    n = len(generation.output_ids)
    logprobs = generation.logprobs
    if generation.prompt_len != prompt_len:
        return "prompt_length"
    if n == 0 or n > sampling.max_tokens:
        return "output_ids"
    if generation.finish not in ("stop", "length"):
        return "finish"
    if len(logprobs) != n or not np.isfinite(logprobs).all() or float(logprobs.max()) > 1e-3:
        return "logprobs"
    if not _covers(generation.versions, n):
        return "versions"
    return None if experts is None else _routing_fault(generation, routing_start, experts)


def _covers(spans: Sequence[VersionSpan], n: int) -> bool:
    at = 0
    for span in spans:
        if span.start != at or span.stop <= at:
            return False
        at = span.stop
    return at == n


def _routing_fault(generation: Generation, start: int, experts: int) -> str | None:
    rows = generation.routing
    if rows is None:
        return "routing_missing"
    if generation.routing_start > start:
        return "routing_start"
    wanted = generation.prompt_len + len(generation.output_ids) - 1 - generation.routing_start
    if rows.ndim != 3 or len(rows) != wanted:
        log.error("routing: %d rows wanted, shape %s found", wanted, rows.shape)
        return "routing_rows"
    if rows.size and int(rows.max()) >= experts:
        return "routing_experts"
    ranked = np.sort(rows, axis=-1)
    return "routing_repeats" if bool((ranked[..., 1:] == ranked[..., :-1]).any()) else None
