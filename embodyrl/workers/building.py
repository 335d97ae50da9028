"""Construction of the components of a policy process: policy, reference policy, process group, learner."""

from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import cast

from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.channels.arena import Arena
from embodyrl.errors import ConfigError
from embodyrl.learners.precision import cast_to_bfloat16
from embodyrl.learners.protocol import Learner, LearnerContext
from embodyrl.learners.ranks import Ranks
from embodyrl.learners.training import Trainer
from embodyrl.policies.protocol import POLICIES, Policy, TextPolicy
from embodyrl.policies.tensors import get_best_device
from embodyrl.workers.lifecycle import PolicyHostInit


def build_policy(init: PolicyHostInit) -> Policy:
    """Build the policy with its initial weights."""
    policy = POLICIES.get(init.model.model_type).build(init.model, replace(init.request, device=get_best_device()))
    if init.start_from is not None:
        policy.load_weights(Path(init.start_from))
    return policy


def open_ranks(init: PolicyHostInit, policy: Policy) -> Ranks:
    """Join the process group of the actor ranks and shard the policy's weights (collective)."""
    if not init.shards:
        return Ranks(init.rank_info)
    gradient_sync = init.gradient_sync or init.actor.fsdp.gradient_sync
    from embodyrl.learners.fsdp import ShardedRanks

    return ShardedRanks(
        policy.module,
        init.rank_info,
        init.actor.fsdp,
        gradient_sync=gradient_sync,
        bfloat16=init.model.uses_bf16,
        acts=init.acts,
    )


def casts_to_bfloat16(init: PolicyHostInit, policy: Policy) -> bool:
    """Return True if storing frozen float32 weights in the compute precision does not change results.

    Models with adapters or steering already store frozen weights in half precision; trained weights stay in float32.
    """
    return init.model.uses_bf16 and not init.model.trains_adapters and not policy.spec.steering


def build_learner(init: PolicyHostInit, trainer: Trainer, arena: Arena, algorithm: Algorithm | None) -> Learner:
    """Build the learner of the algorithm's estimator, or of the SFT objective."""
    reference = None
    if (algorithm or init.objective).needs_reference:
        # After the policy was sharded, so that two whole models are never in the memory of a GPU at once.
        reference = _build_reference(init, trainer.policy)
        reference.module.requires_grad_(False)
    context = LearnerContext(
        trainer=trainer,
        arena=arena,
        algorithm=algorithm,
        objective=init.objective,
        seed=init.seed,
        env=init.request.env,
        goal_env=init.env,
        reference=reference,
    )
    return resolve_name((init.objective if algorithm is None else algorithm.estimator).learner)(context)


def _build_reference(init: PolicyHostInit, policy: Policy) -> Policy:
    """Build the frozen reference policy: the initial policy, or another policy with the same vocabulary."""
    own = getattr(policy, "policy_without_critic", policy)  # without the value head
    if init.algorithm is not None and (url := init.algorithm.reference_url) is not None:
        return cast(Policy, cast(TextPolicy, own).build_served_reference(url, init.algorithm.reference_model))
    path = (init.objective if init.algorithm is None else init.algorithm).reference_path
    if path is None:
        initial_policy = build_policy(init)
        reference = getattr(initial_policy, "policy_without_critic", initial_policy)
        if casts_to_bfloat16(init, policy):
            cast_to_bfloat16(reference.module, sharded=init.shards)
        return reference
    request = replace(init.request, device=get_best_device(), trainable=False, backend="hf", critic=None)
    reference = POLICIES.get(init.model.model_type).build(init.model.without_adapters(path), request)
    reference.load_weights(Path(path))
    if getattr(policy, "vocabulary", None) != getattr(reference, "vocabulary", None):
        raise ConfigError(
            f"algorithm.reference_path={path}: its tokenizer or action statistics differ from the policy's, so token "
            f"log-probs are not comparable. Use a model of the same family and data."
        )
    return reference
