"""Small records for tests."""

import numpy as np

from lego.records import SCORED, Fidelity, Outcome, Segment, Trajectory


def segment(length: int = 4, mask: np.ndarray | None = None, layers: int = 2, seed: int = 0) -> Segment:
    """A segment whose second half is sampled, with valid random routing rows of 2 of 8 experts."""
    rng = np.random.default_rng(seed)
    mask = np.arange(length) >= length // 2 if mask is None else mask
    rows = np.stack([rng.permutation(8)[:2] for _ in range(length * layers)]).reshape(length, layers, 2)
    return Segment(
        ids_T=rng.integers(0, 100, length).astype(np.int32),
        mask_T=mask,
        logprobs_T=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions_T=np.where(mask, 0, -1).astype(np.int32),
        routing_TLK=rows.astype(np.uint8),
        routed_T=np.arange(length) < length - 1,
    )


def trajectory(
    task: str,
    reward: float | None,
    *,
    segments: int = 1,
    own: tuple[Segment, ...] | None = None,
    outcome: Outcome | None = None,
    excluded: int = 0,
) -> Trajectory:
    """A finished trial of `task`; its outcome follows from the reward unless given."""
    own = tuple(segment(seed=i) for i in range(segments)) if own is None else own
    outcome = outcome or (Outcome.SOLVED if reward else Outcome.FAILED)
    trained = sum(int(s.mask_T.sum()) for s in own)
    assert (reward is not None) == (outcome in SCORED)
    return Trajectory(
        task=task,
        attempt=0,
        split="train",
        version=0,
        outcome=outcome,
        reward=reward,
        segments=own,
        fidelity=Fidelity(
            sampled=trained + excluded,
            trained=trained,
            excluded={"test": excluded} if excluded else {},
            turns=1,
        ),
    )
