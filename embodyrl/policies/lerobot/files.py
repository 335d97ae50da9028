"""Folders of LeRobot 0.4 policies: weights, processors with statistics, and RL heads.

Older folders (0.3) store the statistics with the weights; their names may begin with the name of a robot.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.errors import CheckpointError
from embodyrl.policies.lerobot.config import ACTION, STATE, LeRobotConfig, Normalization, read_config
from embodyrl.policies.lerobot.normalization import CLIP, Statistics
from embodyrl.policies.lerobot.settings import LeRobotSettings
from embodyrl.policies.vla.folder import (
    CONFIG_FILE,
    RANDOM_INIT_KEY,
    STATISTICS,
    STATISTICS_FILE,
    WEIGHTS_FILE,
    compute_clip_range,
    find_data_set,
    read_sft_statistics,
    read_side_file,
)
from embodyrl.policies.vla.processors import POSTPROCESSOR, PREPROCESSOR, read_processors
from embodyrl.policies.weights import check_weights, read_weights

HEADS_FILE = "embodyrl_heads.safetensors"
"""File of the weights added by RL, which LeRobot does not read."""
NETWORK = "network."
"""Prefix of the network's weights in a `ModuleWithHeads`."""
HEADS = ("value_head.", "noise_actor.", "residual_actor.")
IMAGE_MEAN, IMAGE_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Pixel statistics of ImageNet, with which LeRobot normalizes the images of all data sets."""
_OLD_STATISTIC_PATTERN = re.compile(
    r"(?:un)?normalize_\w+?\.(?:(?P<robot>.+?)[._])?buffer[._](?P<part>.+)\.(?P<name>" + "|".join(STATISTICS) + ")"
    r"|(?P<robot2>.+)\.buffer\.(?P<part2>.+)\.(?P<name2>" + "|".join(STATISTICS) + ")"
)
"""Pattern of the names of statistics in the weights of an older folder, such as
`normalize_inputs.buffer_observation_state.mean` or `so100.buffer.action.mean`."""
_COMPILED_INFIX = "._orig_mod."
_FIX = "Use config.json and weights from one folder, and the model settings of the training run."


@dataclass(frozen=True, slots=True)
class LeRobotFiles:
    """Contents of all files of a folder except the weights, and the naming scheme of the stored weights."""

    prefix: str
    """Prefix of the names of all weights: `model.` or `diffusion.`."""
    config_files: dict[str, bytes]
    """Contents of files that are copied unchanged, by file name."""
    statistics: Statistics
    """Normalization statistics by feature and name (mean, std, min, max)."""
    eps: float = 1e-8
    """Minimum denominator in the normalizer."""
    old_statistics: dict[str, Tensor] = field(default_factory=dict)
    """Statistics that an older folder stores with the weights."""
    metadata: dict[str, str] | None = None
    compiled: Mapping[str, str] = field(default_factory=dict)
    """Stored name of each weight by its name without the prefix of torch.compile, for weights of a compiled module."""

    def save(self, module: nn.Module, folder: Path) -> None:
        """Write weights, heads, config and processors into a folder."""
        for name, content in self.config_files.items():
            (folder / name).write_bytes(content)
        state = {key: tensor.detach().cpu().contiguous() for key, tensor in module.state_dict().items()}
        heads = {key: tensor for key, tensor in state.items() if key.startswith(HEADS)}
        weights = {self.prefix + key.removeprefix(NETWORK): t for key, t in state.items() if key.startswith(NETWORK)}
        weights = {self.compiled.get(key, key): tensor for key, tensor in weights.items()}
        save_file(self.old_statistics | weights, folder / WEIGHTS_FILE, self.metadata)
        if heads:
            save_file(heads, folder / HEADS_FILE)

    def load(self, module: nn.Module, folder: Path) -> None:
        """Copy the weights of a folder into a module, in place; heads are optional in the module and the folder.

        Raises:
            CheckpointError: a file is missing or damaged, or weights are missing, unexpected or of another shape.
        """
        current = module.state_dict()
        path = folder / WEIGHTS_FILE
        stored = {
            _remove_compile_prefix(key): t
            for key, t in read_weights(path).items()
            if not _OLD_STATISTIC_PATTERN.fullmatch(key)
        }
        loaded = {
            NETWORK + key.removeprefix(self.prefix) if key.startswith(self.prefix) else key: tensor
            for key, tensor in stored.items()
        }
        network = {key: tensor for key, tensor in current.items() if key.startswith(NETWORK)}
        check_weights(network, loaded, path, fix=_FIX)
        if (heads_file := folder / HEADS_FILE).is_file():
            heads, head_weights = read_weights(heads_file), {k: t for k, t in current.items() if k.startswith(HEADS)}
            check_weights(head_weights, heads, heads_file, optional_prefixes=HEADS, ignored_prefixes=HEADS, fix=_FIX)
            loaded |= heads
        with torch.no_grad():
            for key in current.keys() & loaded.keys():
                current[key].copy_(loaded[key])


def _remove_compile_prefix(key: str) -> str:
    """Return the name of a weight without the prefix that torch.compile adds."""
    return key.replace(_COMPILED_INFIX, ".")


def read_files(
    folder: Path, config: LeRobotConfig, policy_type: str, prefix: str, cfg: LeRobotSettings
) -> LeRobotFiles:
    """Read the config files, processors and statistics of a folder.

    The source of the statistics is `dataset_statistics.json`, which `embodyrl sft` writes, else the processors, else
    the weights of an older folder.

    Args:
        folder: checkpoint folder.
        config: config of the policy.
        policy_type: LeRobot's type of the policy.
        prefix: prefix of the names of all weights.
        cfg: settings of the policy.

    Raises:
        CheckpointError: a file is damaged or lacks statistics, or a processor is not supported.
    """
    read_config(folder, policy_type, type(config))
    config_files = {path.name: read_side_file(folder, path.name) for path in _list_config_files(folder)}
    raw: dict[str, Any] = json.loads(config_files[CONFIG_FILE])
    random_init = RANDOM_INIT_KEY in raw
    statistics, eps = _read_processor_statistics(folder, config_files, config, mapped=cfg.cameras is not None)
    sft_file, weights = folder / STATISTICS_FILE, folder / WEIGHTS_FILE
    old_statistics: dict[str, Tensor] = {}
    compiled: dict[str, str] = {}
    metadata = None
    if not random_init and weights.is_file():
        stored = read_weights(weights)
        with safe_open(weights, "pt") as file:
            metadata = file.metadata()
        old_statistics = {key: tensor for key, tensor in stored.items() if _OLD_STATISTIC_PATTERN.fullmatch(key)}
        compiled = {_remove_compile_prefix(key): key for key in stored if _COMPILED_INFIX in key}
        if not statistics and old_statistics and not sft_file.is_file():
            statistics = _select_old_statistics(old_statistics, config, weights, cfg.unnorm_key)
    has_statistics = statistics or sft_file.is_file() or f"{PREPROCESSOR}.json" in config_files
    if not random_init and not has_statistics and {*config.normalization_mapping.values()} - {Normalization.IDENTITY}:
        raise CheckpointError(
            f"{folder} has no statistics of states and actions: neither {PREPROCESSOR}.json nor {STATISTICS_FILE}. "
            "Download the processor files (policy_*) with the weights; without them actions cannot be unnormalized."
        )
    if not random_init and raw.get("n_action_steps") != config.n_action_steps:
        config_files[CONFIG_FILE] = json.dumps(raw | {"n_action_steps": config.n_action_steps}, indent=4).encode()
    if sft_file.is_file():
        statistics, old_statistics = dict(statistics) | _read_sft_statistics(sft_file, config), {}
        config_files |= _build_processor_files(config, statistics, eps)
    if random_init:
        statistics = _get_image_statistics(config) | dict(statistics)
        processor_files = _build_processor_files(config, statistics, eps)
        config_files = {CONFIG_FILE: config.to_json(policy_type, raw), **processor_files}
    return LeRobotFiles(prefix, config_files, statistics, eps, old_statistics, metadata, compiled)


def _list_config_files(folder: Path) -> Iterator[Path]:
    for name in (CONFIG_FILE, f"{PREPROCESSOR}.json", f"{POSTPROCESSOR}.json", "train_config.json"):
        if (folder / name).is_file():
            yield folder / name
    yield from sorted(folder.glob("policy_*processor*.safetensors"))


def _read_processor_statistics(
    folder: Path, config_files: Mapping[str, bytes], config: LeRobotConfig, *, mapped: bool
) -> tuple[Statistics, float]:
    """Return the statistics of the preprocessor's normalizer, and its eps."""
    features = config.input_features | config.output_features
    modes = {name: config.normalization_mapping.get(row.type, Normalization.IDENTITY) for name, row in features.items()}
    processors = read_processors(folder, config_files, modes, mapped=mapped)
    rows = processors.statistics.items()
    return {name: {key: torch.from_numpy(row) for key, row in part.items()} for name, part in rows}, processors.eps


