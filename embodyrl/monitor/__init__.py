"""Loggers of metrics, messages and videos."""

from embodyrl.monitor.protocol import MONITORS, Monitor

__all__ = ["MONITORS", "Monitor"]
