"""Logger to files: `metrics.jsonl` with one flat row per step, and `logs/events.log` with text lines."""

import json
import logging
import math
import time
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path

from embodyrl.files import cap_log, write_atomically
from embodyrl.monitor.history import EVENTS_FILE, METRICS_FILE, read_rows
from embodyrl.monitor.protocol import Monitor, RunInfo

_log = logging.getLogger(__name__)


class JsonlMonitor(Monitor):
    """Logger that writes rows such as `{"step": 3, "train/return": 0.25, ...}`.

    A value that is not finite is written as null and reported once. The newest step may be logged again: the row is
    replaced.
    """

    prompt = True
    file_name = METRICS_FILE

    def __init__(self) -> None:
        self._file: TextIOWrapper | None = None
        self._reported_metrics: set[str] = set()
        self._events: Path | None = None
        self._path = Path()
        self._last_step = -1

    def open(self, run_dir: Path, info: RunInfo) -> None:
        """Create the metrics file of a new run, or continue the file of a resumed run at `info.resume_step`.

        Raises:
            FileExistsError: the run is not resumed, but the file exists.
        """
        self._path = run_dir / self.file_name
        self._events = run_dir / EVENTS_FILE
        if info.resume_step is not None and self._path.exists():
            self._discard_from(info.resume_step)
        else:
            self._file = self._path.open("x", buffering=1, encoding="utf-8")

    def _discard_from(self, step: int) -> None:
        """Delete the rows of `step` and later steps, and an incomplete last line."""
        remaining = [row for row in read_rows(self._path) if row.get("step", step) < step]
        write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in remaining))
        self._last_step = max((row["step"] for row in remaining), default=-1)
        self.close()
        self._file = self._path.open("a", buffering=1, encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Monitor.log`."""
        if step == self._last_step:
            self._discard_from(step)
        assert self._file is not None, "log before open"
        self._last_step = step
        row: dict[str, float | int | None] = {"step": step}
        for name, value in metrics.items():
            number = value if isinstance(value, int) else float(value)
            row[name] = number if math.isfinite(number) else None
            if row[name] is None and name not in self._reported_metrics:
                self._reported_metrics.add(name)
                _log.warning("metric '%s' is %s at step %d; %s has null instead", name, number, step, self.file_name)
        self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def text(self, line: str) -> None:
        """Append a line with the time to the event log (see `Monitor.text`)."""
        assert self._events is not None, "text before open"
        self._events.parent.mkdir(exist_ok=True)
        with self._events.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
        cap_log(self._events)

    def close(self) -> None:
        """See `Monitor.close`."""
        if self._file is not None:
            self._file.close()
            self._file = None
