"""What a trainer rank is started with: written by the driver, read by each rank; imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lego.engine.transfer import Broadcast, CudaIpc, Direct
from lego.learn.algorithms import Algorithm, from_fields, name_of
from lego.learn.checkpoint_folder import Keep
from lego.learn.layout import DType, Layout
from lego.learn.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where data passes to and from the ranks."""

    control: str
    """Address of the socket on which rank 0 takes commands."""
    shared: str
    """Folder in which each rank tells its progress."""
    weights: str
    """Folder of this run alone for the files that carry weights to engines."""
    in_place: bool
    """Whether those files are written in place, in memory that engines share."""
    direct: Direct | None
    """How weights also go straight to engines."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a rank is told before its first command; paths are absolute."""

    places: Places
    model: str
    layout: Layout
    export_dtype: DType
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    grad_clip: float
    schedule: Schedule
    algorithm: Algorithm
    checkpoints: str
    keep: Keep

    def write(self, path: Path) -> None:
        """Writes a JSON file."""
        path.write_text(json.dumps(asdict(self) | {"algorithm_name": name_of(self.algorithm)}))

    @classmethod
    def read(cls, path: Path) -> "Settings":
        """What `write` wrote."""
        values = json.loads(path.read_text())
        values["layout"] = Layout(**values["layout"])
        values["schedule"] = Schedule(**values["schedule"])
        values["keep"] = Keep(**values["keep"])
        values["places"] = Places(**values["places"] | {"direct": _direct(values["places"]["direct"])})
        values["algorithm"] = from_fields(values.pop("algorithm_name"), values["algorithm"])
        return cls(**values)


def _direct(fields: Mapping[str, str] | None) -> Direct | None:
    """Only a broadcast has fields, so a record without any is `CudaIpc`."""
    if fields is None:
        return None
    return Broadcast(**fields) if fields else CudaIpc()
