"""Samples made up from seeds, for trainer tests."""

import numpy as np

from lego.records import Sample, Segment


def segment(rng, length, *, vocab=512, sampled=None, logprobs=None, routing=None, routed=None) -> Segment:
    """`sampled` is the mask (default: the last third); if `routing` is given, all but the last token are `routed`."""
    mask = np.arange(length) >= length - length // 3 if sampled is None else np.asarray(sampled, bool)
    if routed is None:
        routed = (np.arange(length) < length - 1) & (routing is not None)
    lps = np.full(length, -6.0) if logprobs is None else np.asarray(logprobs)
    return Segment(
        ids_T=rng.integers(0, vocab, length).astype(np.int32),
        mask_T=mask,
        logprobs_T=np.where(mask, lps, 0).astype(np.float32),
        versions_T=np.where(mask, 0, -1).astype(np.int32),
        routing_TLK=routing,
        routed_T=routed,
    )


def routes(rng, length, layers=3, experts=8, top_k=2):
    """Distinct random experts for each token and layer."""
    return np.argsort(rng.random((length, layers, experts)), -1)[..., :top_k].astype(np.uint8)


def sample(rng, length, **kwargs) -> Sample:
    """A sample with random routes and a random advantage."""
    made = segment(rng, length, routing=routes(rng, length), **kwargs)
    return Sample(segment=made, advantage=float(rng.standard_normal()), weight=1.0)
