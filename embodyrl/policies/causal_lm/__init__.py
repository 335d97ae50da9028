"""Causal and vision-language models in the Hugging Face layout.

Importing this package does not import torch or transformers.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from safetensors import SafetensorError, safe_open

from embodyrl.config.paths import resolve_asset
from embodyrl.errors import CheckpointError, ConfigError, EmbodyError, reject_malformed
from embodyrl.files import read_json
from embodyrl.policies.causal_lm.settings import CausalLMSettings
from embodyrl.policies.causal_lm.sizes import TextSizes, read_image_sizes, read_sizes
from embodyrl.policies.protocol import Policy, PolicyRequest
from embodyrl.policies.vla.adapter import ADAPTER_CONFIG, find_unused_adapter_keys
from embodyrl.text.chat import ChatTemplate, find_end_token_problem, find_roles_problem
from embodyrl.text.gguf import language_model_folder
from embodyrl.text.model_folder import find_missing_weights, list_weight_files
from embodyrl.types import ActionKind, EnvSpec, InputSpec, PolicyCosts, PolicySpec

BYTES_PER_TOKEN = 32
"""Maximum bytes per token of a reply, far above the average of any language; longer text is truncated."""

BYTES_PER_PROMPT_TOKEN = 4
"""Average bytes per token of a prompt; English text has four to five."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLMFactory:
    """Factory of `CausalLMPolicy`; implements `PolicyFactory`."""

    name: str
    default_folder: str | None = None
    """Folder in this package with config and character tokenizer of a small Llama, used if `model.path` is not set.

    The weights are initialized from the seed."""
    default_num_parameters: int = 0
    reads_images: bool = False
    """True for a vision-language model (`AutoModelForImageTextToText`), which accepts images in prompts."""
    settings: ClassVar = CausalLMSettings

    def validate(self, cfg: CausalLMSettings) -> list[str]:
        """Return config errors with fixes, one line each."""
        if problems := find_unused_adapter_keys(cfg.lora):
            return problems
        if cfg.path is None:
            if self.default_folder is not None:
                return []
            kind = "vision-" if self.reads_images else "causal "
            return [f"model.path is not set: {self.name} needs the folder of a Hugging Face {kind}language model."]
        try:
            folder = language_model_folder(cfg.path)
        except EmbodyError as error:
            return [str(error)]
        missing = [file for file in ("config.json", "tokenizer_config.json") if not (folder / file).is_file()]
        try:
            if cfg.chat and not missing and ChatTemplate.from_settings(cfg, folder) is None:
                return [f"model.chat=true: the tokenizer in {cfg.path} has no chat template; remove model.chat."]
        except EmbodyError as error:
            return [str(error)]
        problems = [
            f"model.path={cfg.path}: no {file} there; use a folder written by `save_pretrained`." for file in missing
        ]
        if not problems and (problem := find_missing_weights(folder)):
            problems.append(f"model.path={cfg.path}: {problem}")
        return problems

    def spec(self, cfg: CausalLMSettings, env: EnvSpec, value_dim: int) -> PolicySpec:
        """Return the policy spec: a chunk is a reply, an action is one token.

        Raises:
            ConfigError: the chat template rejects messages of the environment.
        """
        folder = self.folder(cfg)
        template = ChatTemplate.from_settings(cfg, folder)
        if template is not None:
            role_problems = (find_roles_problem(template, roles, parts=self.reads_images) for roles in env.text.roles)
            if problems := [f"model.path={cfg.path}: {problem}" for problem in role_problems if problem]:
                raise ConfigError(problems[0])
        end_warning = None if template is None else find_end_token_problem(template, folder, parts=self.reads_images)
        num_images = len(env.cameras.names) if self.reads_images else 0
        return PolicySpec(
            inputs=InputSpec(instructions=True, num_images=num_images),
            name=self.name,
            num_action_chunks=cfg.num_action_chunks,
            action_dim=1,
            tokens_per_chunk=cfg.num_action_chunks,
            value_dim=value_dim,
            warnings=(end_warning,) if end_warning else (),
            action_kinds=frozenset({ActionKind.text}),
            reply_bytes=BYTES_PER_TOKEN * cfg.num_action_chunks,
            can_be_reward_model=not (cfg.is_lora or self.reads_images),
        )

    def costs(self, cfg: CausalLMSettings, env: EnvSpec, value_dim: int) -> PolicyCosts:
        """Estimate parameters, memory and FLOPs from config.json and the headers of the weight files."""
        folder = self.folder(cfg)
        size, num_images = read_sizes(folder, cfg), len(env.cameras.names) if self.reads_images else 0
        reply_tokens = cfg.num_action_chunks
        if env.text.prompt_tokens:
            tokens = max(1, env.text.max_replies) * reply_tokens + env.text.prompt_tokens
        else:
            tokens = reply_tokens + -(-env.text.prompt_bytes // BYTES_PER_PROMPT_TOKEN)
        total = self.default_num_parameters if cfg.path is None else _count_parameters(folder)
        rank = _get_rank(cfg)
        adapters, tower_bytes = size.count_adapter_parameters(rank), 0
        if self.reads_images:
            image_sizes = read_image_sizes(folder, cfg, *env.cameras.size)
            tower = image_sizes.tower
            tokens += num_images * image_sizes.tokens
            tower_bytes = num_images * image_sizes.patches * tower.layers * tower.bytes_per_token
            adapters += tower.count_adapter_parameters(rank)
        residual_bytes = 4 if not (cfg.uses_bf16 and cfg.is_lora) else 2
        return PolicyCosts(
            num_parameters=total,
            num_trained=adapters + _count_full_parameters(cfg, size) if cfg.is_lora else None,
            activation_bytes=tokens * size.layers * size.bytes_per_token + tower_bytes,
            shared_bytes=(0, 0) if self.reads_images else size.shared_bytes(tokens - reply_tokens, reply_tokens),
            tensor_fractions=size.tensor_fractions,
            recomputed_bytes=tokens * size.layers * residual_bytes * size.width + tower_bytes,
            largest_layer=(size.layer_parameters, tokens * size.bytes_per_token),
            outside_layers=size.outside_parameters,
            logit_bytes=size.logit_bytes(reply_tokens),
            output_gradient_bytes=size.output_gradient_bytes,
            inference_bytes=tokens * size.layers * (6 if cfg.uses_bf16 else 8) * size.kv_width + 12 * size.vocabulary,
            sample_tokens=tokens,
            reply_tokens=reply_tokens,
            forward_flops=2.0 * total * tokens,
            act_passes=reply_tokens,
        )

    def build(self, cfg: CausalLMSettings, request: PolicyRequest) -> Policy:
        """Build the policy with the weights in `cfg.path`, or the included small model with weights from the seed.

        Raises:
            CheckpointError: the folder cannot be loaded.
        """
        from embodyrl.policies.causal_lm.critic import PolicyWithCritic

        if request.critic is None:
            return self._build(cfg, request)
        # A critic has no adapters: all its weights are trained and stored in its folder.
        critic = self._build(cfg.without_adapters(request.critic), replace(request, backend="hf"))
        return PolicyWithCritic(self._build(cfg, replace(request, value_dim=0)), critic, request.critic)

    def _build(self, cfg: CausalLMSettings, request: PolicyRequest) -> Policy:
        from embodyrl.policies.causal_lm.policy import CausalLMPolicy

        spec = self.spec(cfg, request.env, request.value_dim)
        return CausalLMPolicy(spec, cfg, self.folder(cfg), request, reads_images=self.reads_images)

    def folder(self, cfg: CausalLMSettings) -> Path:
        path = cfg.path or self.default_folder
        assert path is not None, "`validate` rejects a missing path"
        folder = language_model_folder(path)
        if (folder / "adapter").is_dir() and not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{path} contains only adapters. Merge them with their base model: `embodyrl ckpt export RUN FOLDER`, "
                "then use this folder."
            )
        return folder


