"""TensorBoard event files in `<run>/tensorboard`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from embodyrl.monitor.protocol import Monitor, RunInfo

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class TensorboardMonitor(Monitor):
    """Scalars under the names of `metrics.jsonl`. Videos stay files: event files would hold every frame twice."""

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def open(self, run_dir: Path, info: RunInfo) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(run_dir / "tensorboard"), purge_step=info.resume_step)
        table = "\n".join(f"| {name} | {value} |" for name, value in info.summary.items())
        if table and info.resume_step is None:
            self._writer.add_text("summary", f"| | |\n|---|---|\n{table}", 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self._writer is not None, "log before open"
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        # A killed run should keep its last step.
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