def _select_old_statistics(
    old_statistics: Mapping[str, Tensor], config: LeRobotConfig, where: Path, robot: str | None
) -> Statistics:
    """Return the statistics of one robot from the weights of an older folder.

    Raises:
        CheckpointError: there are several robots and none is selected, or the selected robot has no statistics.
    """
    names = {name.replace(".", "_"): name for name in config.input_features | config.output_features}
    robots: dict[str, dict[str, dict[str, Tensor]]] = {}
    for key, tensor in old_statistics.items():
        match = _OLD_STATISTIC_PATTERN.fullmatch(key)
        assert match is not None
        owner, part, name = (match[group] or match[f"{group}2"] for group in ("robot", "part", "name"))
        if (feature := names.get(part.replace(".", "_"))) is not None:
            robots.setdefault(owner or "", {}).setdefault(feature, {})[name] = tensor
    if len(robots) <= 1 and (robot is None or not any(robots)):
        return next(iter(robots.values()), {})
    return robots[find_data_set(robot, robots, where)]


def _read_sft_statistics(path: Path, config: LeRobotConfig) -> dict[str, Mapping[str, Tensor]]:
    """Return the statistics written by `embodyrl sft`, by feature.

    With an observation history, the statistics of the last step are returned.
    """
    rows = {
        part: n | dict(zip(CLIP, compute_clip_range(n), strict=True)) for part, n in read_sft_statistics(path).items()
    }
    statistics: dict[str, Mapping[str, Tensor]] = {ACTION: _to_tensors(rows["action"], slice(-config.action_dim, None))}
    if "proprio" in rows:
        state, num_states = config.state_dim, config.state_dim + config.environment_dim
        if state:
            statistics[STATE] = _to_tensors(rows["proprio"], slice(-num_states, -num_states + state or None))
        if num_states > state:
            statistics[config.environment_name] = _to_tensors(rows["proprio"], slice(state - num_states, None))
    return statistics


