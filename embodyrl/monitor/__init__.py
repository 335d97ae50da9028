"""Loggers of metrics, messages and videos."""

from embodyrl.monitor.protocol import MONITORS, Monitor

MONITORS.add("console", "embodyrl.monitor.console:ConsoleMonitor")
MONITORS.add("jsonl", "embodyrl.monitor.jsonl:JsonlMonitor")
MONITORS.add("tensorboard", "embodyrl.monitor.tensorboard:TensorboardMonitor")

__all__ = ["MONITORS", "Monitor"]
