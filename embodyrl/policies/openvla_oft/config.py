"""JSON files of a published OpenVLA-OFT checkpoint: sizes, statistics and action tokens. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embodyrl.errors import CheckpointError, reject_malformed
from embodyrl.files import read_json
from embodyrl.policies.files import TRANSFORMERS_FIELDS, check_keys
from embodyrl.policies.openvla_oft.settings import OftSettings
from embodyrl.policies.protocol import POLICIES
from embodyrl.policies.vla.folder import (
    CONFIG_FILE,
    RANDOM_INIT_KEY,
    STATISTICS_FILE,
    check_statistics,
    find_data_set,
)
from embodyrl.registry import closest
from embodyrl.types import FloatArray, IntArray

STATISTIC_NAMES = ("mean", "std", "min", "max", "q01", "q10", "q50", "q90", "q99")
NORMALIZATIONS = {"bounds_q99": ("q01", "q99"), "bounds": ("min", "max")}
"""Two statistics that map to -1 and 1, by `model.action_normalization`. LIBERO and Bridge use q99, ALOHA min/max."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Values that normalization maps to -1 and 1, by dimension. Dimensions whose `mask` is False are unchanged."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Normalization statistics by data set, from `dataset_statistics.json` or from `norm_stats` of config.json."""

    sets: Mapping[str, Any]
    folder: Path

    def find(self, *keys: str | None) -> str:
        """Return the data set of the first key that is set; without keys, the only data set (see `find_data_set`).

        Raises:
            CheckpointError: see `find_data_set`.
        """
        return find_data_set(next((key for key in keys if key), None), self.sets, self.folder)

    def bounds(self, data_set: str, part: str, normalization: str) -> Bounds:
        """Return the bounds of `action` or `proprio`; without a mask every dimension is normalized.

        Raises:
            CheckpointError: the data set lacks the part or its fields, or the fields are malformed.
        """
        low_name, high_name = NORMALIZATIONS[normalization]
        where = f"{self.folder / STATISTICS_FILE}: data set '{data_set}'"
        fix = "Download the file again, or check model.action_normalization and model.use_proprio."
        with reject_malformed(f"{where}: {part}", fix):
            entry = self.sets[data_set][part]
            check_keys(
                entry, f"{where}: {part}", ignored=(*STATISTIC_NAMES, "count", *(["mask"] if part == "action" else []))
            )
            low, high = (tuple(map(float, entry[name])) for name in (low_name, high_name))
            mask = tuple(map(bool, entry.get("mask", [True] * len(low)))) if part == "action" else (True,) * len(low)
            limits = {
                name: tuple(map(float, entry[name])) for name in ("min", "max") if len(entry.get(name, ())) == len(mask)
            }
        if not len(low) == len(high) == len(mask):
            raise CheckpointError(
                f"{where} has {part} {low_name}, {high_name} and mask of different lengths. Download the file again."
            )
        used_statistics = {
            name: np.compress(mask, row) for name, row in (limits | {low_name: low, high_name: high}).items()
        }
        check_statistics(used_statistics, f"{where}: {part}", varies=part == "action")
        return Bounds(low=low, high=high, mask=mask)


def unnormalize(normalized: npt.NDArray[np.floating], bounds: Bounds) -> FloatArray:
    """Map values [..., D] from -1..1 to the units of the training data; masked dimensions are unchanged."""
    low, high = np.asarray(bounds.low), np.asarray(bounds.high)
    # 1e-8 is not needed without a division, but makes results bit-identical to those of the published code.
    scaled = 0.5 * (normalized + 1.0) * (high - low + 1e-8) + low
    return np.where(bounds.mask, scaled, normalized).astype(np.float32)


def normalize(values: npt.ArrayLike, bounds: Bounds, *, flat_to_zero: bool = True) -> npt.NDArray[np.float64]:
    """Map values [..., D] of the training data to -1..1 (clipped), the inverse of `unnormalize`.

    With `flat_to_zero`, dimensions with equal bounds become 0, as in training targets. The published inference code
    does not do this for proprioception.
    """
    low, high = np.asarray(bounds.low), np.asarray(bounds.high)
    raw = np.asarray(values, dtype=np.float64)
    scaled = np.clip(2.0 * (raw - low) / (high - low + 1e-8) - 1.0, -1.0, 1.0)
    if flat_to_zero:
        scaled = np.where(low == high, 0.0, scaled)
    return np.where(bounds.mask, scaled, raw)


class ActionTokenizer:
    """Tokenizer of actions with uniform bins over -1..1; the highest value has the lowest id.

    `encode`: id = Vd - digitize(clip(a, -1, 1), edges) with `n_bins` edges; `decode` returns the center of the bin. The
    two lowest ids share one center, because n_bins edges enclose n_bins - 1 bins.
    """

    def __init__(self, *, vocab_end: int, n_bins: int) -> None:
        self.vocab_end = vocab_end
        self.n_bins = n_bins
        self._edges = np.linspace(-1.0, 1.0, n_bins)
        self._centers = (self._edges[:-1] + self._edges[1:]) / 2.0

    def encode(self, normalized: npt.ArrayLike) -> IntArray:
        """Return token ids of normalized actions; values outside -1..1 are clipped."""
        clipped = np.clip(np.asarray(normalized, dtype=np.float64), -1.0, 1.0)
        return (self.vocab_end - np.digitize(clipped, self._edges)).astype(np.int64)

    def decode(self, ids: IntArray) -> npt.NDArray[np.float64]:
        """Return bin centers in -1..1 of token ids; ids outside the range are clipped."""
        return self._centers[np.clip(self.vocab_end - ids - 1, 0, len(self._centers) - 1)]


PREPROCESSOR_FILE = "preprocessor_config.json"
TINY_VIT_FILE = "tiny_vit_specs.json"
RANDOM_ON_DEVICE = "random_on_device"
VALUE_HIDDEN = (512, 128)

_KNOWN_VITS: dict[str, dict[str, Any]] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": {
        "patch_size": 14, "embed_dim": 1024, "depth": 24, "num_heads": 16, "mlp_ratio": 4.0,
        "class_token": True, "reg_tokens": 4, "init_values": 1e-5, "global_pool": "token",
    },
    "vit_so400m_patch14_siglip_224": {
        "patch_size": 14, "embed_dim": 1152, "depth": 27, "num_heads": 16, "mlp_ratio": 3.7362,
        "class_token": False, "reg_tokens": 0, "init_values": None, "global_pool": "map",
    },
}  # fmt: skip

_FIELDS = (
    *TRANSFORMERS_FIELDS,
    *("embodyrl_init", "hf_llm_id", "image_sizes", "llm_backbone_id", "llm_max_length", "n_action_bins", "norm_stats"),
    *("pad_to_multiple_of", "text_config", "timm_model_ids", "vision_backbone_id"),
)
_RESIZE = {"image_resize_strategy": ("resize-naive",), "use_fused_vision_backbone": (True, None)}
_SUPPORTED_VALUES = _RESIZE | {
    "model_type": ("openvla", "prismatic"),
    "arch_specifier": ("no-align+fused-gelu-mlp",),
    "timm_override_act_layers": ([None, None],),
}
_PREPROCESSOR_FIELDS = (
    *("auto_map", "image_processor_type", "input_sizes", "means", "processor_class", "stds"),
    *("tvf_crop_params", "tvf_letterbox_fill", "tvf_normalize_params", "tvf_resize_params"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VitSpec:
    """Sizes of one vision tower."""

    image_size: int
    patch_size: int
    width: int
    depth: int
    heads: int
    mlp_hidden: int
    class_token: bool
    reg_tokens: int
    layer_scale: bool
    attn_pool: bool
    """True if the checkpoint contains an (unused) attention pool."""

    @property
    def num_patches(self) -> int:
        """Number of patches of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_prefix(self) -> int:
        """Number of class and register tokens before the patch tokens; the features exclude them."""
        return int(self.class_token) + self.reg_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSpec:
    """Sizes of the language model, named as in its config; transformers stores only differences from these defaults."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    bos_token_id: int = 1
    eos_token_id: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelNorm:
    """Normalization of one tower's pixels in 0..1."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OftOptions:
    """Options of the model that come from the settings instead of the checkpoint's JSON files."""

    cfg: OftSettings
    autoregressive: bool = False
    """True for OpenVLA, which predicts token by token with a causal mask. False for OpenVLA-OFT, which predicts all
    tokens in parallel with full attention."""
    state_dim: int = 0
    """Dimension of the proprioceptive state; 0: not used."""
    value_dim: int = 0

    @property
    def num_action_tokens(self) -> int:
        """L = K A, the number of action tokens of a chunk."""
        return self.cfg.num_action_chunks * self.cfg.action_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class OftConfig:
    """Contents of the JSON files of a checkpoint folder."""

    folder: Path
    towers: tuple[VitSpec, VitSpec]
    """Vision towers in the order of the image channels: DINOv2, SigLIP."""
    pixel_norms: tuple[PixelNorm, PixelNorm]
    llama: LlamaSpec
    pad_token_id: int
    action_vocab_end: int
    """Vd: the highest action id plus 1; embedding rows from Vd on are padding."""
    n_bins: int
    statistics: Statistics
    random_init: bool
    """True if the folder requests random initial weights instead of containing weights."""
    random_on_device: bool
    """True if random weights are generated on the model's device (for benchmarks): fast, but they depend on the device.
    """

    @property
    def image_size(self) -> int:
        """S: side of the model's square input in pixels."""
        return self.towers[0].image_size

    @property
    def action_vocab_start(self) -> int:
        """Lowest action id."""
        return self.action_vocab_end - self.n_bins


