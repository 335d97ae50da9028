"""Monitors: where metrics, messages and videos go. Each is one class and one registry line."""

from embodyrl.monitor.protocol import MONITORS, Monitor

MONITORS.add("console", "embodyrl.monitor.console:ConsoleMonitor")
MONITORS.add("jsonl", "embodyrl.monitor.jsonl:JsonlMonitor")
MONITORS.add("tensorboard", "embodyrl.monitor.tensorboard:TensorboardMonitor")
MONITORS.add("wandb", "embodyrl.monitor.hosted:WandbMonitor")
MONITORS.add("swanlab", "embodyrl.monitor.hosted:SwanlabMonitor")
MONITORS.add("mlflow", "embodyrl.monitor.hosted:MlflowMonitor")
MONITORS.add("trackio", "embodyrl.monitor.hosted:TrackioMonitor")

__all__ = ["MONITORS", "Monitor"]
