"""Distributed checkpoints (DCP) of a policy and its critic, written while training goes on, read by any layout."""

import logging
import pickle
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as read_sharded
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult

from lego.errors import TrainerError, UsageError
from lego.learn.checkpoint_folder import Keep, Meta, clean, find, part_of, place, prune, publish, read_meta
from lego.learn.optimizer import AdamW
from lego.learn.titan import Network, control_group
from lego.learn.titan_weights import Shapes, misfits

log = logging.getLogger(__name__)

_COPY_AT_ONCE = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


class Checkpointer:
    """Writes and reads the checkpoints of one run. Made and called by all ranks alike; one is in flight at most."""

    def __init__(self, root: Path, policy: AdamW, critic: AdamW | None = None, keep: Keep | None = None) -> None:
        self.root, self.policy, self.critic, self.keep = root, policy, critic, keep or Keep()
        # Written from a thread of its own, and so through a group of its own.
        self._group = control_group()
        self._flight: tuple[Path, Future[Metadata]] | None = None

    def save(self, step: int, metrics: Mapping[str, float]) -> None:
        """Copies the state of `step` to CPU memory and begins to write it; what needs not stay is removed after.

        Waits for the one before. Raises TrainerError if that could not be written.
        """
        self.wait()
        network = self.policy.network
        meta = Meta(
            step=step,
            model_type=network.arch.hf["model_type"],
            layout=asdict(network.layout),
            metrics=dict(metrics),
            critic=self.critic is not None,
        )
        folder = place(self.root, step)
        running = async_save(
            self._state(),
            storage_writer=_Writer(folder, meta, self.keep),
            process_group=self._group,
            async_stager=DefaultStager(_COPY_AT_ONCE),
        )
        assert isinstance(running, Future)
        self._flight = folder, running

    def wait(self) -> None:
        """Waits until the checkpoint in flight is whole, if there is one. Raises TrainerError if it cannot be."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        folder, running = flight
        try:
            running.result()
        except (CheckpointException, RuntimeError) as error:
            raise TrainerError(f"{folder}: the checkpoint could not be saved: {_causes(error)}") from error

    def load(self, path: Path) -> Meta:
        """Takes over a checkpoint, or the newest one in a folder of them. Written by any layout of the same model.

        Raises UsageError if it does not fit, and then nothing was taken; TrainerError if its files cannot be read.
        """
        self.wait()
        folder = find(path)
        meta = read_meta(folder)
        stored = _stored(folder)
        if self.critic is not None and not _within(stored, ("critic.",)):
            raise UsageError(f"{folder}: holds no critic, and this run trains one")
        if self.critic is None and _within(stored, ("critic.",)):
            log.warning("%s: its critic is left behind; this run has none", folder)
        _read(folder, self._state(), ("policy.",) if self.critic is None else ("policy.", "critic."), self._group)
        return meta

    def _state(self) -> dict[str, torch.Tensor]:
        state = {f"policy.{name}": t for name, t in self.policy.state().items()}
        if self.critic is not None:
            state |= {f"critic.{name}": t for name, t in self.critic.state().items()}
        return state


def load_weights(network: Network, folder: Path) -> None:
    """Sets a network's weights to those of the policy in a checkpoint.

    Raises UsageError if they are of another model, TrainerError if its files cannot be read.
    """
    state = {f"policy.weights.{name}": p.detach() for name, p in network.parameters().items()}
    _read(folder, state, ("policy.weights.",))


class _Writer(FileSystemWriter):
    """Writes one checkpoint. The coordinating rank readies its folder before any rank writes, and ends it after all."""

    def __init__(self, folder: Path, meta: Meta, keep: Keep) -> None:
        super().__init__(part_of(folder))
        self._folder, self._meta, self._keep = folder, meta, keep

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        clean(self._folder.parent)
        part_of(self._folder).mkdir()
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        publish(self._folder, self._meta)
        prune(self._folder.parent, self._keep)
        log.info("checkpoint %s is whole", self._folder)


def _stored(folder: Path) -> Shapes:
    """Shapes of a checkpoint's tensors by name."""
    try:
        found = FileSystemReader(folder).read_metadata().state_dict_metadata
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise UsageError(f"{folder}: its table of tensors cannot be read: {error}") from error
    return {name: tuple(entry.size) for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def _within(shapes: Shapes, prefixes: tuple[str, ...]) -> Shapes:
    return {name: shape for name, shape in shapes.items() if name.startswith(prefixes)}


def _read(
    folder: Path, state: dict[str, torch.Tensor], prefixes: tuple[str, ...], group: dist.ProcessGroup | None = None
) -> None:
    """Fills tensors, in place, from all that a checkpoint holds under these prefixes."""
    wrong = misfits(_within(_stored(folder), prefixes), {name: tuple(t.shape) for name, t in state.items()})
    if wrong:
        raise UsageError(f"{folder}: not a checkpoint of this model: {'; '.join(wrong)}")
    try:
        read_sharded(state, storage_reader=FileSystemReader(folder), process_group=group)
    except CheckpointException as error:
        raise TrainerError(f"{folder}: the checkpoint cannot be read: {_causes(error)}") from error


def _causes(error: BaseException) -> str:
    """What failed on which rank, in one line."""
    if not isinstance(error, CheckpointException):
        return repr(error)
    return "; ".join(f"rank {rank}: {cause!r}" for rank, (cause, _) in sorted(error.failures.items()))
