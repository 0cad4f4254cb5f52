import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lego.learn import packing
from lego.learn.costs import Cost, Costs
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
                segment=segment(
                    rng, length, sampled=mask, logprobs=logprobs, routing=routing, routed=rng.random(length) < 0.9
                ),
                advantage=float(rng.standard_normal()),
                weight=float(rng.random()),
            )
        )
    return made, draw(st.integers(1, 3)), draw(st.integers(60, 150))


def rows_of(source):
    """What a segment's tokens have in a batch with routing."""
    if source.routing_TLK is None:
        return np.full((len(source.ids_T), 3, 2), packing.UNRECORDED)
    return np.where(source.routed_T[:, None, None], source.routing_TLK.astype(int), packing.UNRECORDED)


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
        if has_routing:
            assert np.array_equal(routing, rows_of(source)[: at[-1]])


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


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 40), st.sampled_from([1, 4]))
def test_splitting_trains_every_sampled_token_once_within_the_budget(given_batch, budget, multiple_of):
    samples, ranks, _ = given_batch
    samples = [replace(s, reward=float(i), trial=f"t/{i}") for i, s in enumerate(samples)]
    budget *= multiple_of
    sampled = {(i, int(t)) for i, s in enumerate(samples) for t in np.flatnonzero(s.segment.mask_T)}
    if not sampled:
        return
    batch = packing.pack(
        samples, ranks=ranks, token_budget=budget, over_budget="split", multiple_of=multiple_of, temperature=0.5
    )
    assert len({len(row) for row in batch.ranks}) == 1
    seen, weight, cut = [], np.zeros(len(samples)), 0
    for part in (p for row in batch.ranks for p in row):
        assert len(part.ids_T) <= budget and len(part.ids_T) % multiple_of == 0
        assert part.tokens == sum(part.length_S) and sum(part.documents) == len(part.ids_T)
        assert (part.positions_T == np.concatenate([np.arange(n) for n in part.documents])).all()
        assert (part.routing_TLK[part.tokens :] == packing.PADDING).all()
        starts = np.cumsum([0, *part.length_S])
        for row, label, logprob, token, s in zip(
            part.rows_R, part.labels_R, part.sampled_R, part.token_R, part.segment_R, strict=True
        ):
            index = part.sample_S[s]
            source, at = samples[index].segment, part.rows_R[part.segment_R == s]
            seen.append((int(index), int(token)))
            assert label == source.ids_T[token] and logprob == source.logprobs_T[token]
            assert starts[s] <= row < starts[s + 1] and part.reward_S[s] == index
            context = int(row - starts[s]) + 1
            fed = token - context, token
            assert np.array_equal(part.ids_T[row - context + 1 : row + 1], source.ids_T[slice(*fed)])
            if part.routing_TLK.shape[-1]:
                assert np.array_equal(part.routing_TLK[row - context + 1 : row + 1], rows_of(source)[slice(*fed)])
            assert context == token or context > budget // 2
            assert context == token or starts[s + 1] - starts[s] == budget
            cut += context != token
            weight[index] += part.weight_S[s] / len(at)
    assert sorted(seen) == sorted(sampled) and batch.trained == len(sampled)
    assert cut == batch.split_tokens
    assert weight == pytest.approx([s.weight * s.segment.mask_T.any() for s in samples])
    assert [d.sample for d in batch.dropped] == [i for i, s in enumerate(samples) if not s.segment.mask_T.any()]


def test_a_split_sample_gives_each_of_its_tokens_what_it_had_whole():
    """Budget 10, sampled tokens 8 to 10 and 20 to 27: the second run is longer than half a budget."""
    mask = np.isin(np.arange(30), [8, 9, 10, *range(20, 28)])
    made = segment(np.random.default_rng(0), 30, sampled=mask)
    samples = [Sample(segment=made, advantage=1.0, weight=0.5, trial="calc/3")]
    batch = packing.pack(samples, ranks=1, token_budget=10, over_budget="split")
    by_length = {tuple(p.token_R.tolist()): (p.tokens, p.rows_R.tolist(), p.weight_S[0]) for p in batch.ranks[0]}
    assert by_length == {
        (8, 9, 10): (10, [7, 8, 9], pytest.approx(0.5 * 3 / 11)),
        (20, 21, 22, 23, 24): (10, [5, 6, 7, 8, 9], pytest.approx(0.5 * 5 / 11)),
        (25, 26, 27): (10, [7, 8, 9], pytest.approx(0.5 * 3 / 11)),
    }
    assert (batch.trained, batch.split_tokens, batch.segments, batch.dropped) == (11, 8, 3, ())


