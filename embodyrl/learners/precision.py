"""Storage of weights in bfloat16 without a change of results, and the layers that FSDP shards separately."""

from torch import nn

VALUE_HEAD = "value_head"
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def cast_to_bfloat16(module: nn.Module, *, sharded: bool) -> None:
    """Store weights in bfloat16 if every use casts them to bfloat16 anyway, so that results do not change.

    Autocast casts the weights of matrix products and convolutions; FSDP casts all weights of a layer.
    Embeddings, norms outside of FSDP layers and the value head keep their dtype.
    """
    linear_layers = (nn.Linear, *_CONVOLUTIONS)
    sharded_layers = [*find_layers(module)] if sharded else []
    parts = [m for n, m in module.named_modules() if isinstance(m, linear_layers) and VALUE_HEAD not in n]
    # A tied weight that is also used outside of a product (an embedding) keeps its dtype.
    used_elsewhere = {
        p for m in module.modules() if not isinstance(m, linear_layers) for p in m.parameters(recurse=False)
    }
    parameters = {p for m in parts for p in m.parameters()} - used_elsewhere | {
        p for m in sharded_layers for p in m.parameters()
    }
    for parameter in parameters:
        parameter.data = parameter.data.bfloat16()


def find_layers(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: the elements of its outermost module lists."""
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [unit for child in module.children() for unit in find_layers(child)]
