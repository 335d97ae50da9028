"""Memory estimates of a language model from its config.json; does not import torch or transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.files import read_json
from embodyrl.policies.causal_lm.settings import CausalLMSettings

CHUNK_LOGITS = 2**26
"""Maximum number of logits in memory: 0.25 GiB in float32. A backward pass needs a few copies."""
_DEFAULT_MAX_PIXELS = 14 * 14 * 4 * 1280
"""Default maximum number of pixels of an image at native resolution, if the processor's config has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSizes:
    """Sizes and precision of a transformer with gated MLPs of width `hidden`; approximate for other architectures."""

    uses_bf16: bool
    adapters: bool
    """True if low-rank adapters are trained instead of the weights."""
    vocabulary: int
    width: int
    hidden: int
    layers: int
    kv_width: int
    """Width of keys and values: number of key-value heads times the head size."""
    tied: bool
    supports_sharing: bool
    """True if all layers store keys and values of every position, so that replies can share the prompt's cache."""

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of one layer."""
        return 2 * self.width * (self.width + self.kv_width) + 3 * self.width * self.hidden

    @property
    def outside_parameters(self) -> int:
        """Number of parameters of embeddings and output matrix."""
        return self.vocabulary * self.width * (1 if self.tied else 2)

    def count_adapter_parameters(self, rank: int) -> int:
        """Return the number of parameters of adapters on all linear layers except the output matrix."""
        w, m, k = self.width, self.hidden, self.kv_width
        return rank * self.layers * (2 * (w + w) + 2 * (w + k) + 3 * (w + m))

    @property
    def bytes_per_token(self) -> int:
        """Number of bytes that a layer stores per token for its backward pass, counted tensor by tensor.

        bfloat16 with float32 masters: residual stream and norms in float32, a bfloat16 copy of a norm's output for each
        linear layer; keys and values are repeated for all heads. Trained norms store their normalized inputs.
        """
        return sum(self._bytes_by_width)

    @property
    def tensor_fractions(self) -> tuple[tuple[int, float], ...]:
        """`PolicyCosts.tensor_fractions` of the tensors as wide as the residual stream, and as the MLP."""
        narrow, wide = self._bytes_by_width
        total = max(1, narrow + wide)
        return (4 * self.width, narrow / total), (4 * self.hidden, wide / total)

    @property
    def _bytes_by_width(self) -> tuple[int, int]:
        w, m = self.width, self.hidden
        if not self.uses_bf16:
            return 4 * (8 if self.adapters else 10) * w, 4 * 4 * m
        # The adapter library casts the inputs of all seven linear layers to float32.
        return (44 * w, 10 * m) if self.adapters else (34 * w, 8 * m)

    def shared_bytes(self, prompt: int, reply: int) -> tuple[int, int]:
        """Return the activation bytes of one reply and of one distinct prompt if replies share prompts.

        Return (0, 0) if the model does not support shared prompts. Each reply stores its prompt's keys and values
        repeated for all heads; each distinct prompt also stores its keys and values before the repetition.
        """
        if not self.supports_sharing:
            return 0, 0
        bytes_per_number = 2 if self.uses_bf16 else 4
        stored, repeated = self.bytes_per_token, 2 * bytes_per_number * self.width
        reply_numbers = reply * (stored - repeated) + (prompt + reply) * repeated
        return self.layers * reply_numbers, self.layers * prompt * (stored + 2 * bytes_per_number * self.kv_width)

    def logit_bytes(self, reply: int) -> tuple[int, int]:
        """Return the bytes of three float32 copies of a reply's logits, and of three copies of one chunk's logits."""
        return 4 * 3 * reply * self.vocabulary, 4 * 3 * CHUNK_LOGITS

    @property
    def output_gradient_bytes(self) -> tuple[int, int]:
        """Temporary bytes for gradients of the output matrix, without and with recomputation of layers.

        Gradients of earlier micro-batches, of earlier chunks of logits and of this chunk exist at the same time. In
        bfloat16, autocast keeps one cast of the matrix and gradients are summed in bfloat16. With recomputed layers,
        each chunk's gradient is cast and summed in float32 instead.
        """
        matrix = self.vocabulary * self.width
        if self.adapters:
            return 0, 0
        return 4 * matrix, (6 if self.uses_bf16 else 4) * matrix


def read_sizes(folder: Path, cfg: CausalLMSettings) -> TextSizes:
    """Read the sizes from a folder's config.json."""
    config: Any = read_json(folder / "config.json")
    return _parse_transformer(config.get("text_config", config), cfg)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSizes:
    """Sizes of one image in a vision-language model."""

    tower: TextSizes
    patches: int
    """Number of image patches, the input length of the vision tower."""
    tokens: int
    """Number of image tokens in the input of the language model."""


def read_image_sizes(folder: Path, cfg: CausalLMSettings, height: int, width: int) -> ImageSizes:
    """Estimate patches and tokens of an image of `height` x `width` from the folder's JSON files."""
    config = _read_optional_json(folder / "config.json")
    preprocessor = _read_optional_json(folder / "preprocessor_config.json")
    preprocessor = preprocessor or _read_optional_json(folder / "processor_config.json").get("image_processor", {})
    vision = config.get("vision_config", {})
    patch, image_size = int(vision.get("patch_size", 14)), int(vision.get("image_size") or 0)
    size = preprocessor.get("size") or {}
    if image_size:  # every image or tile is resized to this size
        longest = size.get("longest_edge", image_size)
        tiles = 1 + (-(-longest // image_size)) ** 2 if preprocessor.get("do_image_splitting", True) else 1
        patches, merge_size = tiles * (image_size // patch) ** 2, int(config.get("scale_factor", 1))
    else:
        max_pixels = preprocessor.get("max_pixels") or size.get("longest_edge") or _DEFAULT_MAX_PIXELS
        min_pixels = preprocessor.get("min_pixels") or size.get("shortest_edge") or 0
        patches = -(-max(min_pixels, min(max_pixels, height * width)) // patch**2)
        merge_size = int(vision.get("spatial_merge_size", 2))
    return ImageSizes(tower=_parse_transformer(vision, cfg), patches=patches, tokens=-(-patches // merge_size**2))


def _read_optional_json(file: Path) -> Any:
    return read_json(file) if file.is_file() else {}


def _parse_transformer(config: Any, cfg: CausalLMSettings) -> TextSizes:
    # `embed_dim` is the width of a vision tower whose `hidden_size` is the language model's width.
    width = int(config.get("embed_dim") or config.get("hidden_size", config.get("n_embd", 0)))
    heads = int(config.get("num_attention_heads", config.get("n_head", config.get("num_heads", 1))))
    head = int(config.get("head_dim") or width // max(1, heads))
    return TextSizes(
        uses_bf16=cfg.uses_bf16,
        adapters=cfg.is_lora,
        vocabulary=int(config.get("vocab_size", 0)),
        width=width,
        hidden=int(config.get("intermediate_size") or config.get("mlp_ratio", 4) * width),
        layers=int(config.get("num_hidden_layers", config.get("n_layer", config.get("depth", 0)))),
        kv_width=int(config.get("num_key_value_heads") or heads) * head,
        tied=bool(config.get("tie_word_embeddings", False)),
        supports_sharing={*(config.get("layer_types") or ())} <= {"full_attention", "sliding_attention"},
    )
