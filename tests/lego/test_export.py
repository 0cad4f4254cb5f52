import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lego.learn.checkpoint import Checkpointer
from lego.learn.optimizer import AdamW
from tests.learn.policies import logprobs, policy
from tests.tiny import write_model

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lego.export", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16, all but its router gates, with a text of its own."""
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=2)
    path = folder / "model.safetensors"
    kept = {n: w if n.endswith("mlp.gate.weight") else w.bfloat16() for n, w in load_file(path).items()}
    save_file(kept, path, metadata={"format": "pt"})
    (folder / "README.md").write_text("what these weights were trained on")
    return folder


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory):
    """A policy a step away from its model, and the folder of its checkpoint."""
    made, root = policy(model), tmp_path_factory.mktemp("checkpoints")
    optimizer = AdamW(made, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    logprobs(made, torch.arange(40), torch.arange(40)).sum().backward()
    optimizer.step()
    checkpoints = Checkpointer(root, optimizer)
    checkpoints.save(1, {"solve_rate": 0.5})
    checkpoints.wait()
    return made, root


def test_an_exported_checkpoint_is_the_policy_in_transformers(model: Path, trained, tmp_path: Path):
    made, root = trained
    done = run(root, model, tmp_path / "out", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and "step-000001 of step 1" in done.stderr and "out is whole" in done.stderr
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(60) * 7 % 512
    with torch.no_grad():
        scores = torch.log_softmax(network(ids[None]).logits[0], -1)[:-1]
        want = logprobs(made, ids, torch.arange(60))
    assert (scores.gather(-1, ids[1:, None])[:, 0] - want).abs().max() < 1e-5
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").decode([104, 105])
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all((before[n].float() - after[n]).abs().max() > 5e-3 for n in before if n.endswith("q_proj.weight"))
    copied = {path.name for path in model.iterdir()} - {"README.md"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == copied
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_weights_have_the_types_of_the_model_they_began_as(model: Path, trained, tmp_path: Path):
    made, root = trained
    done = run(root / "step-000001", model, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {n: w.dtype for n, w in after.items()} == {n: w.dtype for n, w in before.items()}
    exact = dict(made.weights.stream(torch.float32))
    assert all(torch.equal(exact[n].to(w.dtype), w) for n, w in after.items())


def test_nothing_is_written_over(model: Path, trained, tmp_path: Path):
    for taken in ("out", "late.part"):
        (tmp_path / taken).mkdir()
        done = run(trained[1], model, tmp_path / taken.removesuffix(".part"))
        message = f"error: {tmp_path / taken}: exists already; nothing is written over\n"
        assert done.returncode == 2 and done.stderr == message


def test_a_model_is_not_exported_into_the_one_it_began_as(model: Path, trained):
    before = sorted(model.iterdir())
    done = run(trained[1], model, model / "out")
    assert done.returncode == 2 and done.stderr.startswith(f"error: {model / 'out'}: lies in {model}, ")
    assert sorted(model.iterdir()) == before


def test_an_export_that_fails_leaves_nothing(trained, tmp_path: Path):
    other = write_model(tmp_path / "other", num_hidden_layers=2, vocab_size=300)
    done = run(trained[1], other, tmp_path / "new")
    assert done.returncode == 2 and "another shape: policy.weights.tok_embeddings.weight" in done.stderr
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize(
    ("checkpoint", "folder", "says"),
    [("none", "model", "no checkpoint here"), ("root", "none", "has no config.json")],
)
def test_a_wrong_path_is_one_line_at_once(
    model: Path, trained, tmp_path: Path, checkpoint: str, folder: str, says: str
):
    paths = {"none": tmp_path / "none", "model": model, "root": trained[1]}
    done = run(paths[checkpoint], paths[folder], tmp_path / "out")
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_answers_in_a_second_without_torch():
    seconds = []
    for _ in range(3):
        start = time.monotonic()
        done = run("--help")
        seconds.append(time.monotonic() - start)
        assert done.returncode == 0 and "CHECKPOINT MODEL OUT" in done.stdout and "--dtype" in done.stdout
    assert min(seconds) < 1.0
    code = "import sys, lego.export; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
