"""Advantage estimators and policy losses, selected by name. Importing these modules does not import torch."""
