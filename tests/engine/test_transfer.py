"""Weights on their way from trainer to engine: exact, whole or refused, and never changed under a reader."""

import json
import os
import platform
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from lego.engine.transfer import SharedFolder, SharedMemory, WeightsFile, check, read_header
from lego.engine.vllm_client import VllmEngine
from lego.errors import EngineError, TrainerError, UsageError
from lego.learn.client import weights_folder
from lego.learn.weight_files import InPlace, Replaced
from lego.records import Generation, Sampling
from tests.engine.reference import reference
from tests.learn import policies
from tests.tiny import write_model

KINDS = pytest.mark.parametrize("kind", [InPlace, Replaced])
TENSORS = {
    "narrow": torch.arange(5).bfloat16(),
    "wide": torch.arange(6.0).reshape(2, 3),
    "scalar": torch.tensor(3.0),
    "none": torch.empty(0, 4),
}
DYING = """
import sys, time
from pathlib import Path
import torch
from lego.learn import weight_files

forms = {name: torch.empty(1000, device="meta") for name in ("a", "b")}
files = getattr(weight_files, sys.argv[1])(Path(sys.argv[2]), forms)
for version in (1, 2):
    whole = files.write(version, [(name, torch.full((1000,), float(version))) for name in forms])

def half():
    yield "a", torch.full((1000,), 3.0)
    print(whole, flush=True)
    time.sleep(60)

files.write(3, half())
"""


