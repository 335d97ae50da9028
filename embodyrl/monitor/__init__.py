"""Monitors: where metrics, messages and videos go. Each is one file and one registry line."""

from embodyrl.monitor.fanout import Fanout, build_monitor
from embodyrl.monitor.intervals import wilson
from embodyrl.monitor.protocol import MONITORS, Monitor, RunInfo, Screen, TaskResult

MONITORS.add("console", "embodyrl.monitor.console:ConsoleMonitor")
MONITORS.add("jsonl", "embodyrl.monitor.jsonl:JsonlMonitor")
MONITORS.add("tensorboard", "embodyrl.monitor.tensorboard:TensorboardMonitor")

__all__ = ["MONITORS", "Fanout", "Monitor", "RunInfo", "Screen", "TaskResult", "build_monitor", "wilson"]
