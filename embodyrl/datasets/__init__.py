"""Demonstrations on disk in the LeRobot dataset layout v3.0: writing, reading, checking. Imports no torch."""

from embodyrl.datasets.check import check_layout
from embodyrl.datasets.layout import Card, read_card
from embodyrl.datasets.reader import Demonstrations, load_demonstrations
from embodyrl.datasets.records import Demonstration, Source
from embodyrl.datasets.writer import DatasetWriter

__all__ = [
    "Card",
    "DatasetWriter",
    "Demonstration",
    "Demonstrations",
    "Source",
    "check_layout",
    "load_demonstrations",
    "read_card",
]
