"""Data plane: records of arrays in shared memory, and pipe messages that refer to records by record references."""
