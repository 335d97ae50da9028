"""The commands `ckpt` and `push`."""
