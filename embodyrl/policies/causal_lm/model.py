"""Network of a language-model policy: loading, adapters, logits, values and token scores."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    DynamicCache,
)
from transformers.utils import logging as transformers_logging

from embodyrl.config.paths import resolve_asset
from embodyrl.errors import CheckpointError, MissingDependencyError, one_line
from embodyrl.files import inside, read_json
from embodyrl.policies.causal_lm.settings import CausalLMSettings
from embodyrl.policies.causal_lm.sizes import CHUNK_LOGITS
from embodyrl.policies.files import ADAPTER_FIELDS, BASE_PRESERVING_INITS, check_keys, find_merged_adapter_problem
from embodyrl.policies.vla.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ALL_LINEAR,
    check_module_names,
    split_target_names,
)
from embodyrl.policies.weights import check_weights
from embodyrl.text.model_folder import SAFE_OPTIONS, load_safely, read_config

_MERGED_FIELDS = (
    "alpha_pattern",
    "bias",
    "fan_in_fan_out",
    "modules_to_save",
    "rank_pattern",
    "use_dora",
    "use_qalora",
)
_SUPPORTED_VALUES = {"peft_type": ("LORA",), "init_lora_weights": (*BASE_PRESERVING_INITS, "pissa", "olora")}
"""Supported values of adapter fields. `_MERGED_FIELDS` are further fields that peft merges; all others are rejected."""

logging.getLogger("transformers").setLevel(logging.ERROR)


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Suppress transformers' progress bars while weights are read or written; runs have their own progress line."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


@contextmanager
def _suppress_warnings() -> Iterator[None]:
    """Suppress peft's warnings about tied embeddings, which `untie` and exports handle."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(?s).*(`tie_word_embeddings=True`|no longer tied)")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def load(folder: Path, *, dtype: torch.dtype, seed: int | None = None, reads_images: bool = False) -> tuple[Any, Any]:
    """Return (model, tokenizer), or (model, processor) for a vision-language model, without executing remote code.

    With a `seed`, the weights are initialized randomly, because the folder contains no weights.

    Raises:
        CheckpointError: the folder has no such model, or a file is damaged.
        MissingDependencyError: the processor needs a package that is not installed.
    """
    try:
        for path in folder.rglob("*") if seed is None else ():  # a processor can have a tokenizer in each subfolder
            if path.is_symlink() and path.exists() and path.suffix != ".safetensors":  # copied into checkpoints
                inside(folder, path.relative_to(folder))
        kind, model_kind = (
            (AutoProcessor, AutoModelForImageTextToText) if reads_images else (AutoTokenizer, AutoModelForCausalLM)
        )
        with load_safely(folder), hide_progress_bars():
            processor = kind.from_pretrained(folder, **SAFE_OPTIONS)
            config = read_config(folder)
            if seed is not None:
                with torch.random.fork_rng(devices=[]):
                    torch.default_generator.manual_seed(seed)
                    return nn.Module.to(model_kind.from_config(config), dtype), processor
            result: Any = model_kind.from_pretrained(
                folder, config=config, use_safetensors=True, dtype=dtype, output_loading_info=True, **SAFE_OPTIONS
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        kind = "vision-language" if reads_images else "causal language"
        raise CheckpointError(
            f"{folder} cannot be loaded as a {kind} model: {one_line(error).rstrip('.')}. Use another model."
        ) from error
    except (ImportError, AttributeError) as error:
        # Without torchvision, the library's table of video processors is empty, so loading fails even without videos.
        raise MissingDependencyError(
            f"The processor in {folder} needs a package that is not installed: {one_line(error)}. Processors with "
            "video support (Qwen-VL, SmolVLM) usually need `pip install torchvision num2words` (from PyTorch's "
            "package index)."
        ) from error
    model, info = result
    if bad_keys := sorted({*map(str, info["missing_keys"]), *map(str, info["mismatched_keys"])}):
        raise CheckpointError(
            f"{folder} has missing or mismatched weights: {', '.join(bad_keys[:5])}. Download the files again."
        )
    return model, processor


def add_adapters(model: Any, cfg: CausalLMSettings, *, trainable: bool, path: str | None = None) -> Any:
    """Add low-rank adapters to a model, or merge an existing adapter into its weights.

    An existing adapter is loaded from `path` (default: `model.lora.path`), and is merged unless `model.is_lora` is set.

    Raises:
        CheckpointError: the adapter is incomplete or of an unsupported kind.
        ConfigError: no module has one of the names in the settings.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    lora = cfg.lora
    path = path or lora.path
    if path is not None:
        folder = resolve_asset(path)
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            if not (folder / name).is_file():  # otherwise the library would query the hub, or load a pickle
                raise CheckpointError(
                    f"{folder}: {name} is missing; the adapter folder is incomplete. Download the folder again."
                )
        if path == lora.path and (problem := find_merged_adapter_problem(folder)):
            raise CheckpointError(f"model.lora.path: {problem}")
        file = folder / ADAPTER_CONFIG
        ignored = (*ADAPTER_FIELDS, *_MERGED_FIELDS)
        check_keys(read_json(file), file, ignored=ignored, supported=_SUPPORTED_VALUES, fix="Use a LoRA adapter.")
        with _suppress_warnings():
            adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=trainable)
            if cfg.is_lora:
                return adapted
            if any(hasattr(m, "base_layer") for m in (model.get_input_embeddings(), model.get_output_embeddings())):
                untie(model)  # the adapter is merged into one of the two matrices only
            return adapted.merge_and_unload()
    targets = split_target_names(lora)
    modules = [name for name, _ in model.named_modules()]
    if targets != (ALL_LINEAR,):
        check_module_names("target_modules", targets, modules)
    check_module_names("modules_to_save", lora.modules_to_save, modules)
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        use_rslora=lora.use_rslora,
        target_modules=ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets),
        init_lora_weights="gaussian" if lora.init_lora_weights == "gaussian" else True,
        lora_dropout=lora.lora_dropout,
        modules_to_save=lora.modules_to_save or None,
        task_type="CAUSAL_LM",
    )
    with _suppress_warnings():
        adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters() if trainable else ():
        if ".modules_to_save." in name:  # bfloat16 would round away the small steps of AdamW
            parameter.data = parameter.data.float()
    return adapted


class LanguageModel(nn.Module):
    """A causal LM with an optional value head on its last hidden states."""

    def __init__(self, lm: Any, value_dim: int) -> None:
        super().__init__()
        self.lm = lm
        self.value_head = nn.Linear(lm.config.get_text_config().hidden_size, 1) if value_dim else None
        if self.value_head is not None:
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def forward(
        self,
        ids: Tensor,
        mask: Tensor,
        positions: Tensor,
        num_positions: int,
        cache: DynamicCache | None = None,
        **image_inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return float32 logits [B, n, V] and values [B, n] of the last n = `num_positions` positions.

        Without a value head, the values are zeros.

        `image_inputs` contains image tensors by argument name of the model.
        """
        kwargs = {"logits_to_keep": num_positions, "output_hidden_states": self.value_head is not None}
        out = _run(self.lm, ids, mask, positions, cache, **image_inputs, **kwargs)
        logits = out.logits.float()
        if self.value_head is None:
            return logits, logits.new_zeros(logits.shape[:2])
        return logits, self._compute_values(out.hidden_states[-1][:, -num_positions:], logits[..., 0])

    def positions(self, ids: Tensor, mask: Tensor, image_inputs: dict[str, Tensor]) -> Tensor:
        """Return positions [B, T], or [n, B, T] for models with n position axes for images, as in `generate`."""
        text_positions = (mask.cumsum(1) - 1).clamp(min=0)
        rope_model = next(
            (m for m in (self._base_model.base_model, self._base_model) if hasattr(m, "get_rope_index")), None
        )
        if rope_model is None or "image_grid_thw" not in image_inputs:
            return text_positions
        image_positions, _ = rope_model.get_rope_index(ids, attention_mask=mask, **image_inputs)
        return torch.cat([text_positions[None], image_positions])

    @property
    def _base_model(self) -> Any:
        """Return the model without its adapters."""
        return self.lm.get_base_model() if hasattr(self.lm, "get_base_model") else self.lm

    @property
    def vocabulary(self) -> int:
        """V: number of rows of the output matrix."""
        return int(self.lm.get_output_embeddings().weight.shape[0])

    def has_plain_head(self, precision: torch.autocast) -> bool:
        """Return True if the logits are the product of output matrix and last hidden states, not scaled or capped."""
        calls: list[tuple[Tensor, Tensor]] = []

        def replace(head: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            logits = torch.linspace(-50, 50, out.numel(), device=out.device).to(out.dtype).view_as(out)
            calls.append((args[0], logits))
            return logits

        ids = torch.zeros(1, 1, dtype=torch.int64, device=next(self.parameters()).device)
        handle = self.lm.get_output_embeddings().register_forward_hook(replace)
        with handle, torch.no_grad(), precision:
            out = self.lm(input_ids=ids, use_cache=False)
            last = getattr(self._base_model.base_model(input_ids=ids, use_cache=False), "last_hidden_state", None)
        if len(calls) != 1 or last is None:
            return False
        hidden, logits = calls[0]
        return bool((out.logits == logits).all()) and hidden.shape == last.shape and bool((hidden == last).all())

    def hidden(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache | None = None, **image_inputs: Tensor
    ) -> Tensor:
        """Return the last hidden states [B, T, D]; only for models with `has_plain_head`."""
        return _run(self._base_model.base_model, ids, mask, positions, cache, **image_inputs).last_hidden_state

    def compute_last_scores(
        self,
        ids: Tensor,
        mask: Tensor,
        positions: Tensor,
        count: int,
        temperature: float,
        *,
        plain_head: bool,
        **image_inputs: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the results of `compute_scores` and the values for the last `count` tokens, each [B, count].

        With `plain_head` (see `has_plain_head`), the logits of long replies are computed in chunks.
        """
        tokens = ids[:, -count:]
        if plain_head and tokens.numel() * self.vocabulary > CHUNK_LOGITS:
            hidden = self.hidden(ids, mask, positions, None, **image_inputs)[:, -count - 1 : -1]
            return self.compute_scores_of_hidden(hidden, tokens, temperature)
        logits, value = self(ids, mask, positions, count + 1, **image_inputs)
        return *compute_scores(logits[:, :-1], tokens, temperature), value[:, :-1]

    def compute_scores_of_hidden(
        self, hidden: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the results of `compute_scores` and the value of each token in `tokens` [B, n].

        `hidden` [B, n, D] are the states that predict the tokens. At most `CHUNK_LOGITS` logits are stored; with
        several chunks, logits are recomputed in the backward pass.
        """
        head = self.lm.get_output_embeddings()
        if tokens.numel() * self.vocabulary <= CHUNK_LOGITS:
            token_scores = compute_scores(head(hidden), tokens, temperature)
            return *token_scores, self._compute_values(hidden, token_scores[0])
        rows, chosen = hidden.flatten(0, 1), tokens.flatten()
        size = max(1, CHUNK_LOGITS // self.vocabulary)

        def scores(rows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return compute_scores(head(rows), chosen, temperature)

        parts = [
            checkpoint(scores, rows[i : i + size], chosen[i : i + size], use_reentrant=False)
            for i in range(0, len(rows), size)
        ]
        first, second, third = (torch.cat(part).view_as(tokens) for part in zip(*parts, strict=True))
        return first, second, third, self._compute_values(hidden, first)

    def _compute_values(self, hidden: Tensor, template: Tensor) -> Tensor:
        """Return values [B, n] of hidden states [B, n, D]; without a value head, zeros like `template` [B, n]."""
        if self.value_head is None:
            return torch.zeros_like(template)
        return self.value_head(hidden.to(self.value_head.weight.dtype)).squeeze(-1).float()


def _run(lm: Any, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache | None, **kwargs: Any) -> Any:
    """Run a model of transformers with optional further keyword arguments."""
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return lm(**inputs, past_key_values=cache, use_cache=cache is not None, **kwargs)


class _Scores(torch.autograd.Function):
    """Autograd function of `compute_scores`.

    Separate operations would store tensors even for an unused entropy.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        scaled = logits.float() / temperature
        is_best, log_probs = scaled.argmax(-1) == tokens, scaled.log_softmax(-1)
        del scaled
        entropy = -log_probs.exp().mul_(log_probs).sum(-1)
        ctx.save_for_backward(log_probs, tokens[..., None], entropy[..., None])
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.mark_non_differentiable(is_best)
        return log_probs.gather(-1, tokens[..., None])[..., 0], entropy, is_best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        log_probs, tokens, entropy = ctx.saved_tensors
        log_prob_grad, entropy_grad = (grad[..., None] for grad in grads[:2])
        # Gradient of log p(token): one-hot minus p. Gradient of the entropy H: -p (log p + H).
        out = torch.add(log_probs, entropy).mul_(entropy_grad).add_(log_prob_grad).mul_(log_probs.exp()).neg_()
        return out.scatter_add_(-1, tokens, log_prob_grad).div_(ctx.temperature).to(ctx.dtype), None, None


def compute_scores(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors [...]: log-probability and entropy of each token, and True for tokens that are the argmax.

    Tokens have the shape [...], and logits the shape [..., V].
    """
    return _Scores.apply(logits, tokens, temperature)


def is_tied(lm: Any) -> bool:
    """Return True if the output matrix and the input embeddings are one tensor."""
    return lm.get_output_embeddings().weight is lm.get_input_embeddings().weight


def untie(lm: Any) -> None:
    """Replace a tied output matrix with a copy of the input embeddings."""
    if is_tied(lm):
        head = lm.get_output_embeddings()
        head = getattr(head, "base_layer", head)  # of a layer with adapters
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        for config in (lm.config, lm.config.get_text_config()):
            config.tie_word_embeddings = False


@torch.no_grad()
def fill(module: nn.Module, state: Mapping[str, Tensor], where: Path) -> None:
    """Copy full weights into a module that may be sharded; `load_state_dict` does not support sharded modules.

    Raises:
        CheckpointError: weights are missing, unexpected or of another shape.
    """
    current = module.state_dict()
    adapter_weights = {
        _get_saved_name(name): w for name, w in current.items() if ".lora_" in name or ".modules_to_save." in name
    }
    # Older files of adapted embeddings also contain the frozen matrices that the adapters are added to.
    current = (
        adapter_weights | {name: current[name] for name in state if name in current and ".base_layer." in name}
        if adapter_weights
        else current
    )
    check_weights(current, state, where, fix="Use the model and the adapters of that run.")
    for name, weight in state.items():
        current[name].copy_(weight)


def _get_saved_name(name: str) -> str:
    """Return the name of an adapter's weight in the adapter file."""
    return name.replace(".modules_to_save.default", "").replace(".default.", ".").removesuffix(".default")
