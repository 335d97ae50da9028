"""Recording of the busy time of workers: utilisation metrics, and a trace file."""