def read_config(folder: Path) -> OftConfig:
    """Read config.json, preprocessor_config.json and dataset_statistics.json of a checkpoint folder.

    Raises:
        CheckpointError: a file or field is missing, malformed, or describes an unsupported architecture.
    """
    files = f"{CONFIG_FILE}, {PREPROCESSOR_FILE}, {STATISTICS_FILE} and {TINY_VIT_FILE}"
    with reject_malformed(f"A JSON file in {folder}", f"Take {files} from one repository."):
        return _parse(folder)


def _parse(folder: Path) -> OftConfig:
    config = _read_json(folder / CONFIG_FILE)
    where = folder / CONFIG_FILE
    if isinstance(kind := config.get("type"), str):
        model_name = kind if kind in POLICIES.names() else "lerobot"
        raise CheckpointError(f"{where} describes a LeRobot policy of type '{kind}'. Set model={model_name}.")
    ids = _get_field(config, "timm_model_ids", where)
    sizes = _get_field(config, "image_sizes", where)
    if len(ids) != 2 or len(set(sizes)) != 1:
        raise CheckpointError(
            f"{where} has timm_model_ids {ids} and image_sizes {sizes}; OpenVLA-OFT has two vision towers of one image "
            f"size (DINOv2 and SigLIP). This is another model; use an OpenVLA-OFT checkpoint."
        )
    check_keys(
        config, where, ignored=tuple(name for name in _FIELDS if name != "model_type"), supported=_SUPPORTED_VALUES
    )
    llama = _read_llama(_get_field(config, "text_config", where), where)
    statistics = folder / STATISTICS_FILE
    # Fine-tuned checkpoints have a separate file; the base model's statistics are in config.json.
    raw = _read_json(statistics) if statistics.exists() else _get_field(config, "norm_stats", where)
    return OftConfig(
        folder=folder,
        towers=(_read_vit(ids[0], sizes[0], folder), _read_vit(ids[1], sizes[1], folder)),
        pixel_norms=_read_pixel_norms(folder),
        llama=llama,
        pad_token_id=int(_get_field(config, "pad_token_id", where)),
        # The embedding table is padded; action ids count down from the end of the real vocabulary.
        action_vocab_end=llama.vocab_size - int(_get_field(config, "pad_to_multiple_of", where)),
        n_bins=int(_get_field(config, "n_action_bins", where)),
        statistics=Statistics(raw, folder),
        random_init=config.get(RANDOM_INIT_KEY) in ("random", RANDOM_ON_DEVICE),
        random_on_device=config.get(RANDOM_INIT_KEY) == RANDOM_ON_DEVICE,
    )


