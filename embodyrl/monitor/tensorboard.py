"""TensorBoard event files in `<run>/tensorboard`, written without torch's SummaryWriter, which would import torch."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodyrl.monitor.protocol import Monitor, RunInfo

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorboardMonitor(Monitor):
    """Logger that writes scalars to TensorBoard under their names in `metrics.jsonl`.

    Videos are not logged, because event files would duplicate their frames.
    """

    def __init__(self) -> None:
        self._writer: EventFileWriter | None = None

    def open(self, run_dir: Path, info: RunInfo) -> None:
        """Create the event file of the run (see `Monitor.open`)."""
        from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        # TensorBoard then ignores older values of this and later steps.
        self._add(info.resume_step or 0, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Monitor.log`."""
        assert self._writer is not None, "log before open"
        values = [{"tag": name, "simple_value": value} for name, value in metrics.items()]
        self._add(step, summary={"value": values})
        # Flush, so that a killed run keeps its last step.
        self._writer.flush()

    def close(self) -> None:
        """See `Monitor.close`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        assert self._writer is not None
        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))
