import json
import shutil
from pathlib import Path

import pytest

from lego.engine.folder import read_model_folder
from lego.errors import UsageError


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def change(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_the_facts_of_a_mixture_of_experts_folder(folder: Path):
    model = read_model_folder(folder)
    assert (model.stop_ids, model.vocab_size, model.experts, model.experts_per_token) == ((258,), 512, 8, 2)
    assert model.moe_layers == (0, 1, 2)


def test_layers_without_experts_are_known(folder: Path):
    change(folder, mlp_only_layers=[1])
    assert read_model_folder(folder).moe_layers == (0, 2)
    change(folder, mlp_only_layers=[], decoder_sparse_step=2)
    assert read_model_folder(folder).moe_layers == (1,)
    change(folder, num_experts=0)
    assert read_model_folder(folder).moe_layers == ()


def test_several_end_tokens_of_the_generation_config_are_all_stop_tokens(folder: Path):
    (folder / "generation_config.json").write_text('{"eos_token_id": [258, 256]}')
    assert read_model_folder(folder).stop_ids == (258, 256)
    (folder / "generation_config.json").unlink()
    assert read_model_folder(folder).stop_ids == (258,)


@pytest.mark.parametrize(
    ("gone", "words"), [("config.json", "has no config.json"), ("model.safetensors", "has no .*safetensors weights")]
)
def test_a_folder_with_a_part_missing_is_named_with_the_part(folder: Path, gone: str, words: str):
    (folder / gone).unlink()
    with pytest.raises(UsageError, match=f"{folder} {words}"):
        read_model_folder(folder)


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match=f"{tmp_path / 'nothing'} does not exist"):
        read_model_folder(tmp_path / "nothing")


def test_a_folder_without_end_token_is_refused(folder: Path):
    (folder / "generation_config.json").unlink()
    change(folder, eos_token_id=None)
    with pytest.raises(UsageError, match="names no eos_token_id"):
        read_model_folder(folder)


def test_broken_json_is_named(folder: Path):
    (folder / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json is not JSON"):
        read_model_folder(folder)
