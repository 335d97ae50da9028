"""Small actor that steers a frozen model: it chooses the model's initial noise or corrects its actions.

Does not import torch.
"""
