"""A scripted engine for capture tests: answers in order, routing that tells which call captured it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lego.chat.render import Renderer
from lego.engine.base import Progress
from lego.records import Generation, Ids, Sampling, VersionSpan

EXPERTS, LAYERS, TOP_K = 8, 3, 2


def generation(
    prompt: Ids, output: Sequence[int], *, start: int = 0, finish: str = "stop", version: int = 0
) -> Generation:
    """A well-formed answer; row i of the routing depends on the id of token i."""
    ids = np.concatenate([prompt, np.asarray(output, np.int32)])[start:-1]
    first = (ids[:, None, None] + np.arange(LAYERS)[None, :, None]) % EXPERTS
    rows = np.concatenate([first, (first + 1) % EXPERTS], axis=2).astype(np.uint8)
    return Generation(
        prompt_len=len(prompt),
        output_ids=np.asarray(output, np.int32),
        logprobs=-0.01 * np.arange(1, len(output) + 1, dtype=np.float32),
        routing=rows,
        routing_start=start,
        versions=(VersionSpan(version=version, start=0, stop=len(output)),),
        finish=finish,
    )


class ScriptedEngine:
    """Gives its answers in order; `delay_s` before each. Cut when over `max_tokens`."""

    def __init__(self, renderer: Renderer, answers: Sequence[str], delay_s: float = 0.0) -> None:
        self.answers = [renderer._vocabulary.encode(text) for text in answers]
        self.delay_s = delay_s
        self.prompts: list[Ids] = []
        self.samplings: list[Sampling] = []
        self.aborted = asyncio.Event()
        self.error: Exception | None = None

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        session: str,
        routing_start: int = 0,
        progress: Progress | None = None,
    ) -> Generation:
        self.prompts.append(prompt_ids)
        self.samplings.append(sampling)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.aborted.set()
            raise
        if self.error is not None:
            raise self.error
        output = self.answers.pop(0)
        cut = len(output) > sampling.max_tokens
        output = output[: sampling.max_tokens]
        return generation(prompt_ids, output, start=routing_start, finish="length" if cut else "stop")

    async def update(self, weights: Path, version: int) -> None:
        raise AssertionError("no weights in these tests")
