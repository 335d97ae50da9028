"""The data plane: records in shared memory, tickets through pipes."""
