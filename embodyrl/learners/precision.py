"""Weights in half precision where that changes nothing, and the parts of a model that sharding goes by."""

from torch import nn

VALUE_HEAD = "value_head"


def halve(module: nn.Module, *, sharded: bool) -> None:
    """Keep in bfloat16 what actors of fp32 weights bring to it wherever it is used; their function stays, bit for bit.

    Autocast casts the weights of matrix products and convolutions, and FSDP all of a layer (`extensions/sharded`).
    Embeddings, other norms and the value head stay as they are.
    """
    products = (nn.Linear, nn.modules.conv._ConvNd)
    whole = [*layers(module)] if sharded else []
    parts = [m for n, m in module.named_modules() if isinstance(m, products) and VALUE_HEAD not in n]
    # A tied weight that is also used outside of a product (an embedding) stays as it is.
    elsewhere = {p for m in module.modules() if not isinstance(m, products) for p in m.parameters(recurse=False)}
    chosen = {p for m in parts for p in m.parameters()} - elsewhere | {p for m in whole for p in m.parameters()}
    for parameter in chosen:
        parameter.data = parameter.data.bfloat16()


def layers(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: the elements of its outermost module lists."""
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [unit for child in module.children() for unit in layers(child)]
