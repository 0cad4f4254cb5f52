"""Any layout gives the numbers of one process: models from HF folders, very uneven recorded routes, sizes that no
number of ranks divides. See `layouts.py` for what the ranks do."""

from dataclasses import dataclass, field

import pytest
import torch
from safetensors.torch import load_file, save_file

from lego.learn.layout import Layout, ModelSizes, layout_problems, model_sizes
from tests.learn import layouts
from tests.learn.layouts import CLIP, LR, SPLITS, Case
from tests.tiny import write_family

WIDE = {"hidden_size": 32, "head_dim": 16}
EXPERTS = {"num_experts": 6, "moe_intermediate_size": 8}
# Wide heads: near a zero of a norm's input a narrow delta rule makes 1e-4 of a rounding error.
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 12, "shared_expert_intermediate_size": 12}
FAMILIES = {
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", WIDE | EXPERTS | DELTA),
    "critic": ("qwen3_moe", EXPERTS),
    "three_experts": ("qwen3_moe", EXPERTS | {"num_experts": 3}),
}
"""Type and fields of each model; vocabularies of 67."""
LAYOUTS = {
    "one": Layout(),
    "fsdp2": Layout(world_size=2),
    "ep2": Layout(world_size=2, expert_parallel=2),
    "tp2": Layout(world_size=2, tensor_parallel=2),
    "tp2_ep2": Layout(world_size=2, tensor_parallel=2, expert_parallel=2),
    "fsdp4": Layout(world_size=4),
    "fsdp2_ep2": Layout(world_size=4, expert_parallel=2),
    "hsdp": Layout(world_size=4, replicate=2),
    "hsdp_ep2": Layout(world_size=4, replicate=2, expert_parallel=2),
    "fsdp2_tp2": Layout(world_size=4, tensor_parallel=2),
}
DENSE = ("one", "fsdp2", "hsdp")
MOE = ("one", "fsdp2", "ep2", "fsdp2_ep2", "hsdp", "hsdp_ep2")
TENSOR = ("tp2", "tp2_ep2", "fsdp2_tp2")


@dataclass(frozen=True)
class Run:
    """A layout of a family, with changes to the layout."""

    layout: str
    family: str
    changes: dict = field(default_factory=dict)

    def __str__(self):
        return "-".join([self.layout, self.family, *map(str, self.changes.values())])

    def spread(self):
        return Layout(**(vars(LAYOUTS[self.layout]) | {"max_length": 128} | self.changes))


def runs(layouts_, family, checkpointing):
    return [Run(layout, family, {"activation_checkpointing": c}) for layout in layouts_ for c in checkpointing]


