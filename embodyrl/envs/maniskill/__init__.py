"""ManiSkill 3 tasks (SAPIEN); importing this package loads no simulator."""
