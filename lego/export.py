"""`python -m lego.export CHECKPOINT MODEL OUT`: a trainer's checkpoint as a model folder in Hugging Face layout."""

import logging
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lego.errors import UsageError
from lego.learn.checkpoint_folder import PART, find, read_meta

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Export:
    """Writes the policy of a trainer's checkpoint as a model folder, for transformers, vLLM and all else."""

    checkpoint: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    """Folder step-… of a trainer, or one that holds some: then the newest."""
    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """Model folder that the run began with; all but its weights is copied."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """New folder. It has this name once it is whole."""
    dtype: Literal["source", "float32", "bfloat16"] = "source"
    """Type of the weights; source is each tensor's own in the model folder."""


def export(options: Export) -> None:
    """Writes the folder. Raises UsageError if the parts do not fit or something lies where it would go."""
    if options.out.resolve().is_relative_to(options.model.resolve()):
        raise UsageError(f"{options.out}: lies in {options.model}, which is copied; wanted another place")
    checkpoint, part = find(options.checkpoint), options.out.with_name(options.out.name + PART)
    for path in (options.out, part):
        if path.exists():
            raise UsageError(f"{path}: exists already; nothing is written over")
    if not (options.model / "config.json").is_file():
        raise UsageError(f"{options.model} has no config.json; wanted the model folder that the run began with")
    log.info("checkpoint %s of step %d", checkpoint, read_meta(checkpoint).step)
    part.mkdir(parents=True)
    try:
        _write_weights(checkpoint, options.model, part, options.dtype)
    except BaseException:
        shutil.rmtree(part)
        raise
    part.rename(options.out)
    log.info("%s is whole", options.out)


def _write_weights(checkpoint: Path, model: Path, out: Path, dtype: str) -> None:
    """The network as one rank on the CPU: built from the model folder, set to the checkpoint's weights, written."""
    # Imported late, so that --help and a wrong path answer at once.
    import torch

    from lego.learn import hf_folder, titan
    from lego.learn.checkpoint import load_weights
    from lego.learn.layout import Layout

    log.info("building the network of %s", model)
    policy = titan.Policy(model, Layout(), titan.join_alone())
    log.info("reading %d tensors of the checkpoint", len(policy.parameters()))
    load_weights(policy, checkpoint)
    log.info("writing")
    hf_folder.copy_others(model, out)
    policy.export_folder(out, {"source": None, "float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])
    torch.distributed.destroy_process_group()


def main(options: Export) -> None:
    """Exports; progress goes to stderr."""
    # Work for memory and disk, with a network of the CPU's: torch must find no other device.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    export(options)


if __name__ == "__main__":
    asked = tyro.cli(Export, prog="python -m lego.export")
    from lego.cli import guarded  # takes a moment, which --help does without

    guarded(lambda: main(asked))
