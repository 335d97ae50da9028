"""Checks of a host with GPUs for embodyrl: drivers, rates, rendering, simulators and policies."""