def test_a_sample_over_the_budget_can_be_dropped_and_is_told_with_its_trial():
    made = [replace(sample(np.random.default_rng(0), n), trial=f"calc/{n}") for n in (20, 100)]
    batch = packing.pack(made, ranks=1, token_budget=64, over_budget="drop")
    want = packing.Dropped(sample=1, trial="calc/100", reason="more tokens than token_budget=64", tokens=99)
    assert batch.dropped == (want,)
    assert (batch.fed, batch.trained, batch.weight) == (19, 6, 1.0)
    with pytest.raises(ValueError, match="nothing to train on in 1 samples: 1 with more tokens than token_budget=64"):
        packing.pack(made[1:], ranks=1, token_budget=64, over_budget="drop")


def test_a_sample_longer_than_the_budget_is_named_with_its_length():
    made = [sample(np.random.default_rng(0), n) for n in (20, 100)]
    with pytest.raises(ValueError, match="sample 1 feeds 99 tokens, more than token_budget=64"):
        packing.pack(made, ranks=1, token_budget=64)
    with pytest.raises(ValueError, match=r"sample 0 \(calc/3\) feeds 99 tokens"):
        packing.pack([replace(made[1], trial="calc/3")], ranks=1, token_budget=64)


def test_a_window_is_cut_from_all_fields_alike():
    rng = np.random.default_rng(0)
    made = segment(rng, 9, routing=routes(rng, 9))
    window = made.window(2, 7)
    assert window.kind is made.kind
    for name, value in vars(made).items():
        assert name == "kind" or np.array_equal(getattr(window, name), value[2:7])
    for start, stop in ((-1, 3), (3, 3), (0, 10)):
        with pytest.raises(ValueError, match=rf"window \[{start}, {stop}\) of 9"):
            made.window(start, stop)


def test_a_budget_that_padding_would_exceed_is_refused():
    with pytest.raises(ValueError, match="token_budget=66 is no multiple of 4"):
        packing.pack([sample(np.random.default_rng(0), 9)], ranks=1, token_budget=66, multiple_of=4)


@pytest.mark.parametrize(("samples", "ranks", "rounds"), [(1, 2, [1, 0]), (3, 2, [2, 1]), (4, 3, [2, 1, 1])])
def test_ranks_short_of_work_run_empty_micro_batches(samples, ranks, rounds):
    made = [sample(np.random.default_rng(0), 65) for _ in range(samples)]
    batch = packing.pack(made, ranks=ranks, token_budget=64, multiple_of=4)
    assert sorted((sum(not p.empty for p in row) for row in batch.ranks), reverse=True) == rounds
    assert {len(row) for row in batch.ranks} == {max(rounds)}
    for part in (p for row in batch.ranks for p in row if p.empty):
        assert (part.tokens, part.documents, len(part.rows_R)) == (0, [4], 0)
        assert (part.routing_TLK == packing.PADDING).all()
    assert batch.fed == 64 * samples


def rank_seconds(batch, cost):
    return [sum(cost.seconds(p.documents) for p in row) for row in batch.ranks]


def test_one_long_sample_among_short_ones_is_balanced_by_what_it_costs():
    """Of 8,000 and 40 x 500 tokens, equal tokens give one rank half as much again to do."""
    rng = np.random.default_rng(0)
    made = [sample(rng, n + 1) for n in (8000, *[500] * 40)]
    cost = Cost(linear=1.0, quadratic=1 / 8000)
    by_tokens, by_cost = (
        rank_seconds(packing.pack(made, ranks=2, token_budget=32768, cost=c), cost) for c in (None, cost)
    )
    assert max(by_tokens) / min(by_tokens) > 1.4
    assert max(by_cost) / min(by_cost) < 1.03


