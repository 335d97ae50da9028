"""Training of one policy by several processes with FSDP."""
