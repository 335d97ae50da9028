"""Gymnasium's vector environments: one batch for all slots, stepped in lock-step."""
