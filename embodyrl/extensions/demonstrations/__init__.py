"""Demonstrations on disk in the LeRobot dataset layout v3.0: writing, reading, checking. Does not import torch."""
