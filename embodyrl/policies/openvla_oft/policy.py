"""OpenVLA-OFT policy: `act` and `score` share one code path, so that their log-probabilities agree."""

import math
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from embodyrl.config.shared import Precision
from embodyrl.errors import ConfigError
from embodyrl.policies.openvla_oft.checkpoint import (
    RL_COMPONENTS,
    SFT_COMPONENTS,
    VALUE_HEAD,
    get_base_state,
    load_components,
    load_model,
    read_side_files,
    save_components,
    save_model,
    save_side_files,
)
from embodyrl.policies.openvla_oft.config import (
    ActionTokenizer,
    Bounds,
    OftConfig,
    OftOptions,
    normalize,
    read_config,
    unnormalize,
)
from embodyrl.policies.openvla_oft.continuous import Diffusion, L1Gaussian
from embodyrl.policies.openvla_oft.discrete import DiscreteTokens
from embodyrl.policies.openvla_oft.graphs import GraphedForward
from embodyrl.policies.openvla_oft.inputs import PromptEncoder, preprocess, resize
from embodyrl.policies.openvla_oft.lora import build_merge_transform, inject_adapters, load_adapter, save_adapter
from embodyrl.policies.openvla_oft.model import ModelInputs, OpenVlaOft
from embodyrl.policies.openvla_oft.settings import ActionHead, OftSettings
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.soft_actor.critics import Critics
from embodyrl.policies.steering.settings import WIDTHS
from embodyrl.policies.tensors import to_device
from embodyrl.policies.vla.adapter import find_adapter, get_initial_adapter, get_lora_spec
from embodyrl.policies.vla.folder import TOKENIZER_FILE
from embodyrl.policies.vla.sampling import build_scores
from embodyrl.text.model_folder import list_weight_files
from embodyrl.types import (
    ByteArray,
    FloatArray,
    ImitationLoss,
    IntArray,
    Observation,
    PolicyOutput,
    PolicyScores,
    PolicySpec,
)


