"""Translate configs of other RL frameworks into embodyrl experiments, or report why they cannot be translated."""