def forms(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


def times(factor: float) -> dict[str, torch.Tensor]:
    return {name: tensor * factor for name, tensor in TENSORS.items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in wanted.items()
    )


@KINDS
def test_each_version_is_a_plain_safetensors_file_that_says_its_version(kind: Any, tmp_path: Path):
    files = kind(tmp_path, forms(TENSORS))
    for version in (0, 1, 2, 10**12):
        path = files.write(version, times(version + 1).items())
        assert same(load_file(path), times(version + 1))
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"
        header = read_header(path)
        entries = json.loads(header.raw[8:])
        assert len(header.raw) % 8 == 0
        assert all(entries[name]["data_offsets"][0] % tensor.itemsize == 0 for name, tensor in TENSORS.items())
        assert header.version == version
        assert header.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
        with WeightsFile(path, version) as file:
            assert [name for name, _ in file] == list(TENSORS)
            assert same(dict(file), times(version + 1))


@KINDS
def test_tensors_of_another_type_or_layout_are_written_in_the_one_told(kind: Any, tmp_path: Path):
    wanted = {"w": torch.arange(12.0).reshape(3, 4).bfloat16()}
    held = torch.arange(12.0).reshape(3, 4).t().contiguous().t()
    assert not held.is_contiguous()
    assert same(load_file(kind(tmp_path, forms(wanted)).write(1, [("w", held)])), wanted)


@KINDS
def test_a_version_stays_as_it_is_until_the_write_after_the_next(kind: Any, tmp_path: Path):
    files = kind(tmp_path, forms(TENSORS))
    first = files.write(1, times(1).items())
    second = files.write(2, times(2).items())
    assert same(load_file(first), times(1)) and same(load_file(second), times(2))
    files.write(3, times(3).items())
    assert same(load_file(second), times(2))
    assert len(list(tmp_path.iterdir())) == 2


def test_files_in_place_are_allocated_once(tmp_path: Path):
    files = InPlace(tmp_path, forms(TENSORS | {"large": torch.empty(1 << 20)}))
    for path in tmp_path.iterdir():
        assert path.stat().st_blocks * 512 >= path.stat().st_size > 4 << 20
    files = InPlace(tmp_path, forms(TENSORS))
    nodes = [files.write(version, times(1).items()).stat().st_ino for version in range(4)]
    assert nodes == nodes[:2] * 2 and nodes[0] != nodes[1]


def test_files_of_a_folder_are_never_written_into(tmp_path: Path):
    files = Replaced(tmp_path, forms(TENSORS))
    with WeightsFile(files.write(1, times(1).items()), 1) as file:
        for version in (1, 2, 3, 4):
            files.write(version, times(5).items())
        assert same(dict(file), times(1))


def test_a_file_in_place_that_is_written_into_while_it_is_read_is_told(tmp_path: Path):
    files = InPlace(tmp_path, forms(TENSORS))
    first = files.write(1, times(1).items())
    files.write(2, times(2).items())

    def halfway() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(times(3).items())[:1]
        with pytest.raises(EngineError, match="was written into while it was read"):
            file.check()
        yield from list(times(3).items())[1:]

    with pytest.raises(EngineError, match=f"{first} was written into while it was read"), WeightsFile(first) as file:
        file.check()
        files.write(3, halfway())


@KINDS
def test_a_writer_that_dies_half_way_leaves_no_file_that_passes_for_whole(kind: Any, tmp_path: Path):
    child = subprocess.Popen([sys.executable, "-c", DYING, kind.__name__, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    whole = Path(child.stdout.readline().decode().strip())
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    assert check(whole, 2) == whole
    assert set(load_file(whole)["a"].tolist()) == {2.0}
    left = [path for path in tmp_path.iterdir() if path != whole]
    assert len(left) == 1
    if kind is Replaced:
        assert left[0].suffix == ".part"
        return
    with pytest.raises(EngineError, match=f"{left[0]} is not whole: it is being written, or its writer died"):
        read_header(left[0])
    with pytest.raises(SafetensorError):
        load_file(left[0])


@KINDS
def test_a_write_that_fails_leaves_the_version_before_and_the_next_succeeds(kind: Any, tmp_path: Path):
    files = kind(tmp_path, forms(TENSORS))
    first, second = files.write(1, times(1).items()), files.write(2, times(2).items())
    stretched = TENSORS | {"wide": torch.ones(1, 3)}
    for tensors, says in (
        (list(TENSORS.items())[:-1], "1 tensors were not given, first none"),
        (stretched.items(), r"wide: \(1, 3\), wanted \(2, 3\)"),
    ):
        with pytest.raises(ValueError, match=says):
            files.write(3, tensors)
        assert same(load_file(second), times(2))
    third = files.write(3, times(3).items())
    assert same(load_file(third), times(3)) and same(load_file(second), times(2))
    assert (third == first) == (kind is InPlace)


@KINDS
def test_a_folder_without_room_is_told_before_anything_is_written(kind: Any, tmp_path: Path):
    large = {"a": torch.empty(1 << 45, device="meta")}
    with pytest.raises(TrainerError, match=rf"{tmp_path}: weights need \d+ bytes, \d+ are free: No space left"):
        kind(tmp_path, large).write(1, [])
    assert not list(tmp_path.iterdir())


@KINDS
def test_a_file_that_the_system_refuses_is_told_and_nothing_of_it_stays(kind: Any, tmp_path: Path):
    tensors = {"a": torch.zeros(100_000)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(TrainerError, match=rf"{tmp_path}: weights need 400\d+ bytes, \d+ are free: File too large"):
            kind(tmp_path, forms(tensors)).write(1, tensors.items())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


@KINDS
def test_another_version_than_the_one_asked_for_is_refused(kind: Any, tmp_path: Path):
    path = kind(tmp_path, forms(TENSORS)).write(4, TENSORS.items())
    assert check(path, 4) == check(path) == path
    for refuse in (lambda: check(path, 5), lambda: WeightsFile(path, 5)):
        with pytest.raises(EngineError, match=f"{path} holds version 4, wanted 5"):
            refuse()


def test_a_file_that_names_no_version_passes_for_any(tmp_path: Path):
    save_file(TENSORS, tmp_path / "w", metadata={"format": "pt"})
    assert check(tmp_path / "w", 7) == tmp_path / "w"
    assert read_header(tmp_path / "w").version is None


def test_a_file_cut_anywhere_is_refused(tmp_path: Path):
    path = InPlace(tmp_path, forms(TENSORS)).write(1, TENSORS.items())
    whole = path.read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(EngineError, match=f"weights file {tmp_path / 'cut'}"):
            read_header(tmp_path / "cut")
    (tmp_path / "long").write_bytes(whole + b"\0")
    with pytest.raises(EngineError, match="its header says"):
        read_header(tmp_path / "long")


@pytest.mark.parametrize("text", [b"[]", b"{", b'{"a": 3}', b'{"a": {"shape": [1]}}', b'{"__metadata__": []}', b"\xff"])
def test_a_header_of_something_else_is_refused(tmp_path: Path, text: bytes):
    (tmp_path / "w").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(EngineError, match=f"weights file {tmp_path / 'w'}"):
        read_header(tmp_path / "w")


def test_a_missing_file_is_refused(tmp_path: Path):
    for read in (read_header, WeightsFile, check):
        with pytest.raises(EngineError, match=f"weights file {tmp_path / 'w'}: No such file"):
            read(tmp_path / "w")


def test_weights_pass_through_the_runs_own_folder_or_one_of_its_own_among_others(tmp_path: Path):
    wire, shared = tmp_path / "wire", tmp_path / "shared"
    with weights_folder(SharedMemory(), wire) as folder:
        assert folder == wire
    says = f"engine.transfer.path: {shared}, wanted an existing folder"
    with pytest.raises(UsageError, match=says), weights_folder(SharedFolder(path=shared), wire):
        pass
    shared.mkdir()
    child = subprocess.Popen(["true"])
    child.wait()
    mark = f"lego-weights-{platform.node()}-"
    others = {f"{mark}{child.pid}-a", f"{mark}{os.getpid()}-b", f"lego-weights-elsewhere-{child.pid}-c", "mine"}
    for name in others:
        (shared / name).mkdir()
    with weights_folder(SharedFolder(path=shared), wire) as folder:
        (folder / "w").touch()
        left = {path.name for path in shared.iterdir()} - {folder.name}
    assert left == others - {f"{mark}{child.pid}-a"}
    assert {path.name for path in shared.iterdir()} == left


def rounded(folder: Path, target: Path) -> Path:
    """The model folder with its weights as bfloat16 has them, in float32."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    weights = {n: t.bfloat16().float() for n, t in load_file(folder / "model.safetensors").items()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


async def look(engine: VllmEngine) -> tuple[Generation, np.ndarray]:
    ids = np.random.default_rng(54).integers(0, 256, 90).astype(np.int32)
    got = await engine.generate(ids, Sampling(max_tokens=20, seed=7), session="s")
    return got, np.concatenate([ids, got.output_ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@KINDS
async def test_what_the_trainer_writes_is_what_the_engine_computes_with_there_and_back(
    kind: Any, dtype: torch.dtype, vllm_engine: VllmEngine, tiny_model: Path, tmp_path: Path
):
    """Experts and a tied head: after each update the logprobs are those of a fresh load; back, to the bit."""
    other = write_model(tmp_path / "other", seed=1)
    (tmp_path / "weights").mkdir()
    weights = [policies.policy(folder).weights for folder in (tiny_model, other)]
    files = kind(tmp_path / "weights", weights[0].forms(dtype))
    seen = []
    try:
        for version, of in enumerate((0, 1, 0, 1), start=1):
            path = files.write(version, weights[of].held())
            assert check(path, version) == path
            assert read_header(path).shapes == read_header(tiny_model / "model.safetensors").shapes
            await vllm_engine.update(path, version)
            seen.append(await look(vllm_engine))
    finally:
        await vllm_engine.update(tiny_model / "model.safetensors", 0)
    for (a, _), (b, _) in zip(seen[:2], seen[2:], strict=True):
        np.testing.assert_array_equal(a.output_ids, b.output_ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
    assert [got.versions[0].version for got, _ in seen] == [1, 2, 3, 4]
    for folder, (got, whole) in zip((tiny_model, other), seen, strict=False):
        truth = folder if dtype == torch.float32 else rounded(folder, tmp_path / f"rounded-{folder.name}")
        logprobs, _ = reference(truth, whole, len(whole) - len(got.output_ids))
        np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-4)


WORKER = """
import json, sys
from pathlib import Path
import torch
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from lego.engine.weights import CheckedEngine, FileUpdate
from lego.learn.weight_files import InPlace

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 3, bias=False)

    def load_weights(self, weights):
        for _, tensor in weights:
            self.layer.weight.weight_loader(self.layer.weight, tensor)

files = InPlace(Path(sys.argv[1]), {"layer.weight": torch.empty(3, 2, device="meta")})
paths = [str(files.write(v, [("layer.weight", torch.full((3, 2), float(v)))])) for v in (1, 2)]
engine = CheckedEngine.__new__(CheckedEngine)
engine.model, engine.model_config, engine._file, engine._line = Model(), None, None, None
record_metadata_for_reloading(engine.model)

def update(number, version, between=lambda: None):
    try:
        engine.start_weight_update()
        engine.receive_weights(FileUpdate(path=paths[number], version=version))
        between()
        engine.finish_weight_update()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return engine.model.layer.weight.unique().tolist()

def again():
    files.write(3, [("layer.weight", torch.full((3, 2), 3.0))])

told = [update(0, 1), update(1, 2), update(0, 2), update(0, None, again), update(0, 3)]
print(json.dumps(told))
"""


def test_a_worker_refuses_another_version_and_a_file_that_changed_before_the_update_was_finished(tmp_path: Path):
    env = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two, wrong, changed, three = json.loads(done.stdout.splitlines()[-1])
    assert (one, two, three) == ([1.0], [2.0], [3.0])
    assert "holds version 1, wanted 2" in wrong
    assert "was written into while it was read" in changed