EXACT = [
    *runs(DENSE, "qwen3", ("none", "selective", "full")),
    *runs(MOE, "qwen3_moe", ("none", "selective", "full")),
    *runs(MOE, "qwen3_5_moe", ("none", "selective", "full")),
    *runs(("tp2", "fsdp2_tp2"), "qwen3", ("none", "full")),
    *runs(TENSOR, "qwen3_moe", ("none", "full")),
    *runs(TENSOR, "qwen3_5_moe", ("none", "full")),
    *runs(("one", "fsdp2", "fsdp4"), "three_experts", ("none",)),
    *runs(("one", "hsdp_ep2", "tp2", "fsdp2_tp2"), "critic", ("none",)),
    Run("fsdp2", "qwen3_moe", {"cpu_offload": True}),
    Run("hsdp_ep2", "qwen3_moe", {"cpu_offload": True}),
]
HALF = [Run(layout, "qwen3_moe", {"dtype": "bfloat16"}) for layout in ("one", "fsdp2", "ep2", "tp2_ep2", "hsdp_ep2")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A function from a run to its numbers; all runs are made first, in one start for each number of ranks."""
    out = tmp_path_factory.mktemp("layouts")
    for name, (kind, fields) in FAMILIES.items():
        write_family(out / name, kind, **fields)
    weights = out / "critic" / "model.safetensors"
    save_file(load_file(weights) | {"score.weight": torch.linspace(-1, 1, 24)[None]}, weights)
    for ranks in (1, 2, 4):
        cases = [
            Case(name=str(run), folder=out / run.family, layout=run.spread(), critic=run.family == "critic")
            for run in (*EXACT, *HALF)
            if LAYOUTS[run.layout].world_size == ranks
        ]
        layouts.run(ranks, cases, out)
    return lambda run: load_file(out / f"{run}.safetensors")


def largest(tensor):
    return float(tensor.abs().max()) if tensor.numel() else 0.0


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("run", EXACT, ids=str)
def test_logprobs_gradients_and_norms_are_those_of_one_process(found, run, split):
    want = found(Run("one", run.family, {"activation_checkpointing": "none"}))
    got = {name.removeprefix(f"{split}/"): t for name, t in found(run).items() if name.startswith(f"{split}/")}
    want = {name.removeprefix("one/"): t for name, t in want.items() if name.startswith("one/")}
    assert got.keys() == want.keys()
    # Tensor parallelism sums each row in other parts; values are no log-probabilities but numbers up to ten.
    allowed = (2e-6 if run.layout not in TENSOR else 5e-6) * (1 if run.family != "critic" else 10)
    assert largest(got["logprobs"] - want["logprobs"]) <= allowed
    assert largest(got["loss"] - want["loss"]) <= 1e-6
    assert got["replayed"] == want["replayed"]
    # Some gradients, such as a delta rule's decay, are small sums of large terms: float32 of the whole is their limit.
    rounding = 1e-7 * float(want["grad_norm"])
    for name in ("grad_norm", "grad_norm_experts", *(n for n in want if n.startswith("grad."))):
        assert largest(got[name] - want[name]) <= 1e-5 * largest(want[name]) + rounding, name


@pytest.mark.parametrize("run", EXACT, ids=str)
def test_a11_a_norm_is_that_of_the_gathered_gradients_each_number_once(found, run):
    got = found(run)
    grads = {name: t.double() for name, t in got.items() if name.startswith("one/grad.")}
    for norm, part in (("one/grad_norm", ""), ("one/grad_norm_experts", "routed_experts")):
        want = sum(float(t.square().sum()) for name, t in grads.items() if part in name) ** 0.5
        assert float(got[norm]) == pytest.approx(want, rel=1e-5)
    assert (float(got["one/grad_norm_experts"]) > 0) is (run.family != "qwen3")


@pytest.mark.parametrize("run", EXACT, ids=str)
def test_updated_weights_are_those_of_one_process(found, run):
    want, got = found(Run("one", run.family, {"activation_checkpointing": "none"})), found(run)
    scale = min(1.0, CLIP / float(want["one/grad_norm"]))
    for name in (n for n in want if n.startswith("weight.")):
        grad = want[name.replace("weight.", "one/grad.", 1)] * scale
        # AdamW's first step is lr g / (|g| + 1e-8): what 1e-5 of the largest gradient makes of it, and two roundings.
        allowed = 3e-7 + LR * 1e-5 * largest(grad) / (grad.abs() + 1e-8)
        assert ((got[name] - want[name]).abs() <= allowed).all(), name


@pytest.mark.parametrize("run", (*EXACT, *HALF), ids=str)
def test_an_inf_in_one_ranks_gradient_is_seen_by_all(found, run):
    norms = found(run)["overflow"]
    assert len(norms) == LAYOUTS[run.layout].world_size
    assert not torch.isfinite(norms).any()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("run", HALF, ids=str)
def test_bfloat16_computes_the_same_in_all_layouts_with_float32_weights_and_gradients(found, run, split):
    exact, half, got = (found(r) for r in (Run("one", "qwen3_moe", {"activation_checkpointing": "none"}), HALF[0], run))
    assert {t.dtype for name, t in got.items() if "replayed" not in name} == {torch.float32}
    assert 1e-3 < largest(got[f"{split}/logprobs"] - exact["one/logprobs"]) < 0.1
    assert largest(got[f"{split}/logprobs"] - half["one/logprobs"]) < (1e-4 if run.layout not in TENSOR else 0.1)
    for name in (n for n in half if n.startswith("one/grad")):
        apart = largest(got[name.replace("one", split, 1)] - half[name])
        assert apart < (0.02 if run.layout not in TENSOR else 0.1) * largest(half[name]), name


def test_the_routes_of_these_tests_are_very_uneven():
    docs = layouts.documents(67, 3, 6, 2)
    loads = torch.cat([d["routes"] for d in docs]).flatten(0, 1).flatten().bincount(minlength=6)
    assert loads.max() > 10 * loads.min()


SIZES = ModelSizes(heads=8, kv_heads=4, hidden=24, experts=6, expert_hidden=8)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_that_work_have_no_problems(layout):
    assert layout_problems(layout, SIZES) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"world_size": 0}, "world_size: 0, wanted at least 1"),
        ({"world_size": 6, "tensor_parallel": 4}, "world_size: 6, wanted a multiple of replicate x tensor_parallel, 4"),
        ({"world_size": 4, "replicate": 3}, "world_size: 4, wanted a multiple of replicate x tensor_parallel, 3"),
        ({"world_size": 4, "expert_parallel": 3}, "expert_parallel: 3, wanted a divisor of world_size / replicate, 4"),
        (
            {"world_size": 4, "replicate": 2, "expert_parallel": 4},
            "expert_parallel: 4, wanted a divisor of world_size / replicate, 2",
        ),
        (
            {"world_size": 4, "expert_parallel": 4},
            "expert_parallel: 4, wanted a divisor of the model's 6 experts",
        ),
        (
            {"world_size": 8, "tensor_parallel": 8},
            "tensor_parallel: 8, wanted a divisor of the model's 4 kv_heads",
        ),
        (
            {"world_size": 7},
            "world_size: 7, wanted at most 6 ranks to share 6 experts, or parts of each, 7, that divide its 24 hidden",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_named_by_field(changes, says):
    assert says in layout_problems(Layout(**changes), SIZES)


def test_experts_of_a_dense_model_cannot_be_spread():
    sizes = ModelSizes(heads=8, kv_heads=4, hidden=24)
    assert layout_problems(Layout(world_size=2), sizes) == []
    assert layout_problems(Layout(world_size=2, expert_parallel=2), sizes) == [
        "expert_parallel: 2, wanted 1 for a model without experts"
    ]


def test_delta_rule_heads_are_split_too():
    config = {"text_config": {"num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 8}}
    config["text_config"] |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 256}
    sizes = model_sizes(config)
    assert (sizes.heads, sizes.kv_heads, sizes.experts) == (16, 4, 256)
    assert layout_problems(Layout(world_size=4, tensor_parallel=4), sizes) == [
        "tensor_parallel: 4, wanted a divisor of the model's 2 linear_key_heads"
    ]


def test_attention_with_a_bias_is_not_split():
    config = {"num_attention_heads": 4, "num_local_experts": 6, "intermediate_size": 8, "attention_bias": True}
    sizes = model_sizes(config)
    assert layout_problems(Layout(world_size=2, expert_parallel=2), sizes) == []
    assert layout_problems(Layout(world_size=2, tensor_parallel=2), sizes) == [
        "tensor_parallel: 2, wanted 1: attention_bias would learn from a wrong gradient"
    ]


def test_data_ranks_are_the_tensor_parallel_groups():
    layout = Layout(world_size=8, tensor_parallel=2, replicate=2)
    assert (layout.data_ranks, layout.shards) == (4, 2)
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
