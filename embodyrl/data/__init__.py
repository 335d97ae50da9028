"""Writer, reader and checks of demonstrations in the LeRobot dataset layout v3.0; importing does not load torch."""
