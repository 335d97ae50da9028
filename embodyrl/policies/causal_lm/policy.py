"""Language-model policy that replies to prompts; acting and training use the same distribution."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from embodyrl.config.shared import Precision
from embodyrl.errors import CheckpointError
from embodyrl.policies.causal_lm.cache import check_cache, configure_malloc, create_reserved_cache
from embodyrl.policies.causal_lm.model import (
    LanguageModel,
    add_adapters,
    fill,
    hide_progress_bars,
    is_tied,
    load,
    untie,
)
from embodyrl.policies.causal_lm.prompts import (
    Prompt,
    PromptReader,
    get_reply_text,
    join_image_inputs,
    pad_left,
    split_observations,
)
from embodyrl.policies.causal_lm.sampling import (
    allocate_top_tokens,
    choose,
    find_stop,
    format_top_tokens,
    mark_prompt_tokens,
)
from embodyrl.policies.causal_lm.settings import CausalLMSettings
from embodyrl.policies.causal_lm.shared_prompts import compute_hidden_states, is_sharing_cheaper
from embodyrl.policies.protocol import PolicyRequest, get_weights_version, mark_weights_changed
from embodyrl.policies.tensors import to_device
from embodyrl.types import FloatArray, ImitationLoss, IntArray, Observation, PolicyOutput, PolicyScores, PolicySpec

if TYPE_CHECKING:
    from embodyrl.policies.causal_lm.engine import VllmEngine
    from embodyrl.policies.causal_lm.server import ServerEngine

NO_TOKEN = -1
ADAPTER_FOLDER = "adapter"
ADAPTED_SEED = 0
"""Seed of the random base weights under adapters. It is constant, because checkpoints contain only the adapters."""
VALUE_FILE = "value_head/model.safetensors"
"""File of the value head. It has a separate folder, because other tools load every weight file next to config.json."""


class CausalLMPolicy:
    """Language-model policy; implements `Policy`. A chunk is one reply of at most K tokens, including the end token."""

    def __init__(
        self, spec: PolicySpec, cfg: CausalLMSettings, folder: Path, request: PolicyRequest, *, reads_images: bool
    ) -> None:
        """Load the model from a folder. Without `cfg.path`, initialize its weights from the seed.

        `reads_images` is True for a vision-language model, which reads the images of an observation.
        """
        self.spec = spec
        self._temperature, self._sampling = request.temperature, request.sampling
        self._device = torch.device(request.device)
        compute = torch.bfloat16 if cfg.precision is Precision.bf16 else torch.float32
        # fp32 master weights are needed for training only.
        trains_full_weights = not cfg.is_lora or cfg.lora.modules_to_save
        self._autocast = compute if request.trainable and trains_full_weights else None
        dtype = compute if self._autocast is None or cfg.is_lora else torch.float32
        # With images, the processor contains the tokenizer; otherwise the processor is the tokenizer.
        seed = None if cfg.path is not None else ADAPTED_SEED if cfg.is_lora else request.seed
        model, self.processor = load(folder, dtype=dtype, seed=seed, reads_images=reads_images)
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        if cfg.is_lora or cfg.lora.path is not None:
            model = add_adapters(model, cfg, trainable=request.trainable)
        self._checkpointing = request.gradient_checkpointing
        if self._checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        self._cfg, self._folder, self._has_adapters, self._reads_images = cfg, folder, cfg.is_lora, reads_images
        net = LanguageModel(model, spec.value_dim).to(self._device)
        if not request.trainable:
            net.requires_grad_(False)
        elif self._device.type == "cpu":
            configure_malloc()
        self.module: nn.Module = net.eval()
        self._net = net
        end_tokens = model.generation_config.eos_token_id
        end_tokens = self.tokenizer.eos_token_id if end_tokens is None else end_tokens
        end_tokens = [end_tokens] if isinstance(end_tokens, int) else list(end_tokens)
        self.end_tokens = torch.tensor([*end_tokens, *request.sampling.stop_token_ids], device=self._device)
        # In a reply, these tokens would be placeholders of images that do not exist.
        image_tokens = [getattr(model.config, f"{kind}_token_id", None) for kind in ("image", "video")]
        forbidden_tokens = [token for token in image_tokens if token is not None]
        self.forbidden_tokens = torch.tensor(forbidden_tokens, device=self._device) if forbidden_tokens else None
        pad = self.tokenizer.pad_token_id
        self._pad_token = int(self.end_tokens[0]) if pad is None else pad
        pixels = 3 * len(request.env.cameras.names) * math.prod(request.env.cameras.size)
        self.reader = PromptReader(
            self.processor, cfg, folder, empty_prompt_token=int(self.end_tokens[0]), pixels=pixels
        )
        self._end_token = self.reader.get_end_token(end_tokens)
        self._plain_head = self._net.has_plain_head(self._autocast_context())
        self._request, self._uses_engine = request, request.backend != "hf"
        if not self._uses_engine:
            probe_tokens = [token for token in range(self._net.vocabulary) if token not in forbidden_tokens][:6]
            with self._autocast_context():
                check_cache(net, probe_tokens, uses_bf16=cfg.precision is Precision.bf16)
        self._engine: VllmEngine | ServerEngine | None = None

    @property
    def vocabulary(self) -> frozenset[tuple[str, int]]:
        """Set of (token, id) pairs of the tokenizer."""
        return frozenset(self.tokenizer.get_vocab().items())

    # --- acting -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        """Generate a reply to each conversation (see `Policy.act`).

        `actions` are the token ids, -1 after the end. With deterministic algorithms, prompts of different lengths are
        processed in separate batches, so that a reply is independent of the other prompts.
        """
        prompts = self.reader(obs)
        count, length = len(prompts), self.spec.num_action_chunks
        tokens = np.full((count, length), NO_TOKEN, np.int64)
        logprob, value = np.zeros((count, length), np.float32), np.zeros((count, length), np.float32)
        top_tokens = allocate_top_tokens(count, length, self._request.top)
        if self._uses_engine:
            tokens, logprob, value, top_tokens = self._generate_with_engine(
                obs, prompts, noise, temperature or self._temperature
            )
        # One autocast block for all replies: float32 weights are cast once, and not for each token.
        with self._autocast_context():
            for rows in [] if self._uses_engine else self._group_by_length(prompts):
                # Rows of other lengths are padding, so that each row is computed in the shape of the whole batch.
                batch = [prompts[i if i in rows else rows[0]] for i in range(count)]
                out = self._generate(batch, noise, temperature)
                for array, part in zip((tokens, logprob, value, top_tokens), out, strict=True):
                    array[rows] = part[rows]
        return PolicyOutput(
            actions=tokens[:, :, None].astype(np.float32),
            tokens=tokens,
            logprob=logprob,
            value=value[:, : self.spec.value_dim],
            replies=tuple(get_reply_text(self.reader, row[row >= 0].tolist(), self._sampling) for row in tokens),
            cut_off=self._find_cut_off_replies(tokens),
            top=tuple(format_top_tokens(*row, self.tokenizer.decode) for row in zip(tokens, top_tokens, strict=True))
            if top_tokens.size
            else (),
            cost=np.asarray([len(p) for p in prompts]) + (tokens >= 0).sum(1),
        )

    def _generate_with_engine(
        self, obs: Observation, prompts: Sequence[Prompt], noise: FloatArray | None, temperature: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Generate replies with the engine; return tokens, log-probabilities, values (each [B, K]) and top tokens."""
        if self._engine is None:
            self._engine = self._start_engine()
        self._engine.sync(self._net.lm, get_weights_version(self.module), prompts[0], self._compute_next_logprob)
        length, top = self.spec.num_action_chunks, self._request.top
        tokens, logprob, top_tokens = self._engine.generate(prompts, noise, temperature, length, top)
        value = np.zeros_like(logprob)
        sampling = self._sampling
        # vLLM's log-probabilities are those of the truncated distribution, but the loss uses the full one. A server
        # returns log-probabilities before the temperature.
        penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        truncation = (sampling.top_k, sampling.top_p, *penalties, sampling.min_new_tokens)
        full_distribution = truncation == (-1, 1.0, 1.0, 0.0, 0.0, 0)
        rescore = self._temperature != 1.0 and not (full_distribution and self._engine.includes_temperature)
        if self.spec.value_dim or rescore:
            rescored, _, values, _ = self._score(obs, tokens)
            value = values.cpu().numpy()
            logprob = rescored.cpu().numpy() if rescore else logprob
        return tokens, logprob, value, top_tokens

    def free_engine_memory(self) -> None:
        """Free the memory of the engine until the next inference (see `HasEngine.free_engine_memory`)."""
        if self._engine is not None:
            self._engine.sleep()

    def _start_engine(self) -> "VllmEngine | ServerEngine":
        dtype = "bfloat16" if self._cfg.precision is Precision.bf16 else "float32"
        request = self._request
        if request.url is not None:
            from embodyrl.policies.causal_lm.server import ServerEngine

            adapters = self._net.lm.save_pretrained if self._has_adapters else None
            return ServerEngine(request.url, request.served_model, adapters, dtype=dtype, sampling=self._sampling)
        from embodyrl.policies.causal_lm.engine import VllmEngine

        return VllmEngine(self.save, request, dtype=dtype)

    def _compute_next_logprob(self, prompt: Sequence[int], token: int) -> float:
        """Return the log-probability of a token after a prompt."""
        ids, mask, positions, _ = self._build_inputs([Prompt(prompt)])
        with self._autocast_context():
            logits, _ = self._net(ids, mask, positions, 1)
        scale = 1.0 if self._engine is None or not self._engine.includes_temperature else self._temperature
        return float((logits[0, 0] / scale).log_softmax(-1)[token])

    def _group_by_length(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        if not torch.are_deterministic_algorithms_enabled():
            return [list(range(len(prompts)))]
        lengths = sorted({len(p) for p in prompts})
        return [[i for i, p in enumerate(prompts) if len(p) == length] for length in lengths]

    def _generate(
        self, prompts: Sequence[Prompt], noise: FloatArray | None, temperature: float | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens, log-probabilities and values, all [B, K], and the top tokens (see `allocate_top_tokens`)."""
        # In deterministic mode, every row is computed in the shape of the whole batch, because the summation order of
        # kernels may depend on the shape.
        deterministic = torch.are_deterministic_algorithms_enabled()
        scale, limit, count = temperature or self._temperature, self.spec.num_action_chunks, len(prompts)
        # In other modes, the rows of a group share one prompt, which is processed once, in the first of these rows.
        first = {id(p): i for i, p in reversed(list(enumerate(prompts)))}
        source = list(range(count)) if deterministic else sorted(first.values())
        ids, mask, positions, image_inputs = self._build_inputs([prompts[i] for i in source])
        cache = create_reserved_cache(self._net.lm.config, ids.shape[1] + limit)
        with self._autocast_context():
            logits, value = self._net(ids, mask, positions, 1, cache, **image_inputs)
        rows = torch.arange(count, device=self._device)
        source_index = {row: i for i, row in enumerate(source)}
        row_index = rows if deterministic else to_device([source_index[first[id(p)]] for p in prompts], self._device)
        if not deterministic:
            cache.reorder_cache(row_index)  # type: ignore[arg-type]
        logits, value = logits[row_index, 0], value[row_index, 0]
        mask, position = mask[row_index], positions[..., row_index, -1]
        used_tokens = mark_prompt_tokens(ids[row_index], mask, logits, self._sampling)
        # `rows` are the unfinished replies. All arrays except `out`, `top_tokens` and `uniform` have only these rows.
        out = [torch.full((count, limit), fill, device=self._device) for fill in (NO_TOKEN, 0.0, 0.0)]
        top_tokens = to_device(allocate_top_tokens(count, limit, self._request.top), self._device)
        uniform = None if noise is None else to_device(noise, self._device)
        done = torch.zeros(count, dtype=torch.bool, device=self._device)
        for t in range(limit):
            forbidden = self._get_forbidden_tokens(t)
            step_noise, reply_tokens = None if uniform is None else uniform[rows, t], out[0][rows, :t]
            chosen = choose(logits, step_noise, scale, self._sampling, used_tokens, reply_tokens, forbidden)
            logprob = (logits / scale).log_softmax(-1).gather(1, chosen[:, None]).squeeze(1)
            for array, value_column in zip(out, (chosen, logprob, value), strict=True):
                array[rows, t] = torch.where(done, array[rows, t], value_column.to(array.dtype))
            if top_tokens.numel():
                log_probs = logits.log_softmax(-1)
                ids = torch.cat(
                    [chosen[:, None], log_probs.topk(min(self._request.top, log_probs.shape[1])).indices], 1
                )
                top_tokens[rows, t, : ids.shape[1]] = torch.stack([ids.float(), log_probs.gather(1, ids)], -1)
            done = done | torch.isin(chosen, self.end_tokens) | self._contains_stop_string(out[0][rows], t)
            done = done & (t + 1 >= self._sampling.min_new_tokens)
            if t + 1 == limit or bool(done.all()):
                break
            # Copying the cache saves time only if more than half of the rows are finished.
            if not deterministic and int(done.sum()) * 2 > len(done):
                unfinished = (~done).nonzero().squeeze(1)
                cache.reorder_cache(unfinished)  # type: ignore[arg-type]
                rows, chosen, mask, used_tokens, done = (x[unfinished] for x in (rows, chosen, mask, used_tokens, done))
                position = position[..., unfinished]
            if used_tokens.numel():
                used_tokens.scatter_(1, chosen[:, None], True)
            mask, position = torch.cat([mask, mask.new_ones(len(mask), 1)], 1), position + 1
            with self._autocast_context():
                logits, value = self._net(chosen[:, None], mask, position[..., None], 1, cache)
            logits, value = logits[:, 0], value[:, 0]
        tokens, logprobs, values = (array.cpu().numpy() for array in out)
        return tokens, logprobs, values, top_tokens.cpu().numpy()

    def _get_forbidden_tokens(self, t: int) -> Tensor | None:
        """Return the token ids that are not allowed at position t of a reply."""
        early_end_tokens = self.end_tokens if t < self._sampling.min_new_tokens else None
        groups = [ids for ids in (early_end_tokens, self.forbidden_tokens) if ids is not None]
        return torch.cat(groups) if groups else None

    def _contains_stop_string(self, tokens: Tensor, t: int) -> Tensor:
        """Return a mask [B] of replies whose last tokens complete a stop string."""
        if not self._sampling.stop:
            return torch.zeros(len(tokens), dtype=torch.bool, device=self._device)
        # A token has at least one character; 8 more tokens for rare characters that have one token per byte.
        tail = tokens[:, max(0, t - max(map(len, self._sampling.stop)) - 7) : t + 1].clamp(min=0)
        texts = zip(*(self.tokenizer.batch_decode(part) for part in (tail, tail[:, :-1])), strict=True)
        stopped = [find_stop(text, len(before), self._sampling.stop) is not None for text, before in texts]
        return torch.tensor(stopped, device=self._device)

    def _find_cut_off_replies(self, tokens: np.ndarray) -> np.ndarray:
        """Return a mask [B] of replies [B, K] that reached the maximum length without an end token."""
        ids = to_device(tokens, self._device)
        last = ids.shape[1] - 1
        ended = torch.isin(ids[:, last], self.end_tokens) | self._contains_stop_string(ids, last)
        return ((ids[:, last] >= 0) & ~ended).cpu().numpy()

    # --- training ---------------------------------------------------------------------------------------------------

    def score(self, obs: Observation, tokens: IntArray) -> PolicyScores:
        """Return log-probabilities, entropies and values of reply tokens [B, K]; all are 0 after the end of a reply."""
        logprob, entropy, value, _ = self._score(obs, tokens)
        return PolicyScores(logprob=logprob, entropy=entropy, value=value[:, : self.spec.value_dim])

    def _score(
        self, obs: Observation, tokens: IntArray, *, dropout: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log-probability, entropy and value of each token, and a mask of argmax tokens, all [B, K]."""
        # With an engine, a batch contains the observations of all parallel environments.
        if not torch.is_grad_enabled() and len(chunks := split_observations(obs)) > 1:
            scored = [self._score(part, tokens[rows]) for rows, part in chunks]
            logprob, entropy, value, is_best = (torch.cat(numbers) for numbers in zip(*scored, strict=True))
            return logprob, entropy, value, is_best
        replies, prompts = [row[row >= 0].tolist() for row in tokens], self.reader(obs)
        length, longest = to_device([*map(len, replies)], self._device), max(1, *map(len, replies))
        checkpointing = torch.is_grad_enabled() and self._checkpointing
        reuses_prompts = (
            self._plain_head and not checkpointing and not dropout and is_sharing_cheaper(self._net, prompts, longest)
        )
        self._net.train(checkpointing or dropout)  # transformers recomputes in training mode only
        with self._autocast_context(cache_casts=not checkpointing):
            if reuses_prompts:
                hidden, reply_tokens = compute_hidden_states(self._net, prompts, replies, self._pad_token, self._device)
                score_tensors = self._net.compute_scores_of_hidden(hidden, reply_tokens, self._temperature)
            else:
                ids, mask, positions, image_inputs = self._build_inputs(prompts, replies)
                plain = self._plain_head
                score_tensors = self._net.compute_last_scores(
                    ids, mask, positions, longest, self._temperature, plain_head=plain, **image_inputs
                )
        self._net.train(dropout)
        # Without shared prompts, rows are right-aligned, so that the batch is as wide as the longest row.
        is_token = torch.arange(longest, device=self._device) < length[:, None]
        column = torch.arange(longest, device=self._device) + (0 if reuses_prompts else longest - length[:, None])
        column, padding = column.clamp(max=longest - 1).expand(is_token.shape), (0, tokens.shape[1] - longest)
        logprob, entropy, is_best, value = (
            nn.functional.pad(scores.gather(1, column) * is_token, padding) for scores in score_tensors
        )
        return logprob, entropy, value, is_best

    @torch.no_grad()
    def values(self, obs: Observation) -> FloatArray:
        """Return values [B, V] of conversations; only the first column is used (see `Policy.values`)."""
        ids, mask, positions, image_inputs = self._build_inputs(self.reader(obs))
        with self._autocast_context():
            _, value = self._net(ids, mask, positions, 1, **image_inputs)
        out = np.zeros((len(obs), self.spec.value_dim), np.float32)
        out[:, :1] = value.cpu().numpy()[:, : self.spec.value_dim]
        return out

    def imitate(self, obs: Observation, actions: FloatArray) -> ImitationLoss:
        """Return the mean negative log-likelihood of each reply's tokens, and the fraction that is the argmax."""
        tokens = actions[:, :, 0].astype(np.int64)
        logprob, _, _, is_best = self._score(
            obs, tokens, dropout=self.module.training and self._cfg.lora.lora_dropout > 0
        )
        count = to_device((tokens >= 0).sum(1).clip(min=1), self._device)
        return ImitationLoss(loss=-logprob.sum(1) / count, accuracy=is_best.sum(1) / count)

    def encode_replies(self, replies: Sequence[str]) -> IntArray:
        """Return tokens of replies with their end tokens (see `TextPolicy.encode_replies`)."""
        encoded = self.tokenizer([*map(self.reader.strip_opening_tag, replies)], add_special_tokens=False)["input_ids"]
        tokens = np.full((len(replies), max(map(len, encoded)) + 1), NO_TOKEN, np.int64)
        for row, ids in zip(tokens, encoded, strict=True):
            row[: len(ids) + 1] = [*ids, self._end_token]
        return tokens

    def prompt_lengths(self, obs: Observation) -> IntArray:
        """Return the number of tokens of each conversation (see `TextPolicy.prompt_lengths`)."""
        return np.asarray([len(prompt) for prompt in self.reader(obs)], np.int64)

    def build_served_reference(self, url: str, model: str | None) -> Any:
        """Return a reference policy whose log-probabilities a server computes (see `TextPolicy`)."""
        from embodyrl.policies.causal_lm.server import ServedReference

        return ServedReference(url, model, self.reader, max(self.tokenizer.get_vocab().values()))

    def _build_inputs(
        self, prompts: Sequence[Prompt], replies: Sequence[list[int]] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Return ids and mask [B, T], positions [..., B, T] and image tensors of prompts with optional replies."""
        reply_rows = replies or [[]] * len(prompts)
        ids, mask = pad_left([p + r for p, r in zip(prompts, reply_rows, strict=True)], self._pad_token, self._device)
        image_inputs = join_image_inputs(prompts, list(map(len, reply_rows)), self._device)
        return ids, mask, self._net.positions(ids, mask, image_inputs), image_inputs

    def _autocast_context(self, *, cache_casts: bool = True) -> torch.autocast:
        """Return the autocast context.

        `cache_casts` keeps cast weights for reuse; it is False if the backward pass recomputes activations.
        """
        mixed = self._autocast not in (None, torch.float32)
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=mixed, cache_enabled=cache_casts)

    # --- weights ----------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write the Hugging Face layout: model and tokenizer, or adapters in `adapter/`; and the value head, if any."""
        self.processor.save_pretrained(folder)
        with hide_progress_bars():
            if self._has_adapters:
                self._net.lm.save_pretrained(folder / ADAPTER_FOLDER, save_embedding_layers=False)
            else:
                self._net.lm.save_pretrained(folder)
        if self._net.value_head is not None:
            (folder / VALUE_FILE).parent.mkdir(exist_ok=True)
            save_file({k: v.cpu() for k, v in self._net.value_head.state_dict().items()}, folder / VALUE_FILE)

    def load_weights(self, folder: Path) -> None:
        """Replace the weights in place (see `Policy.load_weights`).

        A value head that the folder lacks is unchanged, so that PPO can start from SFT or GRPO weights.
        """
        adapter = folder / ADAPTER_FOLDER
        try:
            if self._has_adapters:
                adapter_weights = load_file(adapter / "adapter_model.safetensors")
                fill(self._net.lm, adapter_weights, folder)
            else:
                dtype = next(self._net.lm.parameters()).dtype
                if adapter.is_dir():
                    seed = ADAPTED_SEED if self._cfg.path is None else None
                    loaded, _ = load(self._folder, dtype=dtype, seed=seed, reads_images=self._reads_images)
                    loaded = add_adapters(loaded, self._cfg, trainable=False, path=str(adapter))
                else:
                    loaded, _ = load(folder, dtype=dtype, reads_images=self._reads_images)
                if not is_tied(loaded):
                    untie(self._net.lm)
                fill(self._net.lm, loaded.state_dict(), folder)
            if self._net.value_head is not None and (folder / VALUE_FILE).is_file():
                self._net.value_head.load_state_dict(load_file(folder / VALUE_FILE))
            mark_weights_changed(self.module)
        except (OSError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(f"{folder} does not fit this model ({reason}). Use another checkpoint.") from error
