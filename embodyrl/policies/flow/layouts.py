"""Mapping between the weight names of published checkpoints and the names in embodyrl; unknown names are errors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from embodyrl.errors import CheckpointError

EMBEDDING = "language.embed_tokens.weight"
HEADS = ("value_head.", "noise_head.", "noise_actor.", "residual_actor.")
"""Heads of `FlowModule` that RL adds, optional in the model and the checkpoint. The first two have RLinf's names."""
_CHARACTERISTIC_PREFIXES = (
    "vision.embeddings.",
    "language.layers.",
    "expert.layers.",
    "action_in_proj.",
    "action_out_proj.",
)
_OLD_STATISTICS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
"""Prefixes of normalization statistics, which old versions of LeRobot stored with the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Naming scheme of the weights in a published checkpoint format."""

    name: str
    renames: tuple[tuple[str, str], ...]
    """(prefix in embodyrl, published prefix) pairs; the first match is used."""
    tied: str | None = None
    """Name of an output matrix that is tied to the token embedding. Some files contain only this matrix."""
    unused: tuple[tuple[str, str], ...] = ()
    """Unused matrices that the published loader requires, as (published name, stack). Shape: [vocab, stack width]."""

    def count_matching_prefixes(self, keys: Iterable[str]) -> int:
        """Return the number of characteristic prefixes of this layout that occur among the keys."""
        present = tuple(keys)
        return sum(any(key.startswith(self.to_external(part)) for key in present) for part in _CHARACTERISTIC_PREFIXES)

    def to_local(self, key: str) -> str:
        """Rename a weight from this layout's name to embodyrl's name; unknown names are unchanged."""
        return _rename(key, ((external, local) for local, external in self.renames))

    def to_external(self, key: str) -> str:
        """Rename a weight from embodyrl's name to this layout's name; unknown names are unchanged."""
        return _rename(key, self.renames)


def _rename(key: str, pairs: Iterable[tuple[str, str]]) -> str:
    for old, new in pairs:
        if key.startswith(old):
            return new + key[len(old) :]
    return key


def _build_paligemma_layout(
    name: str,
    *,
    vlm: str,
    expert: str,
    vision_level: str = "vision_model.",
    language_level: str = "",
    head: str = "",
    actions: str = "",
    tied: str | None = None,
    unused: str,
) -> Layout:
    """Build a layout of pi0 and pi0.5 on PaliGemma.

    `head` is the prefix of all projections of the flow head; `actions` is a further prefix of the input projections.
    """
    input_names = ("action_in_proj.", "state_proj.", "action_time_mlp_in.", "action_time_mlp_out.")
    output_names = ("action_out_proj.", "time_mlp_in.", "time_mlp_out.", *HEADS)
    return Layout(
        name=name,
        renames=(
            ("vision.", f"{vlm}vision_tower.{vision_level}"),
            ("language.", f"{vlm}language_model.{language_level}"),
            ("expert.", expert),
            ("projector.", f"{vlm}multi_modal_projector.linear."),
            *((part, f"{head}{actions}{part}") for part in input_names),
            *((part, f"{head}{part}") for part in output_names),
        ),
        tied=tied,
        unused=((unused, "expert"),),
    )


def _build_openpi_layout(name: str, head: str = "", **levels: str) -> Layout:
    prefix = f"{head}paligemma_with_expert."
    return _build_paligemma_layout(
        name,
        vlm=f"{prefix}paligemma.model.",
        expert=f"{prefix}gemma_expert.model.",
        head=head,
        tied=f"{prefix}paligemma.lm_head.weight",
        unused=f"{prefix}gemma_expert.lm_head.weight",
        **levels,
    )


def _build_transformers_layout(name: str, vision_level: str = "", **projections: str) -> Layout:
    return _build_paligemma_layout(
        name,
        vlm="model.vlm.",
        expert="model.dit.",
        vision_level=vision_level,
        unused="model.dit.embed_tokens.weight",
        **(projections or {"actions": "embed_action_time."}),
    )


OPENPI = _build_openpi_layout("openpi")
"""Layout of openpi's PyTorch checkpoints, and of RLinf's checkpoints with RL heads."""
LEROBOT = _build_openpi_layout("lerobot", "model.")
TRANSFORMERS = _build_transformers_layout("transformers")
"""Layout of `PI0ForConditionalGeneration` in recent versions of transformers (5.2x)."""
TRANSFORMERS_OLD = _build_transformers_layout("transformers (older)", "vision_model.")
_TRANSFORMERS_SAVED = (
    _build_openpi_layout("transformers (saved fresh)", vision_level="", language_level="model."),
    _build_transformers_layout("transformers (saved again)", head="model."),
    _build_transformers_layout("transformers (older, saved again)", "vision_model.", head="model."),
)
"""Layouts written by transformers 5.23, whose `save_pretrained` reverts the renaming done while loading."""
_SMOL = "model.vlm_with_expert."
SMOLVLA_LEROBOT = Layout(
    name="lerobot (SmolVLA)",
    renames=(
        ("vision.", f"{_SMOL}vlm.model.vision_model."),
        ("language.", f"{_SMOL}vlm.model.text_model."),
        ("expert.", f"{_SMOL}lm_expert."),
        ("projector.", f"{_SMOL}vlm.model.connector.modality_projection.proj."),
        *(
            (part, f"model.{part}")
            for part in ("action_in_proj.", "action_out_proj.", "state_proj.", "action_time_mlp_", *HEADS)
        ),
    ),
    unused=((f"{_SMOL}vlm.lm_head.weight", "language"),),
)
LAYOUTS = (OPENPI, LEROBOT, TRANSFORMERS, TRANSFORMERS_OLD, *_TRANSFORMERS_SAVED, SMOLVLA_LEROBOT)


