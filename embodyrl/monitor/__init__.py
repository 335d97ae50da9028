"""Monitors: where metrics, messages and videos go. Each is one file and one registry line."""

from embodyrl.monitor.fanout import Fanout, build_monitor, missing_loggers
from embodyrl.monitor.intervals import wilson
from embodyrl.monitor.protocol import MONITORS, Monitor, RunInfo, Screen, TaskResult

MONITORS.add("console", "embodyrl.monitor.console:ConsoleMonitor")
MONITORS.add("jsonl", "embodyrl.monitor.jsonl:JsonlMonitor")
MONITORS.add("tensorboard", "embodyrl.monitor.tensorboard:TensorboardMonitor")
MONITORS.add("wandb", "embodyrl.monitor.wandb:WandbMonitor")
MONITORS.add("swanlab", "embodyrl.monitor.swanlab:SwanlabMonitor")
MONITORS.add("mlflow", "embodyrl.monitor.mlflow:MlflowMonitor")
MONITORS.add("trackio", "embodyrl.monitor.trackio:TrackioMonitor")

__all__ = [
    "MONITORS",
    "Fanout",
    "Monitor",
    "RunInfo",
    "Screen",
    "TaskResult",
    "build_monitor",
    "missing_loggers",
    "wilson",
]
