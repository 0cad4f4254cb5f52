"""TensorBoard event files, written without torch: the one file for the tensorboard library."""

import time
from collections.abc import Mapping
from pathlib import Path


class Curves:
    """Scalars by step; the library is loaded at the first one."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        scalars = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in values.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def close(self) -> None:
        self._writer.close()