def _read_json(path: Path) -> dict[str, Any]:
    with reject_malformed(path, "Use a checkpoint in the published OpenVLA-OFT layout, and download all its files."):
        content = read_json(path)
        if not isinstance(content, dict):
            raise TypeError(f"it contains a {type(content).__name__}, not a JSON object")
        return content


def _get_field(data: Mapping[str, Any], name: str, where: Path) -> Any:
    if name not in data:
        raise CheckpointError(
            f"{where} has no field '{name}'.{closest(name, data)} The file is truncated or not from an OpenVLA-OFT "
            "checkpoint; download it again."
        )
    return data[name]


def _read_llama(text: Mapping[str, Any], where: Path) -> LlamaSpec:
    rope = dict(text.get("rope_parameters") or {})  # transformers 5
    fields_with_rope = {**text, **({"rope_theta": rope.pop("rope_theta")} if "rope_theta" in rope else {})}
    values: dict[str, Any] = {
        f.name: type(f.default)(fields_with_rope.get(f.name, f.default)) for f in fields(LlamaSpec)
    }
    spec = LlamaSpec(**values)
    supported = {
        "model_type": ("llama",),
        "hidden_act": ("silu",),
        "num_key_value_heads": (spec.num_attention_heads,),
        "head_dim": (spec.hidden_size // spec.num_attention_heads,),
    }
    ignored = {*TRANSFORMERS_FIELDS, *values, "rope_parameters"} - supported.keys()
    fix = "This language model is not supported; use a checkpoint with a Llama-2 backbone."
    check_keys(text, f"{where}: text_config", ignored=ignored, supported=supported, fix=fix)
    check_keys(rope, f"{where}: rope_parameters", supported={"rope_type": ("default",)}, fix=fix)
    return spec


def _read_vit(name: str, image_size: int, folder: Path) -> VitSpec:
    known_vits = dict(_KNOWN_VITS)
    if (folder / TINY_VIT_FILE).exists():
        known_vits |= _read_json(folder / TINY_VIT_FILE)
    if name not in known_vits:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: unknown vision tower '{name}'.{closest(name, known_vits)} Known: "
            f"{', '.join(known_vits)}; other towers need their dimensions in {TINY_VIT_FILE} next to config.json."
        )
    spec = known_vits[name]
    return VitSpec(
        image_size=image_size,
        patch_size=spec["patch_size"],
        width=spec["embed_dim"],
        depth=spec["depth"],
        heads=spec["num_heads"],
        mlp_hidden=int(spec["embed_dim"] * spec["mlp_ratio"]),
        class_token=spec["class_token"],
        reg_tokens=spec["reg_tokens"],
        layer_scale=spec["init_values"] is not None,
        attn_pool=spec["global_pool"] == "map",
    )


def _read_pixel_norms(folder: Path) -> tuple[PixelNorm, PixelNorm]:
    """Return the pixel statistics, preferably `tvf_normalize_params`, which the published processor uses."""
    where = folder / PREPROCESSOR_FILE
    data = _read_json(where)
    supported = _RESIZE | {"interpolations": (["bicubic", "bicubic"],)}
    check_keys(data, where, ignored=_PREPROCESSOR_FIELDS, supported=supported)
    params = data.get("tvf_normalize_params")
    means = [p["mean"] for p in params] if params else _get_field(data, "means", where)
    stds = [p["std"] for p in params] if params else _get_field(data, "stds", where)
    if [len(x) for x in (*means, *stds)] != [3] * 4:
        raise CheckpointError(
            f"{where} must contain mean and std of three channels for two towers. Download the file again."
        )
    first, second = (PixelNorm(mean=tuple(m), std=tuple(s)) for m, s in zip(means, stds, strict=True))
    return first, second
