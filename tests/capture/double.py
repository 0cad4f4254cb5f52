"""Answers for capture tests: in order from an engine, or made by hand with routing that tells its tokens."""

from collections.abc import Sequence

import numpy as np

from lego.chat.render import Renderer
from lego.engine import scripted
from lego.records import Generation, Ids, VersionSpan

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


class ScriptedEngine(scripted.ScriptedEngine):
    """Gives its answers in order, or its `error`; `delay_s` before each."""

    def __init__(self, renderer: Renderer, answers: Sequence[str], delay_s: float = 0.0) -> None:
        super().__init__(self._next, experts=(LAYERS, EXPERTS, TOP_K), seconds=delay_s)
        self.answers = [renderer._vocabulary.encode(text) for text in answers]
        self.error: Exception | None = None

    def _next(self, prompt_ids: Ids) -> list[int]:
        if self.error is not None:
            raise self.error
        return self.answers.pop(0)
