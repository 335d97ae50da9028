"""The data plane: records in shared memory, messages with tickets through pipes."""
