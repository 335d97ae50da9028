"""Rows, reward functions and prompts of runs with text tasks."""

import json
from dataclasses import replace
from pathlib import Path

from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.text.reward_runner import build_reward_runner
from embodyrl.envs.text.reward_runner import problems as judge_problems
from embodyrl.errors import ConfigError
from embodyrl.plan.schema import Config
from embodyrl.text.chat import ChatTemplate, control_tokens, count_unknown
from embodyrl.text.dataset import TextRows, open_rows, rendered_prompt
from embodyrl.text.gguf import language_model_folder
from embodyrl.text.rewards.programs import reference_problems
from embodyrl.text.rewards.services import COMPARING
from embodyrl.text.rewards.settings import TextRewardSettings
from embodyrl.text.settings import RowSettings

_SHOWN = 600
"""Maximum number of characters of the prompt in `--dry-run`."""


def give_task(cfg: Config, context: EnvContext) -> EnvContext:
    """Return an environment context extended by the rows and reward functions of the config.

    Raises:
        ConfigError: a file, a row or a reward setting is invalid.
    """
    assert isinstance(cfg.reward, TextRewardSettings)
    judge = build_reward_runner(cfg.reward, cfg.algorithm.sampling_params.max_new_tokens or 1)
    rows = checked_rows(cfg, cfg.rows, json_answers=not {*judge.names} & {*COMPARING})
    if "code" in judge.names:
        _check_tests(rows)
    return replace(context, parts={"rows": rows, "judge": judge})


def _check_tests(rows: TextRows) -> None:
    """Check the tests of `reward.name=code`.

    Raises:
        ConfigError: tests of a row cannot verify a program in another process.
    """
    found = [f"row {i + 1}: {why}" for i in range(len(rows)) for why in reference_problems(rows[i].reference)]
    if found:
        raise ConfigError(
            f"reward.name=code: {len(found)} tests of {rows.name} cannot verify a program. {'; '.join(found[:3])}. "
            "Change these tests or remove the rows."
        )


def checked_rows(cfg: Config, data: RowSettings, *, json_answers: bool = False) -> TextRows:
    """Open and check the rows of a run, with its tokenizer and chat template.

    Raises:
        ConfigError: see `open_rows`.
    """
    from embodyrl.policies import POLICIES

    folder = tokenizer_folder(cfg)
    template = None if folder is None else ChatTemplate.of(cfg.model, folder)
    own = getattr(POLICIES.get(cfg.model.model_type), "start", None)
    vocabulary = language_model_folder(own) if folder is None and own is not None else folder
    return open_rows(data, tokenizer=folder, template=template, vocabulary=vocabulary, json_answers=json_answers)


def tokenizer_folder(cfg: Config) -> Path | None:
    """Return the tokenizer folder for prompt lengths; None for a model with its own small vocabulary."""
    return language_model_folder(cfg.model.weights) if cfg.model.weights is not None else None


def prompt_facts(cfg: Config, folder: Path) -> list[tuple[str, str]]:
    """Return lines (label, text) with the first prompt as the model gets it, and its number of unknown tokens.

    Raises:
        ConfigError: see `open_rows`.
    """
    if not cfg.has("data") or not isinstance(cfg.data, RowSettings) or cfg.data.path is None:
        return []
    template = ChatTemplate.of(cfg.model, folder)
    controls = {} if template is None else control_tokens(folder, template)
    text = rendered_prompt(checked_rows(cfg, cfg.data, json_answers=True)[0], template, controls)
    ((length, strange),), _ = count_unknown([text], folder, template=template)
    shown = text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
    lines = [("prompt", f"{json.dumps(shown, ensure_ascii=False)} ({length} tokens, {strange} of them unknown)")]
    where = cfg.sources.get("data.prompt_template")
    if where is not None and cfg.data.prompt_template != "{prompt}":
        lines.append(("", f"with the text of data.prompt_template ({where})"))
    return lines


def text_problems(cfg: Config) -> list[str]:
    """Return errors in the sections `data` and `reward`, one line each."""
    assert isinstance(cfg.reward, TextRewardSettings)
    problems = judge_problems(cfg.reward)
    if cfg.data.path is None:
        problems.append(
            "data.path is not set. Set a .jsonl or .parquet file, a folder of such files, or package.module:function."
        )
    if cfg.algorithm.sampling_params.max_new_tokens is None:
        problems.append("algorithm.sampling_params.max_new_tokens is not set. Set it to the maximum length of a reply.")
    return problems
