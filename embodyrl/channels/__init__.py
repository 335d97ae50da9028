"""The data plane: arrays are in shared memory; pipes carry messages with handles (tickets) of records."""
