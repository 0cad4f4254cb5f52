import errno
import itertools
import multiprocessing
import os
import pkgutil
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from lego.errors import TrainerError, UsageError
from lego.learn import checkpoint, checkpoint_folder, titan
from lego.learn.checkpoint import Checkpointer, load_weights
from lego.learn.checkpoint_folder import Keep, Saved, find, latest, read_meta, to_remove
from lego.learn.layout import Layout
from lego.learn.optimizer import AdamW
from lego.learn.schedule import Schedule
from tests.learn import layouts, policies
from tests.tiny import write_model

# Ranks are forked from a process that has imported everything: a start costs a tenth of a second.
multiprocessing.set_forkserver_preload(["tests.learn.layouts", "lego.learn.checkpoint"])


SIZES = {"vocab_size": 509, "head_dim": 30, "num_hidden_layers": 2, "num_experts": 4}
"""Two and four ranks cannot share words and heads evenly."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "uneven", **SIZES)


def adam(network, **more):
    return AdamW(network, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, **more)


def policy(folder):
    """A policy and its optimizer, this process the only rank."""
    return adam(policies.policy(folder), schedule=Schedule(warmup_steps=3))


def critic(folder):
    return adam(policies.critic(folder))


def pull(optimizer, seed=0):
    """A step on gradients that differ from number to number, and by seed."""
    for parameter in optimizer.network.parameters().values():
        parameter.grad = torch.cos(parameter.detach() * 9 + seed)
    optimizer.step()


def gathered(optimizer):
    return {name: layouts.whole(tensor) for name, tensor in optimizer.state().items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A layout that continues from a checkpoint (or begins), writes its own, and trains one more step meanwhile."""

    name: str
    layout: Layout
    source: str | None


