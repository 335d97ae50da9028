"""embodyrl: reinforcement learning for vision-language-action policies inside simulators."""

__version__ = "0.1.0"
