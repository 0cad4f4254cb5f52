import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lego.learn import packing
from lego.records import Sample
from tests.learn.samples import routes, sample, segment


@st.composite
def batches(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    lengths = draw(st.lists(st.integers(2, 60), min_size=1, max_size=20))
    made = []
    for length in lengths:
        mask = rng.random(length) < 0.4
        mask[0] = False
        logprobs = -rng.random(length)
        routing = routes(rng, length) if rng.random() < 0.7 else None
        made.append(
            Sample(
                segment=segment(rng, length, sampled=mask, logprobs=logprobs, routing=routing),
                advantage=float(rng.standard_normal()),
                weight=float(rng.random()),
            )
        )
    return made, draw(st.integers(1, 3)), draw(st.integers(60, 150))


def unpacked(batch):
    """Per packed segment: (advantage, fed ids, routing, labels, sampled logprobs), from all ranks."""
    out = []
    for part in (p for row in batch.ranks for p in row if not p.empty):
        starts = [*np.flatnonzero(part.positions_T == 0), len(part.ids_T)]
        for s in range(len(part.advantage_S)):
            a, b = starts[s], starts[s + 1]
            at = part.segment_R == s
            assert (part.positions_T[a:b] == np.arange(b - a)).all()
            assert ((part.rows_R[at] >= a) & (part.rows_R[at] < b)).all()
            rows = part.rows_R[at] - a
            out.append(
                (
                    part.advantage_S[s],
                    part.ids_T[a:b],
                    part.routing_TLK[a:b],
                    rows,
                    part.labels_R[at],
                    part.sampled_R[at],
                )
            )
    return sorted(out, key=lambda x: x[0])


@settings(max_examples=60, deadline=None)
@given(batches())
def test_every_sampled_token_is_packed_once_with_its_own_row_and_numbers(given_batch):
    samples, ranks, budget = given_batch
    kept = [s for s in samples if s.segment.mask_T.any()]
    if not kept:
        with pytest.raises(ValueError, match="nothing to train on"):
            packing.pack(samples, ranks=ranks, token_budget=budget)
        return
    batch = packing.pack(samples, ranks=ranks, token_budget=budget)
    assert len({len(row) for row in batch.ranks}) == 1
    assert all(len(p.ids_T) <= budget for row in batch.ranks for p in row)
    assert batch.trained == sum(int(s.segment.mask_T.sum()) for s in kept)
    assert batch.weight == pytest.approx(sum(s.weight for s in kept))
    packed = unpacked(batch)
    assert len(packed) == len(kept)
    has_routing = any(s.segment.routing_TLK is not None for s in kept)
    for want, (_, ids, routing, rows, labels, sampled) in zip(
        sorted(kept, key=lambda s: np.float32(s.advantage)), packed, strict=True
    ):
        source = want.segment
        at = np.flatnonzero(source.mask_T)
        assert (rows == at - 1).all() and (labels == source.ids_T[at]).all()
        assert np.array_equal(sampled, source.logprobs_T[at])
        assert np.array_equal(ids, source.ids_T[: at[-1]])
        if source.routing_TLK is not None:
            assert np.array_equal(routing, source.routing_TLK[: at[-1]])
        elif has_routing:
            assert (routing == packing.UNRECORDED).all()


@settings(max_examples=30, deadline=None)
@given(batches())
def test_a_batch_file_gives_each_rank_what_was_packed(tmp_path_factory, given_batch):
    samples, ranks, budget = given_batch
    if not any(s.segment.mask_T.any() for s in samples):
        return
    path = tmp_path_factory.mktemp("batch") / "b.safetensors"
    batch = packing.pack(samples, ranks=ranks, token_budget=budget)
    packing.write(batch, path)
    for rank in range(ranks):
        got = packing.read(path, rank)
        assert (got.trained, got.weight) == (batch.trained, batch.weight)
        for want, part in zip(batch.ranks[rank], got.parts, strict=True):
            for name, array in vars(want).items():
                assert np.array_equal(array, getattr(part, name)) and array.dtype == getattr(part, name).dtype


def test_ranks_get_equal_work():
    rng = np.random.default_rng(0)
    batch = packing.pack([sample(rng, int(n)) for n in rng.integers(50, 300, 40)], ranks=2, token_budget=600)
    loads = [sum(p.tokens for p in row) for row in batch.ranks]
    assert abs(loads[0] - loads[1]) < 0.1 * sum(loads)


def test_a_rank_without_work_gets_an_empty_micro_batch():
    batch = packing.pack([sample(np.random.default_rng(0), 20)], ranks=2, token_budget=64)
    assert [row[0].empty for row in batch.ranks] == [False, True]
    assert batch.ranks[1][0].tokens == 0 and batch.fed == 19


def test_a_sample_longer_than_the_budget_is_named_with_its_length():
    with pytest.raises(ValueError, match="sample 1 feeds 99 tokens, more than token_budget=64"):
        packing.pack([sample(np.random.default_rng(0), n) for n in (20, 100)], ranks=1, token_budget=64)


def test_a_sampled_first_token_is_refused():
    made = segment(np.random.default_rng(0), 4, sampled=[1, 0, 0, 1])
    with pytest.raises(ValueError, match="first token"):
        packing.pack([Sample(segment=made, advantage=1.0, weight=1.0)], ranks=1, token_budget=64)


def test_three_fed_tokens_need_no_row_of_the_last_sampled_token():
    """Prompt 5, output 3: seven rows recorded, seven tokens fed, every row there."""
    rng = np.random.default_rng(0)
    made = segment(rng, 8, sampled=[0, 0, 0, 0, 0, 1, 1, 1], routing=routes(rng, 8))
    part = packing.pack([Sample(segment=made, advantage=1.0, weight=1.0)], ranks=1, token_budget=64).ranks[0][0]
    assert part.tokens == 7 and part.rows_R.tolist() == [4, 5, 6]
    assert (part.routing_TLK >= 0).all()