def test_ranks_get_equal_work():
    rng = np.random.default_rng(0)
    batch = packing.pack([sample(rng, int(n)) for n in rng.integers(50, 300, 40)], ranks=2, token_budget=600)
    loads = rank_seconds(batch, Cost())
    assert abs(loads[0] - loads[1]) < 0.1 * sum(loads)


def test_the_budget_holds_where_cost_and_tokens_disagree():
    """The cheapest micro-batch may have no room."""
    rng = np.random.default_rng(0)
    made = [sample(rng, n + 1) for n in (100, *[10] * 30)]
    batch = packing.pack(made, ranks=2, token_budget=210, cost=Cost(linear=1e-3, quadratic=1.0))
    assert [len(row) for row in batch.ranks] == [1, 1]
    assert sorted(p.tokens for row in batch.ranks for p in row) == [190, 210]


@pytest.mark.parametrize("want", [(2e-5, 3e-9), (2e-5, 0.0), (0.0, 3e-9)])
def test_a_cost_is_found_from_measured_seconds(want):
    rng = np.random.default_rng(0)
    lengths = [rng.integers(100, 9000, rng.integers(1, 9)).tolist() for _ in range(20)]
    true = Cost(linear=want[0], quadratic=want[1])
    found = Cost.fit([(n, true.seconds(n)) for n in lengths])
    assert (found.linear, found.quadratic) == pytest.approx(want, rel=1e-6, abs=1e-13)


def test_no_part_of_a_cost_is_negative():
    """Seconds that grow slower than tokens would want a negative square."""
    found = Cost.fit([([n], n**0.5) for n in (100, 400, 900, 1600)])
    assert found.quadratic == 0 and found.linear > 0
    growing = Cost.fit([([n], n**3.0) for n in (100, 400, 900, 1600)])
    assert growing.linear == 0 and growing.quadratic > 0
    with pytest.raises(ValueError, match="0 observations"):
        Cost.fit([])


def test_r08_samples_in_micro_batches_of_three_and_two_keep_their_own_rows():
    """Routes tell the sample: sample i went to experts i and i + 1."""
    rng = np.random.default_rng(0)
    mine = [np.tile(np.array([i, i + 1], np.uint8), (n, 3, 1)) for i, n in enumerate((30, 21, 21, 19, 31))]
    made = [
        Sample(segment=segment(rng, len(rows), routing=rows), advantage=float(i), weight=1.0)
        for i, rows in enumerate(mine)
    ]
    (parts,) = packing.pack(made, ranks=1, token_budget=68).ranks
    assert sorted(len(p.sample_S) for p in parts) == [2, 3]
    for part in parts:
        at = np.repeat(part.sample_S, part.length_S)
        assert (part.routing_TLK == np.stack([at, at + 1], -1)[:, None]).all()
    assert sorted(i for p in parts for i in p.sample_S) == list(range(5))


def test_a09_a_sample_masked_as_truncated_is_in_no_count_loss_or_length():
    rng = np.random.default_rng(0)
    whole = sample(rng, 30)
    gone = replace(whole, segment=replace(whole.segment, mask_T=np.zeros(30, bool)), trial="calc/1")
    batch = packing.pack([gone, whole], ranks=1, token_budget=64)
    alone = packing.pack([whole], ranks=1, token_budget=64)
    for name in ("fed", "trained", "weight", "segments"):
        assert getattr(batch, name) == getattr(alone, name)
    assert np.array_equal(batch.ranks[0][0].labels_R, alone.ranks[0][0].labels_R)
    assert batch.dropped == (packing.Dropped(sample=0, trial="calc/1", reason="no sampled token", tokens=0),)


def test_r10_routes_of_a_long_rollout_are_copied_once_and_let_go(tmp_path):
    """100,000 tokens of 12 layers x 8 experts: 9.6 MB as recorded, 19.2 MB packed, twice that while written."""
    rng = np.random.default_rng(0)
    rows = np.broadcast_to(np.arange(8, dtype=np.uint8), (100_001, 12, 8))
    made = Sample(segment=segment(rng, len(rows), routing=rows), advantage=1.0, weight=1.0)
    tracemalloc.start()
    try:
        batch = packing.pack([made], ranks=1, token_budget=100_000)
        packed = tracemalloc.get_traced_memory()[1]
        packing.write(batch, tmp_path / "b")
        written = tracemalloc.get_traced_memory()[1]
        del batch
        left = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    payload = 100_000 * 12 * 8 * 2
    assert packed < 1.4 * payload and written < 2.6 * payload and left < 0.01 * payload


