"""Rewards become advantages once a trial, whatever its number of segments; docs/credit.md has the table of weights."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lego.learn.advantages import advantages
from lego.learn.algorithms import GSPO
from lego.learn.losses import Tokens, Totals, shares
from lego.records import CallKind, Segment
from lego.rollout.credit import Rules, credit, length, trainable, weights
from tests.factories import segment, trajectory

RULES = Rules(advantages=advantages)
KINDS = {"m": CallKind.MAIN, "s": CallKind.SUBAGENT, "c": CallKind.SUMMARY}


def laid(text: str) -> tuple[Segment, ...]:
    """Segments by kind and trainable tokens: `m2 s6` is one of the main agent with 2, and one of a sub-agent with 6."""
    sizes = [(KINDS[word[0]], int(word[1:])) for word in text.split()]
    return tuple(replace(segment(8, mask=np.arange(8) >= 8 - n), kind=kind) for kind, n in sizes)


EVENLY, BY_TOKENS = "segments", "tokens"
EXAMPLES = {
    # each segment of a session alike ("per segment" in the field: a mean over segments of means over their tokens)
    "one segment": ("m4", EVENLY, None, [1]),
    "A03: three segments": ("m2 m2 m2", EVENLY, None, [1 / 3, 1 / 3, 1 / 3]),
    "long and short": ("m6 m2", EVENLY, None, [1 / 2, 1 / 2]),
    "sub-agents like any other": ("m6 s2", EVENLY, None, [1 / 2, 1 / 2]),
    "nothing trainable in the second": ("m6 m0", EVENLY, None, [1, 0]),
    # each token of a session alike ("per session mean" in the field)
    "by tokens": ("m6 m2", BY_TOKENS, None, [3 / 4, 1 / 4]),
    "by tokens, sub-agents too": ("m2 s6", BY_TOKENS, None, [1 / 4, 3 / 4]),
    "by tokens, split in more segments": ("m2 m2 m2 m2", BY_TOKENS, None, [1 / 4] * 4),
    # main only
    "main only": ("m6 s2 m2", EVENLY, 0, [1 / 2, 0, 1 / 2]),
    "main only by tokens": ("m6 s2 m2", BY_TOKENS, 0, [3 / 4, 0, 1 / 4]),
    "main only, its summary with it": ("m6 c2 s4", EVENLY, 0, [1 / 2, 1 / 2, 0]),
    "main only without a main segment": ("s6 s2", EVENLY, 0, [0, 0]),
    "main only, nothing trainable in it": ("m0 s2", EVENLY, 0, [0, 0]),
    # a share for the sub-agents
    "a share for two sub-agents": ("m2 s2 s6", EVENLY, 0.4, [0.6, 0.2, 0.2]),
    "a share for two sub-agents by tokens": ("m2 s2 s6", BY_TOKENS, 0.4, [0.6, 0.1, 0.3]),
    "a share, main in two": ("m6 s2 m2", EVENLY, 0.5, [0.25, 0.5, 0.25]),
    "a share, no sub-agent": ("m6 m2", EVENLY, 0.4, [1 / 2, 1 / 2]),
    "a share, no trainable sub-agent": ("m6 s0", EVENLY, 0.4, [1, 0]),
    "a share, no main": ("s6 s2", BY_TOKENS, 0.4, [3 / 4, 1 / 4]),
    "nothing at all": ("m0 s0", EVENLY, 0.4, [0, 0]),
    "no segment": ("", EVENLY, 0.4, []),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_examples_of_weights(name: str):
    text, spread, share, wanted = EXAMPLES[name]
    assert weights(laid(text), replace(RULES, spread=spread, subagent_share=share)) == pytest.approx(wanted)


@given(
    st.lists(st.tuples(st.sampled_from("msc"), st.integers(0, 8)), max_size=6),
    st.sampled_from([EVENLY, BY_TOKENS]),
    st.none() | st.floats(0, 0.99),
)
def test_weights_of_a_session_sum_to_1_unless_nothing_may_train(words, spread, share):
    segments = laid(" ".join(f"{kind}{n}" for kind, n in words))
    got = weights(segments, replace(RULES, spread=spread, subagent_share=share))
    may_train = any(n for kind, n in words if kind != "s" or share != 0)
    assert sum(got) == pytest.approx(1.0 if may_train else 0.0)
    assert all(w == 0 for w, s in zip(got, segments, strict=True) if not trainable(s))


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_that_leaves_main_nothing_is_refused(share: float):
    with pytest.raises(ValueError, match=r"subagent_share: .*, wanted at least 0 and less than 1"):
        replace(RULES, subagent_share=share)


@pytest.mark.parametrize("spread", [EVENLY, BY_TOKENS])
@pytest.mark.parametrize(("scale", "wanted"), [("none", 0.5), ("group", 0.5**0.5)])
def test_the_baseline_is_over_trials_and_not_over_segments(spread, scale, wanted):
    three = [trajectory("a", 1.0, segments=3), trajectory("a", 0.0, segments=1)]
    rules = replace(RULES, advantages=partial(advantages, scale=scale), spread=spread)
    assert [s.advantage for s in credit([three], rules).samples] == pytest.approx([wanted] * 3 + [-wanted])


GROUPS = {
    # rewards of a group; its advantages with the group's spread
    "mixed": ([1.0, 0.0, 0.0, 0.0], [1.5, -0.5, -0.5, -0.5]),
    "two": ([1.0, 0.0], [0.5**0.5, -(0.5**0.5)]),
    "all solved, kept by the algorithm": ([1.0, 1.0], [0.0, 0.0]),
    "nothing kept": ([], []),
}


@pytest.mark.parametrize("name", GROUPS)
def test_worked_examples_of_advantages(name: str):
    rewards, wanted = GROUPS[name]
    got = credit([[trajectory("a", r) for r in rewards]], replace(RULES, advantages=partial(advantages, scale="group")))
    assert [s.advantage for s in got.samples] == pytest.approx(wanted)


@pytest.mark.parametrize(("spread", "wanted"), [(BY_TOKENS, [1 / 16] * 8), (EVENLY, [1 / 24] * 6 + [1 / 8] * 2)])
def test_by_tokens_each_token_of_a_trial_counts_alike_in_a_mean_over_trials(spread, wanted):
    two, one = trajectory("a", 1.0, own=laid("m6 m2")), trajectory("a", 0.0, own=laid("m8"))
    samples = credit([[two, one]], replace(RULES, spread=spread)).samples
    segment_T = torch.tensor([i for i, s in enumerate(samples) for _ in range(8)])
    mask_T = torch.tensor(np.concatenate([s.segment.mask_T for s in samples]))
    zeros_T, weight_S = torch.zeros(len(mask_T)), torch.tensor([s.weight for s in samples])
    tokens = Tokens(
        logprobs_T=zeros_T,
        sampled_T=zeros_T,
        advantage_T=zeros_T,
        mask_T=mask_T,
        segment_T=segment_T,
        weight_S=weight_S,
    )
    got = shares(GSPO(), tokens, Totals(tokens=float(mask_T.sum()), weight=float(weight_S.sum())))
    assert got[mask_T].tolist() == pytest.approx([*wanted, *[1 / 16] * 8])


def test_segments_of_weight_0_give_no_sample_and_count_nowhere():
    ends = [
        trajectory("a", 1.0, own=laid("m2 s6")),
        trajectory("a", 0.0, own=laid("s3")),
        trajectory("a", 0.0, own=laid("m4")),
    ]
    got = credit([ends], replace(RULES, subagent_share=0))
    assert [(trainable(s.segment), s.weight, s.advantage) for s in got.samples] == [
        (2, 1.0, pytest.approx(2 / 3)),
        (4, 1.0, pytest.approx(-1 / 3)),
    ], "the trial without a sample stays in the baseline: its reward is the policy's own"
    assert (got.empty, got.tokens, got.unused_tokens) == (1, 6, 9)
    assert sum(length(t) for t in ends) == got.tokens + got.unused_tokens


def test_two_groups_of_one_task_are_compared_each_within_itself():
    first, second = ([trajectory("a", r) for r in rewards] for rewards in ((1.0, 1.0, 0.0), (0.0, 0.0, 1.0)))
    got = credit([first, [], second], RULES)
    assert [s.advantage for s in got.samples] == pytest.approx([1 / 3, 1 / 3, -2 / 3, -1 / 3, -1 / 3, 2 / 3])


def test_a_trial_with_three_segments_weighs_as_much_as_one_with_one():
    got = credit([[trajectory("a", 1.0, segments=3), trajectory("a", 0.0, segments=1)]], RULES)
    assert [(s.advantage, pytest.approx(s.weight)) for s in got.samples] == [(0.5, 1 / 3)] * 3 + [(-0.5, 1.0)]


def test_a_segment_without_a_trainable_token_takes_no_weight():
    masked = segment(mask=np.zeros(4, bool))
    got = credit([[trajectory("a", 1.0, own=(segment(), masked)), trajectory("a", 0.0)]], RULES)
    assert [s.weight for s in got.samples] == [1.0, 1.0]


def test_a_lone_trial_is_a_group_for_algorithms_with_a_critic():
    rules = Rules(advantages=partial(advantages, baseline="none"), least_group=1, drop_flat_groups=False)
    got = credit([[trajectory("a", 1.0)], [trajectory("b", 0.0)]], rules)
    assert [(s.advantage, s.reward) for s in got.samples] == [(1.0, 1.0), (0.0, 0.0)]
    assert got.samples[0].trial == "a/0"


def test_rewards_are_shaped_by_the_tokens_that_the_trial_sampled():
    long, short = trajectory("a", 1.0, segments=3), trajectory("a", 1.0)
    got = credit([[long, short]], replace(RULES, shaped=lambda reward, length: reward - length))
    assert sorted({s.reward for s in got.samples}) == [1.0 - length(long), 1.0 - length(short)]
