"""Action distribution of the discrete head: one categorical distribution per action dimension.

Tokens are predicted in parallel (OpenVLA-OFT) or one by one (OpenVLA).
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from embodyrl.policies.openvla_oft.config import ActionTokenizer
from embodyrl.policies.openvla_oft.model import ModelInputs, OpenVlaOft, decode_tokens
from embodyrl.policies.tensors import compute_categorical_scores, sample_inverse_cdf, to_device
from embodyrl.policies.vla.sampling import SampledChunks
from embodyrl.types import FloatArray, ImitationLoss, IntArray


class DiscreteTokens:
    """Head whose tokens are vocabulary ids, as in the published code; logits are divided by the temperature.

    The continuous heads have the same interface (`L1Gaussian`, `Diffusion`).
    """

    def __init__(
        self,
        model: OpenVlaOft,
        forward: Callable[..., tuple[Tensor, Tensor]],
        inference_forward: Callable[[ModelInputs], tuple[Tensor, Tensor]],
        tokenizer: ActionTokenizer,
    ) -> None:
        """Store two forward passes: one that may be compiled, and one for inference that may be a CUDA graph."""
        self._model, self._forward, self._tokenizer = model, forward, tokenizer
        self._inference_forward = inference_forward
        self._columns = model.action_columns
        self._chunk = model.options.cfg.num_action_chunks, model.options.cfg.action_dim

    def act(self, inputs: ModelInputs, noise: FloatArray | None, temperature: float) -> tuple[SampledChunks, Tensor]:
        """Return normalized chunks [B, K, A] and values [B, V].

        Tokens are sampled with uniform `noise` [B, L]; None: greedy.
        """
        uniform = None if noise is None else to_device(noise, inputs.prompt_ids.device)

        def choose(logits: Tensor, noise: Tensor | None) -> Tensor:
            return logits.argmax(dim=-1) if noise is None else sample_inverse_cdf(logits / temperature, noise)

        if self._model.options.autoregressive:
            logits, choice, value = decode_tokens(
                self._model,
                inputs,
                lambda index, logits: choose(logits, None if uniform is None else uniform[:, index : index + 1]),
            )
        else:
            logits, value = self._inference_forward(inputs)
            choice = choose(logits, uniform)
        logprob, _ = self._compute_scores(logits, choice, temperature)
        tokens = (choice + self._columns.start).cpu().numpy()
        return SampledChunks(state=self._decode(tokens), tokens=tokens, logprob=logprob), value

    def score(self, inputs: ModelInputs, tokens: IntArray, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities and entropies [B, K, A] of tokens, and values [B, V]."""
        ids = to_device(tokens, inputs.prompt_ids.device)
        logits, value = self._forward(inputs, ids)
        return *self._compute_scores(logits, ids - self._columns.start, temperature), value

    def values(self, inputs: ModelInputs) -> Tensor:
        """Return the value estimates [B, V] of observations."""
        # Values depend only on the prompt, which precedes all action tokens in an autoregressive model.
        shape = len(inputs.prompt_ids), self._model.options.num_action_tokens
        return self._forward(inputs, torch.full(shape, self._columns.start, device=inputs.prompt_ids.device))[1]

    def propose(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Return the hidden states [B, L, D] of the action predictions, and greedy normalized actions [B, K, A]."""
        hidden = self._model.compute_action_hidden(self._model.prefix(inputs), inputs)
        logits, _ = self._model.compute_logits(hidden, self._columns)
        return hidden, self._decode((logits.argmax(-1) + self._columns.start).cpu().numpy())

    def imitate(self, inputs: ModelInputs, target: np.ndarray) -> ImitationLoss:
        """Return the cross-entropy, over the whole vocabulary, of the tokens of actions [B, K, A] and of STOP."""
        tokens = to_device(self._tokenizer.encode(target), inputs.prompt_ids.device).flatten(1)
        logits, _ = self._forward(inputs, tokens, whole_vocabulary=True)
        ids = F.pad(tokens, (0, 1), value=self._model.stop_token_id)
        # Flattened, because CUDA's cross-entropy of three dimensions is not deterministic.
        losses = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view_as(ids)
        chosen = logits[:, :-1, self._columns].argmax(-1) + self._columns.start
        return ImitationLoss(loss=losses.mean(1), accuracy=(chosen == tokens).float().mean(1))

    def _compute_scores(self, logits: Tensor, choice: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        # Computed outside of autocast, so that acting and scoring give the same numbers.
        with torch.autocast(logits.device.type, enabled=False):
            logprob, entropy = compute_categorical_scores(logits / temperature, choice)
        return logprob.unflatten(1, self._chunk), entropy.unflatten(1, self._chunk)

    def _decode(self, tokens: IntArray) -> Tensor:
        """Return bin centers [B, K, A] float64, on the host."""
        return torch.from_numpy(self._tokenizer.decode(tokens)).unflatten(1, self._chunk)