def test_a_sampled_first_token_is_refused():
    made = segment(np.random.default_rng(0), 4, sampled=[1, 0, 0, 1])
    with pytest.raises(ValueError, match="first token"):
        packing.pack([Sample(segment=made, advantage=1.0, weight=1.0)], ranks=1, token_budget=64)


def test_r01_the_last_sampled_token_needs_no_row():
    """Prompt 5, output 3: seven rows recorded, seven tokens fed, every row there."""
    rng = np.random.default_rng(0)
    made = segment(rng, 8, sampled=[0, 0, 0, 0, 0, 1, 1, 1], routing=routes(rng, 8))
    part = packing.pack([Sample(segment=made, advantage=1.0, weight=1.0)], ranks=1, token_budget=64).ranks[0][0]
    assert part.tokens == 7 and part.rows_R.tolist() == [4, 5, 6]
    assert (part.routing_TLK >= 0).all()


def test_2000_segments_of_over_half_a_budget_are_packed_in_a_moment():
    """Each has a micro-batch to itself; to try one micro-batch more at a time took 20 s."""
    rng = np.random.default_rng(0)
    made = [sample(rng, 52 + i % 10) for i in range(2000)]
    start = time.monotonic()
    batch = packing.pack(made, ranks=1, token_budget=100)
    assert len(batch.ranks[0]) == 2000 and time.monotonic() - start < 5


@pytest.mark.parametrize("logprob", [np.nan, -np.inf])
def test_a_sampled_logprob_that_is_no_number_is_refused_by_trial_and_token(logprob):
    rng = np.random.default_rng(0)
    given = sample(rng, 12)
    odd = replace(given.segment, logprobs_T=np.where(np.arange(12) == 9, logprob, given.segment.logprobs_T))
    made = [sample(rng, 12), replace(given, segment=odd, trial="fix/2")]
    with pytest.raises(ValueError, match=rf"sample 1 \(fix/2\): token 9 was sampled with log-probability {logprob}"):
        packing.pack(made, ranks=1, token_budget=100)


@pytest.mark.parametrize(
    ("dtype", "expert", "told"),
    [
        (np.int16, packing.PADDING, r"its experts are -2 to \d+, want 0 to 32767"),
        (np.uint16, 65534, r"its experts are 0 to 65534, want 0 to 32767"),
        (np.int32, 65539, r"its experts are 0 to 65539, want 0 to 32767"),
        (np.float32, 1.5, r"its experts are of type float32, want whole numbers"),
    ],
)
def test_recorded_experts_that_would_turn_into_others_or_into_none_are_refused(dtype, expert, told):
    rng = np.random.default_rng(0)
    given = sample(rng, 12)
    routing = given.segment.routing_TLK.astype(dtype)
    routing[3, 1] = expert
    with pytest.raises(ValueError, match=f"sample 0: {told}"):
        packing.pack([replace(given, segment=replace(given.segment, routing_TLK=routing))], ranks=1, token_budget=100)
    # What was not recorded may be anything.
    routed = given.segment.routed_T & (np.arange(12) != 3)
    if dtype != np.float32:
        made = replace(given, segment=replace(given.segment, routing_TLK=routing, routed_T=routed))
        rows = packing.pack([made], ranks=1, token_budget=100).ranks[0][0].routing_TLK
        assert (rows[3] == packing.UNRECORDED).all() and (rows[2] >= 0).all()


def test_costs_are_learned_from_the_dearest_micro_batch_of_each_round_after_the_first_step():
    true, costs = Cost(linear=1e-3, quadratic=1e-6), Costs()
    rounds = [[[100] * 8, [400]], [[50], [800, 10]], [[300], [200]]]
    costs.learn(rounds, [9.0, 9.0, 9.0])
    assert costs.cost is None
    for _ in range(3):
        costs.learn(rounds, [max(true.seconds(documents) for documents in parts) for parts in rounds])
    assert costs.cost.linear == pytest.approx(1e-3, rel=0.1) and costs.cost.quadratic == pytest.approx(1e-6, rel=0.2)
