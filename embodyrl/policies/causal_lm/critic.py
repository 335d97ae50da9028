"""Separate critic: a second language model that only computes values."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from embodyrl.errors import ConfigError
from embodyrl.policies.protocol import Policy, TextPolicy, get_weights_version, mark_weights_changed
from embodyrl.types import FloatArray, IntArray, Observation, PolicyOutput, PolicyScores

CRITIC_FOLDER = "critic"


class PolicyWithCritic:
    """Text policy with a separate critic model that computes the values; implements `TextPolicy` and `HasEngine`.

    The critic's weights are part of the module's `value_head`, so that they have the learning rate, the gradient limit
    and the warm-up of value heads.
    """

    def __init__(self, policy: Policy, critic: Policy, path: str) -> None:
        """Combine a policy with a critic loaded from `path`.

        Raises:
            ConfigError: the critic and the policy have different tokenizers.
        """
        vocabulary, critic_vocabulary = (getattr(part, "vocabulary", None) for part in (policy, critic))
        if vocabulary is None or vocabulary != critic_vocabulary:
            raise ConfigError(
                f"critic.path={path}: its tokenizer differs from the policy's. Use a model of the same family."
            )
        self.vocabulary = vocabulary
        self.policy_without_critic = policy
        """Policy without the critic, used as the reference policy."""
        self._policy, self._critic = policy, critic
        assert isinstance(policy, TextPolicy), "only text policies have a vocabulary"
        self.values, self.imitate = critic.values, policy.imitate
        self.encode_replies, self.prompt_lengths = policy.encode_replies, policy.prompt_lengths
        self.build_served_reference = policy.build_served_reference
        self.free_engine_memory = getattr(policy, "free_engine_memory", lambda: None)
        self.spec = replace(policy.spec, value_dim=critic.spec.value_dim)
        self.module: nn.Module = nn.ModuleDict({"policy": policy.module, "value_head": critic.module})
        self._version = 0

    def act(self, obs: Observation, *, noise: FloatArray | None, temperature: float | None = None) -> PolicyOutput:
        """Return a reply to each conversation, with values of the critic (see `Policy.act`)."""
        if (version := get_weights_version(self.module)) != self._version:
            mark_weights_changed(self._policy.module)  # an inference engine loads the weights of this module
            self._version = version
        output = self._policy.act(obs, noise=noise, temperature=temperature)
        with torch.no_grad():
            value = self._critic.score(obs, output.tokens).value.float().cpu().numpy()
        return replace(output, value=value)

    def score(self, obs: Observation, tokens: IntArray) -> PolicyScores:
        """Return the policy's scores of tokens, with values of the critic (see `Policy.score`)."""
        return replace(self._policy.score(obs, tokens), value=self._critic.score(obs, tokens).value)

    def save(self, folder: Path) -> None:
        """Save the policy, and the critic in the subfolder `critic/`."""
        self._policy.save(folder)
        (folder / CRITIC_FOLDER).mkdir()
        self._critic.save(folder / CRITIC_FOLDER)

    def load_weights(self, folder: Path) -> None:
        """Load the weights (see `Policy.load_weights`); if the folder has no critic, the critic is unchanged."""
        self._policy.load_weights(folder)
        if (folder / CRITIC_FOLDER).is_dir():
            self._critic.load_weights(folder / CRITIC_FOLDER)
        mark_weights_changed(self.module)
