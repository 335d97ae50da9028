"""The commands `ckpt` (manage checkpoints) and `push` (upload to the Hugging Face hub)."""
