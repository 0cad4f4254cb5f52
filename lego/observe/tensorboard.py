"""TensorBoard event files, written without torch: the one file for the tensorboard library."""

import time
from collections.abc import Mapping
from pathlib import Path

from lego.records import Histogram


class Curves:
    """Scalars by step; the library is loaded at the first one."""

    def __init__(self, folder: Path, first: int = 0) -> None:
        """Readers forget what an earlier life of the run wrote from the step `first` on."""
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        Event, Log = event_pb2.Event, event_pb2.SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        self._writer = EventFileWriter(str(folder))
        self._writer.add_event(Event(wall_time=time.time(), step=first, session_log=Log(status=Log.START)))

    def add(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        Event, Summary = event_pb2.Event, summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        HistogramProto = summary_pb2.HistogramProto  # pyright: ignore[reportAttributeAccessIssue]
        told = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in values.items()]
        for tag, histogram in histograms.items():
            # TensorBoard knows upper bounds only; the open bin above ends as far out as the one below begins.
            bounds = [*histogram.edges, 2 * histogram.edges[-1]]
            proto = HistogramProto(num=sum(histogram.counts), bucket_limit=bounds, bucket=histogram.counts)
            told.append(Summary.Value(tag=tag, histo=proto))
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=told)))

    def close(self) -> None:
        self._writer.close()
