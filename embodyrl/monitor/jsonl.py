"""Logger to files: `metrics.jsonl` with one flat row per step, and `logs/events.log` with text lines."""

import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path

from embodyrl.files import cap_log, write_atomically
from embodyrl.monitor.history import EVENTS_FILE, METRICS_FILE, read_rows
from embodyrl.monitor.protocol import Monitor, RunInfo

_log = logging.getLogger(__name__)


class JsonlMonitor(Monitor):
    """Logger that writes rows such as `{"step": 3, "train/return": 0.25, ...}`.

    A value that is not finite is written as null and reported once. If the newest step is logged again, its row is
    replaced.
    """

    prompt = True
    file_name = METRICS_FILE

    def __init__(self) -> None:
        self._reported_metrics: set[str] = set()
        self._folder = Path()
        self._last_step = -1

    def open(self, run_dir: Path, info: RunInfo) -> None:
        """Create the metrics file of a new run, or continue the file of a resumed run at `info.resume_step`.

        Raises:
            FileExistsError: the run is not resumed, but the file exists.
        """
        self._folder = run_dir
        if info.resume_step is not None and (run_dir / self.file_name).exists():
            self._discard_from(info.resume_step)
        else:
            (run_dir / self.file_name).touch(exist_ok=False)

    def _discard_from(self, step: int) -> None:
        """Delete the rows of `step` and later steps, and an incomplete last line."""
        path = self._folder / self.file_name
        remaining = [row for row in read_rows(path) if row.get("step", step) < step]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in remaining))
        self._last_step = max((row["step"] for row in remaining), default=-1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Monitor.log`."""
        if step == self._last_step:
            self._discard_from(step)
        self._last_step = step
        row: dict[str, float | int | None] = {"step": step}
        for name, value in metrics.items():
            number = value if isinstance(value, int) else float(value)
            row[name] = number if math.isfinite(number) else None
            if row[name] is None and name not in self._reported_metrics:
                self._reported_metrics.add(name)
                _log.warning("metric '%s' is %s at step %d; %s has null instead", name, number, step, self.file_name)
        self._append(self.file_name, json.dumps(row, allow_nan=False))

    def text(self, line: str) -> None:
        """Append a line with the time to the event log (see `Monitor.text`)."""
        self._append(EVENTS_FILE, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")
        cap_log(self._folder / EVENTS_FILE)

    def _append(self, name: Path | str, line: str) -> None:
        """Append a line to a file of the run. The file and its folder may have been deleted since the last line."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
