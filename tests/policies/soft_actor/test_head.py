"""Squashed Gaussian distribution of actions."""

import numpy as np
import torch

from embodyrl.policies.soft_actor.head import SquashedHead


def test_constant_action_dimension_stays_finite():
    head = SquashedHead((-1.0, 0.5), (3.0, 0.5))
    choice = np.array([[[0.3, -0.4]]], np.float32)
    actions = head.to_actions(choice)
    np.testing.assert_allclose(head.normalize(actions), np.tanh(choice), rtol=1e-5)
    np.testing.assert_allclose(head.from_actions(actions), choice, rtol=1e-4)


def test_squashed_density_matches_torch():
    """Density of the tanh of a Gaussian's sample, whose deviation is multiplied by the temperature."""
    head, outputs = SquashedHead((-2.0,), (2.0,)), torch.tensor([[[0.3, -0.5]], [[-1.0, 0.4]]])
    choice = torch.tensor([[[0.9]], [[-1.7]]])
    gauss = torch.distributions.Normal(outputs[..., :1], outputs[..., 1:].exp() * 1.3)
    squashed = torch.distributions.TransformedDistribution(gauss, [torch.distributions.TanhTransform()])
    logprob, entropy = head.score(outputs, choice, 1.3)
    torch.testing.assert_close(logprob, squashed.log_prob(choice.tanh()), rtol=1e-4, atol=1e-4)
    assert torch.equal(entropy, -logprob)