def _get_rank(cfg: CausalLMSettings) -> int:
    """Return the rank of the trained adapters.

    Raises:
        CheckpointError: the config of the initial adapter is malformed.
    """
    if cfg.lora.path is None or not cfg.is_lora:
        return cfg.lora.r
    file = resolve_asset(cfg.lora.path) / ADAPTER_CONFIG
    with reject_malformed(file, "Set model.lora.path to an adapter folder in peft's format."):
        return int(read_json(file)["r"])


def _count_full_parameters(cfg: CausalLMSettings, size: TextSizes) -> int:
    """Return the number of embedding and output-matrix parameters that are fully trained next to adapters."""
    return len({"lm_head", "embed_tokens"} & {*cfg.lora.modules_to_save}) * size.vocabulary * size.width


def _count_parameters(folder: Path) -> int:
    """Return the number of parameters from the headers of the weight files.

    Raises:
        CheckpointError: a header is damaged.
    """
    total = 0
    for file in list_weight_files(folder, "*.safetensors"):
        fix = "Download the file again."
        with reject_malformed(file, fix, SafetensorError), safe_open(file, framework="np") as weights:
            total += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return total


CAUSAL_LM = CausalLMFactory(name="causal_lm")
TINY = CausalLMFactory(name="causal_lm_tiny", default_folder="assets/causal_lm_tiny", default_num_parameters=533_120)
VISION_LM = CausalLMFactory(name="vision_lm", reads_images=True)
VISION_TINY = CausalLMFactory(
    name="vision_lm_tiny", default_folder="assets/vision_lm_tiny", default_num_parameters=590_592, reads_images=True
)
"""Tiny vision-language model (Idefics3) with a one-layer vision tower and four tokens per image."""
