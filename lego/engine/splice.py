"""An answer that another engine goes on with after the first one died in the middle of it. Pure.

What was sampled so far is told already: a harness may have read it. So it stays, and the other engine samples what
comes after it, which without penalties is the same distribution. Its routing rows are those that the other engine
finds for these tokens, as for any prompt.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from lego.records import Floats, Generation, Ids, Sampling, VersionSpan


@dataclass(frozen=True, kw_only=True)
class Told:
    """What was told of an answer whose engine died."""

    ids: Ids = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: tuple[VersionSpan, ...] = ()

    def and_then(self, ids: Ids, logprobs: Floats, version: int) -> "Told":
        """With what one more engine sampled, all by the same weights."""
        span = VersionSpan(version=version, start=0, stop=len(ids))
        return Told(
            ids=np.concatenate([self.ids, ids]),
            logprobs=np.concatenate([self.logprobs, logprobs]),
            versions=self._joined((span,)),
        )

    def complete(self, sampling: Sampling, stop_ids: tuple[int, ...]) -> bool:
        """Whether nothing is left to sample, only what comes with the end was lost."""
        return len(self.ids) >= sampling.max_tokens or (len(self.ids) > 0 and int(self.ids[-1]) in stop_ids)

    def prompt(self, prompt_ids: Ids) -> Ids:
        """What the next engine is to go on from."""
        return np.concatenate([prompt_ids, self.ids]) if len(self.ids) else prompt_ids

    def rest(self, sampling: Sampling) -> Sampling:
        """How the next engine samples: fewer tokens, and with a seed another one, not the same numbers again."""
        seed = None if sampling.seed is None else sampling.seed + len(self.ids)
        return replace(sampling, max_tokens=sampling.max_tokens - len(self.ids), seed=seed)

    def joined(self, rest: Generation) -> Generation:
        """The whole answer."""
        if not len(self.ids):
            return rest
        return replace(
            rest,
            prompt_len=rest.prompt_len - len(self.ids),
            output_ids=np.concatenate([self.ids, rest.output_ids]),
            logprobs=np.concatenate([self.logprobs, rest.logprobs]),
            versions=self._joined(rest.versions),
        )

    def _joined(self, spans: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
        """Neighbours of one version become one span."""
        told, out = len(self.ids), list(self.versions)
        for span in spans:
            moved = replace(span, start=span.start + told, stop=span.stop + told)
            if out and out[-1].version == moved.version and out[-1].stop == moved.start:
                moved = replace(moved, start=out.pop().start)
            if moved.stop > moved.start:
                out.append(moved)
        return tuple(out)
