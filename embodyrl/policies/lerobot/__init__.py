"""Code shared by LeRobot's imitation policies: checkpoint folders, normalization, image backbones, inference."""