class OpenVlaOftPolicy:
    """OpenVLA-OFT policy for one environment, which determines image rotation, tasks and data statistics.

    With the L1 head, implements `RegressionActor`.
    """

    frozen = False

    def __init__(self, config: OftConfig, spec: PolicySpec, options: OftOptions, request: PolicyRequest) -> None:
        self.spec = spec
        cfg = options.cfg
        self._adapter = get_lora_spec(cfg) if cfg.is_lora and request.trainable else None
        self._model = build_module(config, options, request)
        self.module: nn.Module = self._model
        self._forward = torch.compile(self._model) if cfg.compile else self._model
        self._cfg, self._env = cfg, request.env
        self._config = config
        self._temperature = request.temperature
        self._device = torch.device(request.device)
        self._actions = ActionTokenizer(vocab_end=config.action_vocab_end, n_bins=config.n_bins)
        self._head = self._build_head()
        self._load_statistics(config)
        self._prompts = PromptEncoder(
            config.folder / TOKENIZER_FILE,
            bos_token_id=config.llama.bos_token_id,
            tasks=request.env.instructions or request.env.tasks,
        )
        uses_bf16 = cfg.precision == Precision.bf16
        mixed = partial(
            torch.autocast, self._device.type, dtype=torch.bfloat16, enabled=uses_bf16 and request.trainable
        )
        # Captured casts would keep using the weights at the time of the capture.
        self._autocast = mixed(cache_enabled=not cfg.cuda_graphs)
        # Weights cast by autocast are cached until the end of a pass, which is useless if layers are recomputed.
        self._scoring = mixed(cache_enabled=not request.gradient_checkpointing)
        self._input_dtype = torch.bfloat16 if uses_bf16 and not request.trainable else torch.float32

    @torch.no_grad()
    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        """Return a chunk for each observation (see `Policy.act`).

        Tokens of the discrete head are ids, also for greedy actions. Tokens of continuous heads are bit patterns of
        float32 values; greedy actions have zero tokens and zero log-probabilities.
        """
        with self._autocast:
            sampled, value = self._head.act(self._build_inputs(obs), noise, temperature or self._temperature)
        actions = unnormalize(sampled.state.double().cpu().numpy(), self._bounds)
        return sampled.to_output(actions, value, self.spec)

    @torch.no_grad()
    def values(self, obs: Observation) -> FloatArray:
        """Return value estimates [B, V]."""
        with self._autocast:
            return self._head.values(self._build_inputs(obs)).cpu().numpy()

    @torch.no_grad()
    def features(self, obs: Observation) -> Tensor:
        """Return features [B, F] of the observations.

        Features are the concatenation of the mean hidden state of the action predictions and the greedy actions.

        Raises:
            ConfigError: the model predicts tokens one by one.
        """
        if self._model.options.autoregressive:
            raise ConfigError(
                f"model '{self.spec.name}' decodes autoregressively and computes no features of a chunk. "
                "Use OpenVLA-OFT."
            )
        with self._autocast:
            hidden, proposed = self._head.propose(self._build_inputs(obs))
        return torch.cat([hidden.float().mean(1), proposed.to(hidden.device).float().flatten(1)], 1)

    def propose(self, obs: Observation) -> tuple[Tensor, Tensor]:
        """Return critic inputs [B, F] and greedy chunks [B, L] (see `RegressionActor.propose`).

        Critic inputs are the mean hidden state of the action predictions, the greedy actions and the proprioception.
        """
        with self._scoring:
            inputs = self._build_inputs(obs)
            hidden, actions = self._head.propose(inputs)
        chunks = actions.float().flatten(1)
        state = [] if inputs.state is None else [inputs.state.float()]
        return torch.cat([hidden.float().mean(1), chunks, *state], 1), chunks

    @property
    def width(self) -> int:
        """L: number of values per chunk."""
        return self.spec.num_action_chunks * self.spec.action_dim

    def tokens_to_chunks(self, tokens: IntArray) -> Tensor:
        """Return the sampled actions of the L1 head, clipped to -1..1 (see `RegressionActor.tokens_to_chunks`)."""
        return L1Gaussian.unpack_samples(tokens, self._device).clamp(-1.0, 1.0)

    def normalize(self, actions: FloatArray, obs: Observation | None) -> Tensor:
        """Return normalized actions [B, L] in -1..1 (see `RegressionActor.normalize`)."""
        return to_device(normalize(actions, self._bounds).astype(np.float32), self._device).flatten(1)

    def build_critics(self, count: int, seed: int, *, layer_norm: bool) -> nn.Module:
        """Build critics for the inputs that `propose` returns (see `RegressionActor.build_critics`)."""
        features = self._config.llama.hidden_size + self.width + self._model.options.state_dim
        generator = torch.Generator().manual_seed(seed)
        return Critics(count, (features + self.width, *WIDTHS), generator, layer_norm=layer_norm).to(self._device)

    def resize(self, images: ByteArray) -> ByteArray:
        """Resize images as in `act` with the RLinf pipeline (see `ResizesImages`)."""
        rotation, size = self._env.cameras.rotation_deg, self._config.image_size
        return resize(images[:, : self.spec.inputs.num_images], rotation_deg=rotation, size=size, device=self._device)

    def score(self, obs: Observation, tokens: IntArray) -> PolicyScores:
        """Return log-probabilities, entropies and values of tokens [B, L], with gradients."""
        with self._scoring:
            logprob, entropy, value = self._head.score(self._build_inputs(obs), tokens, self._temperature)
        return build_scores((logprob, entropy), value, self.spec)

    def encode_actions(self, actions: FloatArray) -> IntArray:
        """Return tokens of actions (see `TokenPolicy.encode_actions`).

        Raises:
            ConfigError: model.action_head is continuous, so its actions have no tokens.
        """
        if self._cfg.action_head is not ActionHead.discrete:
            raise ConfigError(
                f"model.action_head={self._cfg.action_head} has no action tokens; use model.action_head=discrete."
            )
        return self._actions.encode(normalize(actions, self._bounds)).reshape(len(actions), -1)

    def imitate(self, obs: Observation, actions: FloatArray) -> ImitationLoss:
        """Return the loss of actions [B, K, A] as in the official training.

        Discrete head: cross-entropy of the action tokens and STOP over all ids. L1 head: mean absolute error of the
        normalized actions. Diffusion head: squared error of the noise; the accuracy of actions is computed only in
        validation, because it needs all denoising steps.
        """
        with self._scoring:
            return self._head.imitate(self._build_inputs(obs), normalize(actions, self._bounds))

    def save(self, folder: Path) -> None:
        """Write the weights in the published layout, in their dtype (fp32 in training).

        With adapters, only the adapters (`lora_adapter/`) and the fully trained modules are written.
        """
        if self._adapter is None:
            save_model(self._model, folder, self._side_files)
            return
        save_adapter(self._model, self._adapter, folder)
        save_components(self._model.state_dict(), folder)
        save_side_files(folder, self._side_files)

    def load_weights(self, folder: Path) -> None:
        """Replace the weights in place (see `Policy.load_weights`); keep the value head if none is saved.

        A folder that contains only an adapter needs the same `model.path`. The adapter is loaded if adapters are
        trained, otherwise merged into the weights of `model.path`. The folder's action statistics replace the
        current statistics, because the folder's weights predict actions normalized with the folder's statistics.
        """
        adapter = None if list_weight_files(folder) else find_adapter(folder)
        model, base = self._model, self._config.folder
        if adapter is None:
            load_model(model, folder)
        elif self._adapter is None:
            transform = build_merge_transform(adapter, get_base_state(model), base)
            load_model(model, base, transform=transform, components_folder=folder)
        else:
            load_adapter(model, adapter)
            load_components(model, folder)
        self._load_statistics(read_config(folder))

    def _load_statistics(self, config: OftConfig) -> None:
        """Use the statistics of a checkpoint, and keep its tokenizer and JSON files for `save`."""
        statistics, kind = config.statistics, self._cfg.action_normalization
        data_set = statistics.find(self._cfg.unnorm_key, self._env.benchmark.unnorm_key)
        self._bounds = statistics.bounds(data_set, "action", kind)
        self._state_bounds = statistics.bounds(data_set, "proprio", kind) if self.spec.inputs.state else None
        self._side_files = read_side_files(config.folder)

    @property
    def vocabulary(self) -> tuple[int, Bounds]:
        """Lowest id of the action tokens, and the action bounds to which the bin range -1..1 is mapped."""
        return self._config.action_vocab_start, self._bounds

    def _build_head(self) -> DiscreteTokens | L1Gaussian | Diffusion:
        """Build the head for `act` and `score`."""
        if self._cfg.action_head is ActionHead.l1:
            return L1Gaussian(self._model, self._forward, self._actions)
        if self._cfg.action_head is ActionHead.diffusion:
            return Diffusion(self._model, self._cfg, self._actions)
        graphs = self._cfg.cuda_graphs and self._device.type == "cuda"
        inference_forward = GraphedForward(self._forward) if graphs else self._forward
        return DiscreteTokens(self._model, self._forward, inference_forward, self._actions)

    def _build_inputs(self, obs: Observation) -> ModelInputs:
        pixels = preprocess(
            obs.images[:, : self.spec.inputs.num_images],
            rotation_deg=self._env.cameras.rotation_deg,
            pipeline=self._cfg.image_pipeline,
            size=self._config.image_size,
            norms=self._config.pixel_norms,
            device=self._device,
        )
        ids, lengths = (to_device(x, self._device) for x in self._prompts.batch(obs.instructions))
        state = None
        if self._state_bounds is not None:
            # Constant dimensions of the state are not set to 0, unlike those of actions, as in the published code.
            normalized = normalize(obs.state, self._state_bounds, flat_to_zero=False)
            state = to_device(normalized, self._device).to(self._input_dtype)
        return ModelInputs(pixels=pixels.to(self._input_dtype), prompt_ids=ids, prompt_lengths=lengths, state=state)


