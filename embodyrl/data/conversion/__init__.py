"""Conversion of demonstrations in other formats (HDF5, RLDS, LeRobot v2) to LeRobot datasets v3.0."""
