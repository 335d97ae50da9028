"""Demonstrations on disk in the LeRobot dataset layout v3.0: writing, reading, checking. Imports no torch."""
