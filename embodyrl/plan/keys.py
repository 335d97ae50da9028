"""The keys of a command with its parts, all keys there are, and which one was meant by a name that is none."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, create_model

from embodyrl.algorithms.protocol import ADVANTAGES, LOSSES
from embodyrl.cluster import LAUNCHERS
from embodyrl.cluster.protocol import ClusterSection
from embodyrl.config.settings import Key, Settings, join, keys_of, parents_of
from embodyrl.datasets.settings import DemonstrationSettings
from embodyrl.envs import ENVS
from embodyrl.envs.reward import RewardSection
from embodyrl.errors import ConfigError
from embodyrl.plan.roots import ROOTS, SELECTORS, ActingConfig, Root, TextTask, name_of, selected
from embodyrl.policies import POLICIES
from embodyrl.registry import Registry, closest


@dataclass(frozen=True, slots=True)
class CommandKeys:
    """The keys of a command; implements `KeyTree`."""

    command: str

    def choose(self, values: Mapping[str, Any], problems: list[str]) -> tuple[type[Root], frozenset[str]]:
        """See `KeyTree.choose`."""
        root, fields, unclear = ROOTS[self.command], {}, set()
        for group, (_, settings) in SELECTORS.items():
            base = selected(root, group)
            if base is None:
                continue
            try:
                fields[group] = join(settings(values), base)
            except ConfigError as error:
                problems += error.problems
                unclear.add(group)
        bases: list[type[Settings]] = [root]
        factory = ENVS.get(values["env.env_type"]) if "env" in fields else None
        if getattr(factory, "reads_rows", False):
            bases.insert(0, TextTask)
        elif issubclass(root, ActingConfig) and (section := getattr(factory, "section", None)):
            bases.insert(0, section)
        if "launcher" in fields and (section := LAUNCHERS.get(name_of(values, "launcher.name", "local")).section):
            bases.insert(0, section)
        return _complete(tuple(bases), tuple(fields.items())), frozenset(unclear)

    def is_known(self, name: str) -> bool:
        """See `KeyTree.is_known`."""
        return is_known(name)

    def suggest(self, name: str, likely: type[Settings]) -> str:
        """See `KeyTree.suggest`."""
        return suggest(name, likely)

    def reader(self, name: str, values: Mapping[str, Any]) -> str:
        """See `KeyTree.reader`."""
        root, group = ROOTS[self.command], name.partition(".")[0]
        if group in TextTask.model_fields and selected(root, "env"):
            group = "env"  # whose kind decides whether there are rows
        if selected(root, group) is None:
            return f"`embodyrl {self.command}`"
        keys = ("adv_type", "loss_type") if group == "algorithm" else (SELECTORS[group][0],)
        return " with ".join(f"{key} '{values.get(f'{group}.{key}')}'" for key in keys)


@functools.cache
def _complete(bases: tuple[type[Settings], ...], fields: tuple[tuple[str, type[Settings]], ...]) -> type[Root]:
    given = {name: (kind, Field(default_factory=kind)) for name, kind in fields}
    return create_model(bases[-1].__name__, __base__=bases, **given)  # type: ignore[call-overload]


@functools.cache
def all_keys() -> Mapping[str, Key]:
    """Every key of every command with any registered part, by dotted name."""
    groups = dict.fromkeys(name for section in _SECTIONS for name in section.model_fields)
    return {name: key for group in groups for name, key in keys_below(group).items()}


@functools.cache
def keys_below(group: str) -> Mapping[str, Key]:
    """The keys of one group (or the one key of that name), whatever the command and the parts."""
    found: dict[str, Key] = {}
    for section in _SECTIONS:
        found |= {name: key for name, key in keys_of(section).items() if name.partition(".")[0] == group}
    for registry in _PARTS.get(group, ()):
        for part in _installed(registry):
            found |= keys_of(part.settings, f"{group}.")
    return found | (keys_of(DemonstrationSettings, "data.") if group == "data" else {})


_SECTIONS: tuple[type[Settings], ...] = (*ROOTS.values(), RewardSection, TextTask, ClusterSection)
_PARTS = {"env": (ENVS,), "model": (POLICIES,), "launcher": (LAUNCHERS,), "algorithm": (ADVANTAGES, LOSSES)}


def _installed(registry: Registry[Any]) -> Iterator[Any]:
    for name in registry.names():
        # A part may need a package that is not there, or is damaged.
        with contextlib.suppress(ConfigError, ImportError):
            yield registry.get(name)


_RETIRED = frozenset(
    {
        *("custom", "rollout.enable_offload", "actor.enable_offload", "env.train.enable_offload"),
        *("env.eval.enable_offload", "algorithm.sampling_params.do_sample", "env.eval.auto_reset"),
        *("env.eval.use_fixed_reset_state_ids", "env.eval.max_steps_per_rollout_epoch", "eval.standard"),
    }
)
"""Keys of earlier versions that never did anything; runs of those versions have them in their config.yaml."""


def is_known(name: str) -> bool:
    """Whether some command with some part reads this key, or one below or above it."""
    known = keys_below(name.partition(".")[0])
    inner = any(key.startswith(f"{name}.") for key in known)
    above = any(p in _RETIRED or (p in known and known[p].free) for p in parents_of(name))
    return name in known or inner or above or name in _RETIRED


_SYNONYMS = {
    word: key
    for key, words in {
        "lr": "learning_rate step_size alpha",
        "value_lr": "critic_lr value_learning_rate vf_lr",
        "clip_grad": "max_grad_norm grad_clip clip_grad_norm gradient_clipping grad_norm_clip",
        "weight_decay": "wd l2",
        "adam_eps": "eps epsilon",
        "schedule": "lr_scheduler scheduler lr_scheduler_type lr_schedule",
        "warmup_steps": "lr_warmup_steps warmup num_warmup_steps",
        "global_batch_size": "batch_size train_batch_size mini_batch_size minibatch_size ppo_mini_batch_size",
        "micro_batch_size": "per_device_train_batch_size micro_batch mbs ppo_micro_batch_size",
        "update_epoch": "ppo_epochs update_epochs num_epochs k_epochs n_epochs epochs inner_epochs",
        "max_steps": "steps num_steps iterations num_iterations total_steps max_iterations train_steps total_timesteps"
        " total_training_steps",
        "max_epochs": "total_epochs num_train_epochs",
        "save_interval": "save_freq save_steps save_every checkpoint_interval checkpoint_every every",
        "val_check_interval": "eval_freq test_freq val_freq eval_interval eval_every eval_steps val_interval",
        "experiment_name": "run_name name exp_name",
        "output_dir": "out_dir log_dir save_dir default_local_dir checkpoint_dir logdir",
        "backends": "logger loggers report_to tracker wandb project",
        "group_size": "num_generations n_samples_per_prompt rollout_n num_samples n_samples group_n",
        "clip_ratio_high": "clip_range cliprange clip_eps eps_clip clip_ratio clip_epsilon epsilon_high cliprange_high",
        "clip_ratio_low": "epsilon_low cliprange_low clip_low",
        "kl_beta": "kl_coef beta kl_coeff kl_loss_coef init_kl_coef",
        "entropy_bonus": "ent_coef entropy_coef entropy_coeff entropy_weight",
        "gamma": "discount discount_factor",
        "gae_lambda": "lam lambda lambd lambda_",
        "loss_type": "policy_loss loss",
        "adv_type": "adv_estimator advantage_estimator estimator",
        "total_num_envs": "num_envs n_envs envs",
        "env_workers": "num_workers n_workers workers num_env_workers",
        "max_episode_steps": "horizon max_steps_per_episode episode_length time_limit max_timesteps",
        "reward_coef": "reward_scale",
        "task_ids": "tasks task task_id",
        "path": "model_path model_name_or_path pretrained checkpoint pretrained_path data_path dataset",
        "precision": "dtype torch_dtype bf16 fp16",
        "is_lora": "use_lora lora_enabled peft",
        "r": "rank lora_rank",
        "do_sample": "greedy deterministic_eval",
        "compiled": "torch_compile",
        "episodes": "num_episodes n_episodes eval_episodes num_eval_episodes",
        "max_new_tokens": "max_tokens max_completion_length response_length max_response_length",
        "size": "num_gpus gpus world_size n_gpus",
        "gradient_checkpointing": "activation_checkpointing enable_gradient_checkpointing",
        "expert_noise": "noise noise_std",
    }.items()
    for word in words.split()
}
"""What others call our keys: their word, and the last part of ours."""


def suggest(name: str, likely: type[Settings] | None = None) -> str:
    """Return " Did you mean '...'?" for an unknown key: a slip, the same last part elsewhere, another word for it, the
    nearest spelling.

    `likely`: what the command reads with the chosen parts. It is searched first, as all other parts would have to be
    imported.
    """
    if likely is not None and (found := _nearest(name, _with_parents(keys_of(likely)), 0.75)):
        return found
    return _nearest(name, _with_parents(all_keys()), 0.65)


def _nearest(name: str, names: list[str], cutoff: float) -> str:
    group, tail = name.partition(".")[0], name.rpartition(".")[2]
    if slip := closest(name, [n for n in names if n.partition(".")[0] == group], cutoff=0.9):
        return slip
    for word in (tail, _SYNONYMS.get(tail.lower()), *(tail.split("_") if cutoff < 0.75 else ())):
        same = [n for n in names if n.rpartition(".")[2] == word]
        if same := ([n for n in same if ("eval" in n) == ("eval" in name)] or same):
            return closest(name, same, cutoff=0.0)
    if nearest := closest(name, names, cutoff=0.75):
        return nearest
    if word := closest(tail, {n.rpartition(".")[2] for n in names}, cutoff=0.75):
        return closest(name, [n for n in names if n.rpartition(".")[2] == word.split("'")[1]], cutoff=0.0)
    return closest(name, names, cutoff=cutoff)


def _with_parents(keys: Mapping[str, Key]) -> list[str]:
    return [*keys, *{parent for key in keys for parent in parents_of(key)}]