def visited(visit: Visit, folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """The state that was saved and the loss of the next step."""
    made = adam(titan.Policy(folder, visit.layout, torch.device("cpu")), schedule=Schedule(warmup_steps=3))
    checkpoints = Checkpointer(out / visit.name, made)
    if visit.source:
        assert checkpoints.load(out / visit.source).step == 1
    else:
        layouts.step(made.network, "one")
        made.step()
    state = gathered(made)
    checkpoints.save(made.position, {})
    loss = layouts.step(made.network, "one")["loss"]
    made.step()
    checkpoints.wait()
    return state | {"loss": loss}


def join(rank: int, ranks: int, store: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    titan.init_distributed(Layout(world_size=ranks))


def visiting(rank: int, ranks: int, visits: list[Visit], folder: Path, out: Path) -> None:
    join(rank, ranks, out / "-".join(["store", *(v.name for v in visits)]))
    for visit in visits:
        found = visited(visit, folder, out)
        if rank == 0:
            save_file(found, out / f"{visit.name}.safetensors")
    dist.destroy_process_group()


def started(function, *arguments, ranks: int = 1) -> None:
    torch.multiprocessing.start_processes(function, arguments, nprocs=ranks, start_method="forkserver")


def test_a_run_continues_on_any_other_layout(folder, tmp_path):
    """2 ranks with split experts -> 4 -> 4 in two copies -> 2 -> 1 -> 2 as at first, and nothing has changed."""
    journeys = [
        (2, [Visit(name="ep2", layout=Layout(world_size=2, expert_parallel=2), source=None)]),
        (
            4,
            [
                Visit(name="fsdp2xep2", layout=Layout(world_size=4, expert_parallel=2), source="ep2"),
                Visit(name="hsdp", layout=Layout(world_size=4, replicate=2), source="fsdp2xep2"),
            ],
        ),
        (2, [Visit(name="fsdp2", layout=Layout(world_size=2), source="hsdp")]),
        (1, [Visit(name="alone", layout=Layout(), source="fsdp2")]),
        (2, [Visit(name="ep2-again", layout=Layout(world_size=2, expert_parallel=2), source="alone")]),
    ]
    for ranks, visits in journeys:
        started(visiting, ranks, visits, folder, tmp_path, ranks=ranks)
    found = {v.name: load_file(tmp_path / f"{v.name}.safetensors") for _, visits in journeys for v in visits}
    losses = {name: state.pop("loss") for name, state in found.items()}
    assert max(state["step.tok_embeddings.weight"] for state in found.values()) == 1
    assert found["ep2"]["exp_avg.tok_embeddings.weight"].abs().max() > 0
    for name, state in found.items():
        assert equal(state, found["ep2"]), name
        assert losses[name] == pytest.approx(float(losses["ep2"]), abs=1e-6), name
    assert losses["ep2-again"] == losses["ep2"]
    metas = {name: read_meta(find(tmp_path / name)) for name in found}
    assert metas["hsdp"].layout["replicate"] == 2 and metas["hsdp"].model_type == "qwen3_moe"


def test_a_step_while_files_are_written_is_not_in_them(folder, tmp_path, monkeypatch):
    made, stepped, clean = policy(folder), threading.Event(), checkpoint.clean
    monkeypatch.setattr(checkpoint, "clean", lambda root: (stepped.wait(), clean(root)))
    pull(made)
    before, checkpoints = gathered(made), Checkpointer(tmp_path, made)
    checkpoints.save(1, {})
    pull(made)
    assert latest(tmp_path) is None
    stepped.set()
    checkpoints.wait()
    other = policy(folder)
    Checkpointer(tmp_path, other).load(tmp_path)
    assert equal(gathered(other), before)
    assert not equal(gathered(made), before)
    assert other.position == 1 and other.lr == pytest.approx(1e-2 * 2 / 3)


def test_a_checkpoint_from_before_the_first_step_is_where_a_run_begins(folder, tmp_path):
    made = policy(folder)
    checkpoints = Checkpointer(tmp_path, made)
    checkpoints.save(0, {})
    pull(made)
    after = gathered(made)
    checkpoints.load(tmp_path)
    assert made.position == 0
    pull(made)
    assert equal(gathered(made), after)


def test_one_is_in_flight_at_most(folder, tmp_path, monkeypatch):
    clean = checkpoint.clean
    monkeypatch.setattr(checkpoint, "clean", lambda root: (time.sleep(0.3), clean(root)))
    checkpoints = Checkpointer(tmp_path, policy(folder), keep=Keep(last=9))
    checkpoints.save(1, {})
    assert latest(tmp_path) is None
    checkpoints.save(2, {})
    assert latest(tmp_path) == tmp_path / "step-000001"
    checkpoints.wait()
    checkpoints.wait()
    assert checkpoint_folder.steps(tmp_path) == [tmp_path / "step-000001", tmp_path / "step-000002"]


@pytest.mark.parametrize("then", [lambda c: c.wait(), lambda c: c.save(2, {}), lambda c: c.load(c.root)])
def test_what_could_not_be_written_is_told_at_the_next_call(folder, tmp_path, then):
    (tmp_path / "runs").write_text("a file where a folder should be")
    checkpoints = Checkpointer(tmp_path / "runs", policy(folder))
    checkpoints.save(1, {})
    with pytest.raises(
        TrainerError, match=r"runs/step-000001: the checkpoint could not be saved: rank 0: NotADirectory"
    ):
        then(checkpoints)


def failing(rank: int, folder: Path, out: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    join(rank, 2, out / "store")
    made = adam(titan.Policy(folder, Layout(world_size=2), torch.device("cpu")))
    checkpoints = Checkpointer(out / "checkpoints", made)
    if rank == 1:
        checkpoint.FileSystemWriter.write_data = full
    checkpoints.save(1, {})
    with pytest.raises(TrainerError) as raised:
        checkpoints.wait()
    (out / f"{rank}.txt").write_text(str(raised.value))
    dist.destroy_process_group()


def test_a_rank_that_cannot_write_fails_the_checkpoint_on_all(folder, tmp_path):
    started(failing, folder, tmp_path, ranks=2)
    messages = {(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)}
    assert (
        len(messages) == 1 and "step-000001: the checkpoint could not be saved: rank 1: OSError(28," in messages.pop()
    )
    assert latest(tmp_path / "checkpoints") is None


def killed_in(owner: str, name: str, call: int = 1) -> None:
    """Ends this process, by signal 9, when this function is called for that time."""
    real, calls = getattr(pkgutil.resolve_name(owner), name), itertools.count(1)

    def counted(*arguments: object, **more: object) -> object:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **more)

    setattr(pkgutil.resolve_name(owner), name, counted)


def saver(_rank: int, folder: Path, root: Path, place: tuple) -> None:
    made = policy(folder)
    checkpoints = Checkpointer(root, made)
    for step in (1, 2):
        pull(made, step)
        save_file(gathered(made), root / f"{step}.safetensors")
        if step == 2:
            killed_in(*place)
        checkpoints.save(step, {})
        checkpoints.wait()


@pytest.mark.parametrize(
    ("place", "newest", "other"),
    [
        (("lego.learn.checkpoint:FileSystemWriter", "write_data"), 1, "step-000002.part"),
        (("lego.learn.checkpoint:FileSystemWriter", "finish"), 1, "step-000002.part"),
        (("lego.learn.checkpoint", "publish"), 1, "step-000002.part"),
        (("lego.learn.checkpoint", "prune"), 2, "step-000001"),
        (("shutil", "rmtree", 2), 2, "step-000001.gone"),
    ],
    ids=["before the tensors", "before their table", "before the rename", "before a removal", "within a removal"],
)
def test_a_save_killed_on_its_way_leaves_a_whole_checkpoint(folder, tmp_path, place, newest, other):
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL"):
        started(saver, folder, tmp_path, place)
    assert latest(tmp_path) == tmp_path / f"step-{newest:06d}"
    assert {path.name for path in tmp_path.glob("step-*")} == {f"step-{newest:06d}", other}
    made = policy(folder)
    checkpoints = Checkpointer(tmp_path, made)
    assert checkpoints.load(tmp_path).step == newest
    assert equal(gathered(made), load_file(tmp_path / f"{newest}.safetensors"))
    checkpoints.save(3, {})
    checkpoints.wait()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000003"]


def test_a_checkpoint_holds_the_critic_and_its_optimizer(folder, tmp_path, caplog):
    made, value = policy(folder), critic(folder)
    pull(made), pull(value), pull(value)
    before, checkpoints = gathered(value), Checkpointer(tmp_path, made, value)
    checkpoints.save(1, {})
    pull(value)
    checkpoints.load(tmp_path)
    assert equal(gathered(value), before) and value.position == 2 and made.position == 1
    assert before["weights.lm_head.weight"].abs().max() > 0
    alone = policy(folder)
    Checkpointer(tmp_path, alone).load(tmp_path)
    assert equal(gathered(alone), gathered(made)) and "critic is left behind" in caplog.text


def test_a_run_with_a_critic_does_not_continue_from_one_without(folder, tmp_path):
    made = policy(folder)
    checkpoints = Checkpointer(tmp_path, made)
    checkpoints.save(1, {})
    checkpoints.wait()
    with pytest.raises(UsageError, match="step-000001: holds no critic, and this run trains one"):
        Checkpointer(tmp_path, made, critic(folder)).load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, r"tensors are missing: policy.\w+.layers.2.\S+, policy.\w+.layers.2"),
        ({"num_hidden_layers": 1}, r"tensors have no place in this model: policy.\w+.layers.1"),
        ({"vocab_size": 300}, r"another shape: policy.\w+.tok_embeddings.weight \(509, 128\) \(want \(300, 128\)\)"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_its_first_tensors(folder, tmp_path, changes, message):
    checkpoints = Checkpointer(tmp_path / "ck", policy(folder))
    checkpoints.save(1, {})
    checkpoints.wait()
    other = policy(write_model(tmp_path / "other", **SIZES | changes))
    before = gathered(other)
    for load in (Checkpointer(tmp_path / "ck", other).load, partial(load_weights, other.network)):
        with pytest.raises(UsageError, match=message):
            load(find(tmp_path / "ck"))
    assert equal(gathered(other), before)


def test_a_damaged_file_is_named(folder, tmp_path):
    checkpoints = Checkpointer(tmp_path, policy(folder))
    checkpoints.save(1, {})
    checkpoints.wait()
    data = tmp_path / "step-000001" / "__0_0.distcp"
    os.truncate(data, data.stat().st_size // 2)
    with pytest.raises(TrainerError, match="step-000001: the checkpoint cannot be read: rank 0"):
        checkpoints.load(tmp_path)
    (tmp_path / "step-000001" / ".metadata").write_bytes(b"")
    with pytest.raises(UsageError, match="step-000001: its table of tensors cannot be read"):
        checkpoints.load(tmp_path)


def test_no_checkpoint_and_one_of_another_format_are_one_clear_message(tmp_path):
    with pytest.raises(UsageError, match="no checkpoint here; wanted a folder step-"):
        find(tmp_path / "none")
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / "meta.json").write_text('{"format": 99}')
    with pytest.raises(UsageError, match="step-000001: checkpoint format 99, wanted 1"):
        read_meta(find(tmp_path))


def test_the_newest_and_the_best_are_kept(folder, tmp_path):
    checkpoints = Checkpointer(tmp_path, policy(folder), keep=Keep(last=1, best=1))
    for step, rate in ((1, 0.2), (2, 0.6), (3, 0.5), (4, float("nan"))):
        checkpoints.save(step, {"solve_rate": rate})
    checkpoints.wait()
    assert [f.name for f in checkpoint_folder.steps(tmp_path)] == ["step-000002", "step-000004"]
    assert read_meta(tmp_path / "step-000004").metrics == {"solve_rate": None}


@pytest.mark.parametrize(
    ("last", "best", "left"),
    [
        (1, 0, [5]),
        (0, 0, [5]),
        (2, 0, [4, 5]),
        (9, 0, [1, 2, 3, 4, 5]),
        (1, 1, [3, 5]),
        (1, 3, [1, 2, 3, 5]),
        (2, 9, [1, 2, 3, 4, 5]),
    ],
)
def test_what_may_go_is_neither_new_nor_good(last, best, left):
    scores = {3: 0.5, 1: 0.1, 4: None, 2: 0.5, 5: 0.0}
    checkpoints = [Saved(folder=Path(f"step-{s}"), step=s, score=score) for s, score in scores.items()]
    gone = [c.step for c in to_remove(checkpoints, last, best)]
    assert gone == [s for s in (1, 2, 3, 4, 5) if s not in left]


def test_a_checkpoint_of_a_step_taken_again_replaces_the_old_one(folder, tmp_path):
    made = policy(folder)
    for _ in range(2):
        pull(made)
        checkpoints = Checkpointer(tmp_path, made)
        checkpoints.save(7, {})
        checkpoints.wait()
    other = policy(folder)
    Checkpointer(tmp_path, other).load(tmp_path)
    assert equal(gathered(other), gathered(made)) and [f.name for f in tmp_path.iterdir()] == ["step-000007"]