def find_layout(keys: Iterable[str], where: Path) -> Layout:
    """Return the layout that matches the weight names of a checkpoint.

    Raises:
        CheckpointError: no layout matches.
    """
    names = tuple(keys)
    # If several layouts match equally well, the first is used.
    best_layout = max(LAYOUTS, key=lambda layout: layout.count_matching_prefixes(names))
    if best_layout.count_matching_prefixes(names):
        return best_layout
    first = min(names, default="none")
    raise CheckpointError(
        f"{where}: its {len(names)} weights (first name: '{first}') match no known layout. Known layouts: "
        f"{', '.join(layout.name for layout in LAYOUTS)}. The weights belong to another model, or shards are missing; "
        "use another checkpoint."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFormat:
    """Storage format of a checkpoint, for saving in the same format."""

    layout: Layout
    embedding_names: tuple[str, ...]
    """Names under which the files store the token embedding: the embedding, the tied output matrix, or both."""
    extra_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Additional weights and statistics of the files, by name."""


def build_storage_format(layout: Layout, weights: Mapping[str, Tensor]) -> StorageFormat:
    """Return the storage format of new weights in a layout.

    Unused weights that the published loader requires are zeros.
    """
    vocab, width = weights[EMBEDDING].shape
    widths = {"language": width, "expert": weights["action_in_proj.weight"].shape[0]}
    extra_tensors = {
        key: torch.zeros(vocab, widths[stack], dtype=weights[EMBEDDING].dtype) for key, stack in layout.unused
    }
    return StorageFormat(
        layout=layout, embedding_names=(layout.tied or layout.to_external(EMBEDDING),), extra_tensors=extra_tensors
    )


def to_local_names(stored: Mapping[str, Tensor], where: Path) -> tuple[dict[str, Tensor], StorageFormat]:
    """Return the weights of a full checkpoint under embodyrl's names, and the storage format.

    Raises:
        CheckpointError: no layout matches, the names mix layouts, or the output matrix differs from the embedding.
    """
    layout = find_layout(stored, where)
    unused = {key for key, _ in layout.unused}
    weights: dict[str, Tensor] = {}
    extra_tensors: dict[str, Tensor] = {}
    for key, tensor in stored.items():
        if key in unused or key.startswith(_OLD_STATISTICS) or key.endswith(".position_ids"):
            extra_tensors[key] = tensor
        elif key != layout.tied:
            local_name = layout.to_local(key)
            # Round trip: a name that is not restored would be written under another name.
            if layout.to_external(local_name) != key:
                raise CheckpointError(
                    f"{where}: '{key}' does not match the layout of the other weights ({layout.name}). The files are "
                    "from two checkpoints; use the files of a single checkpoint."
                )
            weights[local_name] = tensor
    names = [layout.to_external(EMBEDDING)] if EMBEDDING in weights else []
    if layout.tied in stored:
        assert layout.tied is not None
        names.append(layout.tied)
        tied = stored[layout.tied]
        # Some files have the embedding under the name of the output matrix only.
        embedding = weights.setdefault(EMBEDDING, tied)
        if (embedding.shape, embedding.dtype) != (tied.shape, tied.dtype) or not torch.equal(embedding, tied):
            raise CheckpointError(
                f"{where}: '{layout.tied}' and '{names[0]}' are tied weights in this model, but differ in this "
                f"checkpoint. It was trained with untied weights or merged from two checkpoints; use the original."
            )
    return weights, StorageFormat(layout=layout, embedding_names=tuple(names), extra_tensors=extra_tensors)


def to_external_names(weights: Mapping[str, Tensor], storage: StorageFormat) -> dict[str, Tensor]:
    """Rename weights for a storage format, and add the additional weights of the files."""
    stored = {storage.layout.to_external(key): tensor for key, tensor in weights.items() if key != EMBEDDING}
    first, *others = storage.embedding_names
    # Copies, because the writer would keep only one of the names of a tensor.
    stored |= {first: weights[EMBEDDING], **{name: weights[EMBEDDING].clone() for name in others}}
    return stored | dict(storage.extra_tensors)
