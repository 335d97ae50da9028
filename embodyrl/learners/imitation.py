"""SFT learner, which reads observations and target actions from records in shared memory, as the RL learners do."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from embodyrl.channels.arena import read_observation
from embodyrl.channels.layout import Record, decode_instruction
from embodyrl.channels.messages import ImitateRequest
from embodyrl.data.augment import augment, sample_augmentations
from embodyrl.data.settings import Objective
from embodyrl.errors import ConfigError
from embodyrl.learners.protocol import Learner, LearnerContext
from embodyrl.learners.training import UpdateGenerator
from embodyrl.policies.protocol import Policy, TextPolicy
from embodyrl.policies.tensors import to_device
from embodyrl.text.messages import Message, join_messages, remove_image_sizes, split_messages
from embodyrl.types import BoolArray, FloatArray, ImitationLoss, IntArray, Observation


@runtime_checkable
class ImitatesPadded(Policy, Protocol):
    """Interface of a policy whose imitation loss masks padded actions."""

    def imitate_padded(self, obs: Observation, actions: FloatArray, padding: BoolArray) -> ImitationLoss:
        """Return the loss of actions [B, H, A] (see `Policy.imitate`); `padding` [B, H] is True for padded actions."""
        ...


@runtime_checkable
class TokenPolicy(Policy, Protocol):
    """Interface of a policy whose tokens can represent any action."""

    def encode_actions(self, actions: FloatArray) -> IntArray:
        """Return the tokens [B, L] of actions [B, K, A] in the environment's units."""
        ...


