"""What an engine must know of a model folder in Hugging Face layout, read before anything is started."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lego.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """The facts that answers are checked against."""

    path: Path
    stop_ids: tuple[int, ...]
    """Tokens that end an answer."""
    vocab_size: int
    experts: int
    """Routed experts of a layer; 0 for a dense model."""
    experts_per_token: int
    layers: int
    moe_layers: tuple[int, ...]
    """Indices of the layers that route, of all `layers`."""


def read_model_folder(path: Path) -> ModelFolder:
    """Reads the folder's config; UsageError names what is missing."""
    if not path.is_dir():
        raise UsageError(f"model folder {path} does not exist")
    top = _read_json(path / "config.json")
    config: dict[str, Any] = top | top.get("text_config", {})
    if not any(path.glob("*.safetensors")):
        raise UsageError(f"model folder {path} has no *.safetensors weights")
    experts = next((config[k] for k in ("num_experts", "n_routed_experts", "num_local_experts") if config.get(k)), 0)
    layers = _number(config, "num_hidden_layers", path)
    return ModelFolder(
        path=path,
        stop_ids=_stop_ids(path, top, config),
        vocab_size=_number(config, "vocab_size", path),
        experts=experts,
        experts_per_token=_number(config, "num_experts_per_tok", path) if experts else 0,
        layers=layers,
        moe_layers=tuple(i for i in range(layers) if experts and _routes(config, i)),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"model folder {path.parent} has no {path.name}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds a {type(found).__name__}, wanted a JSON object")
    return found


def _number(config: dict[str, Any], key: str, path: Path) -> int:
    if not isinstance(config.get(key), int):
        raise UsageError(f"{path / 'config.json'} has {key} = {config.get(key)!r}, wanted a whole number")
    return config[key]


def _stop_ids(path: Path, top: dict[str, Any], config: dict[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids of generation_config.json, else of config.json."""
    generation = path / "generation_config.json"
    sources = ([_read_json(generation)] if generation.exists() else []) + [top, config]
    found = next((s["eos_token_id"] for s in sources if s.get("eos_token_id") is not None), None)
    if found is None:
        raise UsageError(f"model folder {path} names no eos_token_id in generation_config.json or config.json")
    return tuple(found) if isinstance(found, list) else (found,)


def _routes(config: dict[str, Any], layer: int) -> bool:
    if layer in (config.get("mlp_only_layers") or ()) or layer < (config.get("first_k_dense_replace") or 0):
        return False
    step = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
    # decoder_sparse_step counts layers from one, moe_layer_freq from zero.
    return (layer + 1) % step == 0 if config.get("decoder_sparse_step") else layer % step == 0
