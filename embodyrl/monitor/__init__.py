"""Monitors: where metrics, messages and videos go. Each is one class and one registry line."""

from embodyrl.monitor.protocol import MONITORS, Monitor

MONITORS.add("console", "embodyrl.monitor.console:ConsoleMonitor")
MONITORS.add("jsonl", "embodyrl.monitor.jsonl:JsonlMonitor")
MONITORS.add("tensorboard", "embodyrl.monitor.tensorboard:TensorboardMonitor")
MONITORS.add("wandb", "embodyrl.extensions.reporting.hosted:WandbMonitor")
MONITORS.add("swanlab", "embodyrl.extensions.reporting.hosted:SwanlabMonitor")
MONITORS.add("mlflow", "embodyrl.extensions.reporting.hosted:MlflowMonitor")
MONITORS.add("trackio", "embodyrl.extensions.reporting.hosted:TrackioMonitor")

__all__ = ["MONITORS", "Monitor"]