def build_module(config: OftConfig, options: OftOptions, request: PolicyRequest) -> OpenVlaOft:
    """Build the model on the meta device, allocate its memory once, then load or initialize the weights.

    Raises:
        CheckpointError: the weights or the adapter do not fit.
        ConfigError: a pattern of `model.freeze` or an adapter target matches nothing.
    """
    cfg = options.cfg
    with torch.device("meta"):
        module = OpenVlaOft(config, options)
    trains_adapter = cfg.is_lora and request.trainable
    if not request.trainable:
        module.requires_grad_(False)
    if cfg.precision == Precision.bf16 and (trains_adapter or not request.trainable):
        # Cast before memory is allocated, so that 7 B weights never exist in float32.
        _cast_to_bfloat16(module, keep_trained=request.trainable)
    module.to_empty(device=request.device)
    # The value head is always initialized, because a checkpoint may lack one; otherwise it is loaded later.
    module.init_weights(request.seed, (VALUE_HEAD,))
    if cfg.is_residual:
        module.add_residual_actor(request.seed)
    if module.action_scale is not None:
        nn.init.constant_(module.action_scale.log_std, math.log(cfg.action_std))
    if config.random_init:
        module.init_weights(request.seed, source=request.device if config.random_on_device else "cpu")
    elif request.fresh_heads:
        module.init_weights(request.seed, SFT_COMPONENTS)
    _load_initial_weights(module, cfg, config, request)
    # Freeze after adapters were injected, because the injection changes which weights are trained.
    freeze(module, cfg.freeze)
    if request.gradient_checkpointing:
        module.recompute_activations()
    return module


def _load_initial_weights(module: OpenVlaOft, cfg: OftSettings, config: OftConfig, request: PolicyRequest) -> None:
    """Read the weights of `model.path`; add adapters, or merge the adapter of `model.lora.path`."""
    trains_adapter, adapter = cfg.is_lora and request.trainable, get_initial_adapter(cfg)
    if adapter is not None and not trains_adapter:
        transform = build_merge_transform(adapter, get_base_state(module), config.folder)
        load_model(module, config.folder, transform=transform, fresh_heads=request.fresh_heads)
    elif not config.random_init:
        load_model(module, config.folder, fresh_heads=request.fresh_heads)
    if trains_adapter:
        inject_adapters(module, cfg, seed=request.seed)
        if adapter is not None:
            load_adapter(module, adapter)


def _cast_to_bfloat16(module: OpenVlaOft, *, keep_trained: bool) -> None:
    """Cast all weights to bfloat16, except RL heads and weights that are fully trained in addition to adapters."""
    module.to(torch.bfloat16)
    for name in (*RL_COMPONENTS, *SFT_COMPONENTS) if keep_trained else RL_COMPONENTS:
        if (part := getattr(module, name)) is not None:
            part.float()


def freeze(module: nn.Module, patterns: list[str]) -> None:
    """Freeze the parameters whose names match a shell-style pattern.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    names = [name for name, _ in module.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            parts = ", ".join(sorted({name.partition(".")[0] for name in names}))
            raise ConfigError(
                f"model.freeze: '{pattern}' matches no parameter. Parameter names start with {parts}; "
                "use a pattern such as 'vision_backbone.*'."
            )
    for name, parameter in module.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