class ImitationLearner(Learner):
    """Learner that trains the policy by SFT on one rank, with samples from records in shared memory."""

    def __init__(self, context: LearnerContext) -> None:
        assert context.objective is not None
        self._trainer = context.trainer
        self._policy = self._trainer.policy
        self._arena = context.arena
        self._objective = context.objective
        self._reference = context.reference
        self._history = context.env.history
        if self._objective.name is Objective.dpo and not isinstance(self._policy, TextPolicy | TokenPolicy):
            raise ConfigError(
                f"objective.name=dpo: model '{self._policy.spec.name}' cannot encode recorded actions as tokens. Use "
                "an OpenVLA-OFT model with discrete actions."
            )

    def update(self, request: ImitateRequest) -> UpdateGenerator[dict[str, float]]:
        """Take one optimizer step on the mean loss of the records, or evaluate the summed loss.

        A training step returns loss, grad_norm, lr and skipped_nonfinite. An evaluation returns the sums `loss`,
        `accuracy` and, if the policy measures it, `error`.
        """
        records = self._group_records(self._arena.read(request.record_refs))
        self._trainer.ranks.shard_weights()
        # Enable dropout; RL does not, because rollout and update must compute the same log-probabilities.
        self._policy.module.train(request.train)
        if not request.train:
            return self._evaluate(records)
        # Augmentation is seeded by sample and not by rank, so that images are the same on any number of ranks.
        augmentation = self._sample_augmentation(request.augment, len(records))
        step_result = yield from self._trainer.run_optimizer_step(
            self._trainer.split_micro_batches(len(records), self._count_tokens(records)),
            request.step,
            lambda rows: self._imitate(records[rows], None if augmentation is None else augmentation[:, rows]),
            lambda losses, rows: (losses.loss.sum() / len(records), None),
        )
        optimization = self._trainer.optimization
        optimization.zero_grad()
        self._trainer.update_statistics(self._arena, records)
        result = step_result[0] if step_result else {}
        return result | {"lr": optimization.lr, "skipped_nonfinite": float(step_result is None)}

    @torch.no_grad()
    def _evaluate(self, records: IntArray) -> dict[str, float]:
        ranks, parts = self._trainer.ranks, []
        for rows, counts in self._trainer.split_micro_batches(len(records), self._count_tokens(records)):
            losses = ranks.forward(lambda rows=rows: self._imitate(records[rows], None), last=True)
            if counts:
                error = {} if losses.error is None else {"error": float(losses.error.sum())}
                parts.append({"loss": float(losses.loss.sum()), "accuracy": float(losses.accuracy.sum()), **error})
        # Exchange sums and not means, because ranks may have measured different numbers of samples.
        parts = ranks.gather_metrics(parts)
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    def _count_tokens(self, records: IntArray) -> IntArray | None:
        """Return the number of tokens in each sample's forward pass, including the padding of pairs of answers.

        None: the number is not needed.
        """
        if self._trainer.cfg.max_tokens_per_mbs is None or not isinstance(self._policy, TextPolicy):
            return None
        prompt_lengths = self._policy.prompt_lengths(read_observation(self._arena, records))
        if not self._objective.needs_text_pairs:
            return prompt_lengths + (self._get_targets(records)[:, :, 0] >= 0).sum(1)
        tokens = self._policy.encode_replies(self._read_pairs(records))
        # Both answers of a pair are in one batch, padded to the length of the longer answer.
        return 2 * (prompt_lengths + (tokens >= 0).sum(1).reshape(2, -1).max(0))

    def _group_records(self, records: IntArray) -> IntArray:
        """Return the record of each sample [n]; for pairs of episodes, return (better, worse) records [n, 2]."""
        are_episode_pairs = self._objective.name is Objective.dpo and not isinstance(self._policy, TextPolicy)
        return records.reshape(-1, 2) if are_episode_pairs else records

    def _imitate(self, records: IntArray, augmentation: Tensor | None) -> ImitationLoss:
        if records.ndim == 2 and isinstance(self._policy, TokenPolicy):
            # The better chunks, followed by the worse chunks, each with its observation.
            flat = records.T.ravel()
            tokens = self._policy.encode_actions(self._arena[Record.action][flat])
            return self._compute_dpo_loss(read_observation(self._arena, flat), tokens)
        obs = read_observation(self._arena, records)
        if augmentation is not None:
            device = next(self._policy.module.parameters()).device
            obs = replace(obs, images=augment(obs.images, augmentation, device))
        match self._objective.name:
            case Objective.dpo:
                assert isinstance(self._policy, TextPolicy)
                tokens = self._policy.encode_replies(self._read_pairs(records))
                return self._compute_dpo_loss(_repeat_observations(obs, obs.instructions), tokens)
            case Objective.preference:
                return self._compute_preference_loss(obs, records)
            case Objective.success:
                return self._compute_success_loss(obs, records)
        if isinstance(self._policy, ImitatesPadded):
            return self._policy.imitate_padded(obs, self._get_targets(records), ~self._arena[Record.valid][records])
        return self._policy.imitate(obs, self._get_targets(records))

    def _compute_dpo_loss(self, obs: Observation, tokens: IntArray) -> ImitationLoss:
        """Compute the DPO loss; `tokens` contain the chosen answers [B], followed by the rejected answers [B]."""
        assert self._reference is not None, "no reference policy was built"
        # Both answers of a pair are in one batch, so that they are computed in the same way.
        with torch.no_grad():
            reference = self._reference.score(obs, tokens).logprob.sum(1)
        return self._compare_scores(self._objective.beta * (self._policy.score(obs, tokens).logprob.sum(1) - reference))

    def _compute_preference_loss(self, obs: Observation, records: IntArray) -> ImitationLoss:
        """Return the preference loss of the values of conversations that end with the better and the worse answer."""
        # The input of a reward model: the user's message and the reply, without the system prompt.
        prompts = [next(m for m in split_messages(text) if m.role != "system") for text in obs.instructions] * 2
        answers = [Message(role="assistant", content=remove_image_sizes(text)) for text in self._read_pairs(records)]
        conversations = tuple(join_messages(turns) for turns in zip(prompts, answers, strict=True))
        return self._compare_scores(self._compute_values(_repeat_observations(obs, conversations)))

    def _compute_success_loss(self, obs: Observation, records: IntArray) -> ImitationLoss:
        """Return the cross-entropy loss of the success classifier, whose logit is the value of the observation."""
        value = self._compute_values(obs)
        label = to_device(self._arena[Record.success][records, 0], value.device)
        loss = nn.functional.binary_cross_entropy_with_logits(value, label.float(), reduction="none")
        return ImitationLoss(loss=loss, accuracy=((value > 0) == label).float())

    def _read_pairs(self, records: IntArray) -> list[str]:
        """Return the better answers [B], followed by the worse answers [B]."""
        pairs = [split_messages(decode_instruction(row)) for row in self._arena[Record.reply][records]]
        return [pair[index].content for index in (0, 1) for pair in pairs]

    def _compare_scores(self, scores: Tensor) -> ImitationLoss:
        """Return the preference loss for scores [2B] of the better answers, followed by the worse answers."""
        better, worse = scores.chunk(2)
        loss = compute_preference_loss(better, worse, smoothing=self._objective.label_smoothing)
        return ImitationLoss(loss=loss, accuracy=(better > worse).float())

    def _compute_values(self, obs: Observation) -> Tensor:
        """Return the value [B] of each observation, with gradients."""
        # The value head uses only the input before the actions, so the tokens have no effect.
        dummy_tokens = np.zeros((len(obs), self._policy.spec.tokens_per_chunk), np.int64)
        return self._policy.score(obs, dummy_tokens).value[:, 0]

    def _get_targets(self, records: IntArray) -> FloatArray:
        """Return the target actions [B, K, A]; for text, the tokens of the replies [B, longest, 1]."""
        if not isinstance(self._policy, TextPolicy):
            return self._arena[Record.action][records]
        return encode_reply_batch(self._policy, self._arena[Record.reply][records])

    def _sample_augmentation(self, seeds: tuple[int, ...], count: int) -> Tensor | None:
        """Return the random numbers for augmentation (see `sample_augmentations`) on any number of ranks."""
        cameras = self._arena[Record.images].shape[1]
        if not seeds or not cameras:
            return None
        return sample_augmentations(seeds, count, self._trainer.cfg.micro_batch_size, cameras, self._history)


def encode_reply_batch(policy: TextPolicy, replies: np.ndarray) -> FloatArray:
    """Encode replies, which records store as UTF-8 bytes, to tokens [B, longest, 1] in the array format of actions."""
    return policy.encode_replies([decode_instruction(row) for row in replies])[:, :, None].astype(np.float32)


def _repeat_observations(obs: Observation, instructions: Sequence[str]) -> Observation:
    """Return the observations twice, as a batch of 2B; `instructions` has length 2B, or length B and is repeated."""
    repeated_instructions = tuple(instructions) * (2 * len(obs) // len(instructions))
    return Observation(
        images=np.tile(obs.images, (2, 1, 1, 1, 1)),
        state=np.tile(obs.state, (2, 1)),
        instructions=repeated_instructions,
    )


def compute_preference_loss(better: Tensor, worse: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Return -(1 - s) log sigmoid(d) - s log sigmoid(-d), d = better - worse [B] (Bradley and Terry, 1952).

    For the outputs of a value head, this is the loss of a reward model. For beta (log pi - log pi_ref), summed over the
    tokens of an answer, this is the loss of DPO (arXiv 2305.18290), and of conservative DPO with smoothing s > 0.
    """
    gap = better - worse
    # -log sigmoid(x) = log(1 + exp(-x)), in a form that does not overflow.
    return (-gap).clamp(min=0) + (-gap.abs()).exp().log1p() + smoothing * gap
