"""One HTML page about a run, or about several side by side."""

from embodyrl.monitor.report.page import write_report

__all__ = ["write_report"]
