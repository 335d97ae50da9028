"""What environments and policies take: bytes, FLOPs and seconds, from which a run's memory and rates are planned."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a policy declares about its size; zeros where it says nothing."""

    num_parameters: int = 0
    num_trained: int | None = None
    """Parameters beside them that training changes (adapters); None: it changes them all."""
    activation_bytes: int = 0
    """What one sample's forward pass keeps in memory for its backward pass, about."""
    recomputed_bytes: int = 0
    """The same with actor.gradient_checkpointing: the inputs of all layers."""
    largest_layer: tuple[int, int] = (0, 0)
    """Of the repeated layers: parameters, and what recomputing it for a sample keeps, bytes."""
    outside_layers: int = 0
    """Parameters outside the repeated layers: embeddings, output matrix, projectors."""
    scoring_bytes: tuple[int, int] = (0, 0)
    """What scoring takes once, however many samples: logits of a whole vocabulary; the same, layers recomputed."""
    acting_bytes: int = 0
    """What acting takes for each sample of its batch, about: the widest layer, or keys and values of replies."""
    sample_tokens: int = 1
    """Tokens of the longest sample, as `Record.cost` counts them."""
    forward_flops: float = 0.0
    """Of one sample's forward pass."""
    act_passes: int = 1
    """Forward passes, each of which reads all weights, for a batch of chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFootprint:
    """What an environment declares about its size; zeros where it says nothing, or where it is no matter."""

    task_bytes: int = 0
    """Memory that one loaded task takes, roughly, where a worker can only hold some of them; 0: no matter."""
    gpu_bytes: tuple[int, int] = (0, 0)
    """Its memory that an env worker takes, roughly: by itself, and for each slot (with `task_bytes` each task)."""
    chunk_s: float = 0.0
    """Seconds of one core for a chunk of 8 actions with its drawing, roughly; 0: not known, or no matter."""
