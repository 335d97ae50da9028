"""Checks that environment, policy and demonstrations support off-policy learning."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from dataclasses import replace

from embodyrl.algorithms.off_policy.estimator import ReplaySettings
from embodyrl.algorithms.off_policy.td3_bc import Td3BcSettings
from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.algorithms.settings import BufferSettings
from embodyrl.config.compose import flatten, format_override
from embodyrl.config.paths import resolve_asset
from embodyrl.config.plain_yaml import read_plain_yaml
from embodyrl.config.settings import to_builtin
from embodyrl.data.cards import read_card
from embodyrl.data.checks import describe_differences
from embodyrl.data.custom_reward import get_custom_reward
from embodyrl.data.layout import ENVIRONMENT_PATH, Card, is_embodyrl_dataset
from embodyrl.data.settings import Labels
from embodyrl.data.tables import read_episodes
from embodyrl.envs.settings import RewardSettings
from embodyrl.plan.schema import Config
from embodyrl.types import ActionKind, EnvSpec, PolicySpec

log = logging.getLogger(__name__)


def replay_problems(cfg: Config, algorithm: Algorithm, env: EnvSpec, policy: PolicySpec) -> Iterator[str]:
    """Yield the requirements of off-policy learning that a config violates, one line each."""
    if isinstance(cfg.algorithm, ReplaySettings) and not policy.differentiable:
        yield (
            f"adv_type '{cfg.algorithm.adv_type}' needs a policy with differentiable samples, but model "
            f"'{policy.name}' has none here. Use model=mlp or model=cnn with model.squashed=true, in an environment "
            "with real-valued actions, OpenVLA-OFT with model.likelihood=residual, or a flow policy, ACT or Diffusion "
            "Policy with model.likelihood=dsrl or residual; otherwise use algorithm=ppo."
        )
    if isinstance(cfg.algorithm, Td3BcSettings) and not policy.regresses:
        yield (
            f"adv_type '{cfg.algorithm.adv_type}' trains a regression head, but model '{policy.name}' has none here. "
            "Use OpenVLA-OFT with model.action_head=l1; otherwise use algorithm=filtered_bc or algorithm=sac."
        )
    if cfg.algorithm.imitates and policy.steering:
        yield (
            f"adv_type '{cfg.algorithm.adv_type}' trains the whole model, but {policy.steering.key} freezes it; remove "
            "the key, or use algorithm=sac."
        )
    rules = cfg.algorithm if isinstance(cfg.algorithm, ReplaySettings) else None
    folders = cfg.algorithm.demonstrations if isinstance(cfg.algorithm, BufferSettings) else []
    if rules and folders and policy.steering and not policy.steering.is_residual:
        yield f"algorithm.demonstrations has actions, but {policy.steering.key} selects noise; remove the first key."
        folders = []
    if rules and rules.hindsight_goals:
        yield from _hindsight_problems(cfg, env, policy)
    for key, reason in _unused_keys(policy) if rules else ():
        if cfg.is_set_by_user(key):
            log.warning("warning: %s has no effect: %s.", key, reason)
    for folder in folders:
        yield from _demonstration_problems(folder, cfg, env)


def _unused_keys(policy: PolicySpec) -> Iterator[tuple[str, str]]:
    """Yield config keys that have no effect for SAC, each with the reason."""
    yield "actor.micro_batch_size", "an update takes actor.global_batch_size samples at once"
    if policy.steering:
        yield "algorithm.image_shift", f"{policy.steering.key} freezes the model, whose features are stored"
    elif not policy.inputs.num_images:
        yield "algorithm.image_shift", f"model '{policy.name}' reads no images"


def _demonstration_problems(folder: str, cfg: Config, env: EnvSpec) -> Iterator[str]:
    """Yield the reasons why a data set cannot be used as demonstrations in this environment."""
    if env.action.kind is ActionKind.text:
        yield "algorithm.demonstrations contains robot actions; train on replies with `embodyrl sft`."
        return
    if not resolve_asset(folder).is_dir():
        override = shlex.quote(format_override("collect.out", folder))
        yield f"algorithm.demonstrations: {folder} is not a folder; create one with `embodyrl collect {override}`."
        return
    card = read_card(resolve_asset(folder))
    data_env = card.env
    longest = max((row["length"] for row in read_episodes(resolve_asset(folder))), default=0)
    if longest > (limit := cfg.env.train.time_limit(env)):
        log.warning(
            "warning: algorithm.demonstrations: an episode of %s has %d steps, more than the time limit of %d "
            "(env.train.max_episode_steps), so slower episodes fail; fix: raise the limit.",
            *(folder, longest, limit),
        )
    if not cfg.algorithm.imitates:
        yield from _transition_problems(folder, card, cfg, env)
    # Loading rotates the frames and converts declared grippers.
    converted_env = replace(
        data_env,
        cameras=replace(data_env.cameras, rotation_deg=env.cameras.rotation_deg),
        action=replace(data_env.action, gripper=data_env.action.gripper and env.action.gripper),
    )
    if differences := describe_differences(converted_env, env):
        yield (
            f"algorithm.demonstrations: {folder} and env '{env.name}' differ in {differences}. Collect data with the "
            "settings of this run."
        )
    elif not {*data_env.tasks} & {*env.tasks}:
        yield (
            f"algorithm.demonstrations: {folder} was recorded in env '{data_env.name}', which has no task of env "
            f"'{env.name}'. Collect demonstrations of these tasks, or train on that folder with `embodyrl sft`."
        )


def _transition_problems(folder: str, card: Card, cfg: Config, env: EnvSpec) -> Iterator[str]:
    """Yield the reasons why the recorded actions did not lead to the rewards and next observations of a data set."""
    # With expert_noise, the scripted expert acted, and its executed actions are computed from the labels.
    if card.collected.get("labels") == Labels.expert and not card.collected.get("expert_noise"):
        yield (
            f"algorithm.demonstrations: {folder} contains labels of the expert, not the executed actions that led "
            "to its rewards and next states. Set collect.labels=executed, or train on them with `embodyrl sft`."
        )
    if not is_embodyrl_dataset(resolve_asset(folder)):
        yield (
            f"algorithm.demonstrations: {folder} was written by another program, so its rewards are not those of "
            f"env '{env.name}'. Collect data with `embodyrl collect`, or train on this folder with `embodyrl sft`."
        )
    data_reward, run_reward = card.collected.get("reward"), get_custom_reward(cfg.reward).get("reward")
    if data_reward != run_reward:
        yield (
            f"algorithm.demonstrations: {folder} was collected with reward.path={data_reward and data_reward['path']}, "
            f"but this run has {run_reward and run_reward['path']}, or other reward settings. Collect with the same "
            "reward."
        )
    env_file = resolve_asset(folder) / ENVIRONMENT_PATH
    saved_values = flatten(read_plain_yaml(env_file)) if env_file.is_file() else {}
    run_values = flatten({"env": to_builtin(cfg.env)})
    keys = [key for key in saved_values if "reward" in key and saved_values[key] != run_values.get(key)]
    if keys:
        yield (
            f"algorithm.demonstrations: {folder} was collected with "
            f"{', '.join(f'{key}={saved_values[key]}, but this run has {run_values.get(key)}' for key in keys)}: "
            "critics would mix two rewards. Collect with the same settings."
        )


def _hindsight_problems(cfg: Config, env: EnvSpec, policy: PolicySpec) -> Iterator[str]:
    """Yield the reasons why hindsight relabeling is impossible for an environment and policy."""
    key = f"algorithm.hindsight_goals={getattr(cfg.algorithm, 'hindsight_goals', 0)}"
    if env.goal is None:
        yield (
            f"{key}: env '{env.name}' has no goals to relabel. Hindsight needs observations with achieved_goal and "
            "desired_goal (boxes of one shape) and a method compute_reward(achieved, desired, info) that returns, for "
            "an empty info, the reward of a step. Wrappers must keep the observation a dictionary; vector environments "
            "are not supported. Fix: use such an environment, or remove the key."
        )
    if policy.steering or not policy.inputs.state:
        yield f"{key}: the goal is a part of the state, which model '{policy.name}' does not read; use model=mlp."
    if policy.num_action_chunks > 1:
        yield (
            f"{key} needs single actions, but model.num_action_chunks={policy.num_action_chunks}; set "
            "model.num_action_chunks=1 (algorithm.n_step sums rewards of several steps)."
        )
    if isinstance(cfg.env, RewardSettings) and cfg.env.use_rel_reward:
        yield f"{key}: compute_reward returns rewards, not reward differences; set env.use_rel_reward=false."
    if get_custom_reward(cfg.reward):
        yield f"{key}: reward.path computes the reward for the original goal only; remove one of the two keys."


def iql_problems(cfg: Config, algorithm: Algorithm, env: EnvSpec, policy: PolicySpec) -> Iterator[str]:
    """Yield the requirements of implicit Q-learning that a config violates, one line each."""
    if env.action.kind is not ActionKind.box:
        yield f"adv_type 'iql' needs real-valued actions, but env '{env.name}' has {env.action.kind} actions."
    if policy.steering:
        yield f"adv_type 'iql' trains the whole model, but {policy.steering.key} freezes it; remove the key."
    if not cfg.algorithm.demonstrations:  # type: ignore[union-attr]
        yield (
            "algorithm.demonstrations is empty, but adv_type 'iql' trains on data sets only. Set "
            "algorithm.demonstrations=[FOLDER], for example data of `embodyrl collect` or runner.keep_episodes."
        )
    yield from replay_problems(cfg, algorithm, env, policy)
