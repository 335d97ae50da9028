"""A small actor on a frozen model, which chooses the model's initial noise or corrects its actions.

Does not import torch.
"""