def _to_tensors(rows: Mapping[str, Any], part: slice) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.asarray(row, np.float32)[part].copy()) for name, row in rows.items()}


def _get_image_statistics(config: LeRobotConfig) -> dict[str, Mapping[str, Tensor]]:
    mean, std = (torch.tensor(row)[:, None, None] for row in (IMAGE_MEAN, IMAGE_STD))
    limits = {"min": torch.zeros(3, 1, 1), "max": torch.ones(3, 1, 1)}
    return {name: {"mean": mean, "std": std, **limits} for name in config.cameras}


def _build_processor_files(config: LeRobotConfig, statistics: Statistics, eps: float) -> dict[str, bytes]:
    """Return the files of the preprocessor and the postprocessor in LeRobot's format."""
    inputs, outputs = (
        {name: feature.model_dump(mode="json") for name, feature in features.items()}
        for features in (config.input_features, config.output_features)
    )
    modes = {kind: str(mode) for kind, mode in config.normalization_mapping.items()}
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}

    def build_step(kind: str, index: int, name: str, features: dict[str, Any]) -> dict[str, Any]:
        return {
            "registry_name": kind,
            "config": {"eps": eps, "features": features, "norm_map": modes},
            "state_file": f"{name}_step_{index}_{kind}.safetensors",
        }

    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        device,
        build_step("normalizer_processor", 3, PREPROCESSOR, inputs | outputs),
    ]
    after = [build_step("unnormalizer_processor", 0, POSTPROCESSOR, outputs), device]
    flat = {
        f"{feature}.{name}": t.clone().contiguous() for feature, row in statistics.items() for name, t in row.items()
    }
    files: dict[str, bytes] = {}
    for name, steps in ((PREPROCESSOR, before), (POSTPROCESSOR, after)):
        files[f"{name}.json"] = json.dumps({"name": name, "steps": steps}, indent=2).encode()
        files |= {step["state_file"]: to_bytes(flat) for step in steps if "state_file" in step}
    return files
