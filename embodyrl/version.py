"""The version of embodyrl, in a module without imports."""

__version__ = "0.1.0"
