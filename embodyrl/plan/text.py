"""Rows, reward functions and prompts of runs with text tasks."""

import json
from dataclasses import replace
from pathlib import Path

from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.text.reward_runner import build_reward_runner, find_reward_problems
from embodyrl.errors import ConfigError
from embodyrl.plan.schema import Config
from embodyrl.text.chat import ChatTemplate, count_unknown_tokens, find_control_tokens
from embodyrl.text.dataset import TextRows, open_rows, render_prompt
from embodyrl.text.gguf import language_model_folder
from embodyrl.text.rewards.programs import find_reference_problems
from embodyrl.text.rewards.services import COMPARING_REWARDS
from embodyrl.text.rewards.settings import TextRewardSettings
from embodyrl.text.settings import RowSettings

_MAX_PROMPT_CHARS = 600
"""Maximum number of characters of the prompt in `--dry-run`."""


def with_text_task(cfg: Config, context: EnvContext) -> EnvContext:
    """Return an environment context extended by the rows and reward functions of the config.

    Raises:
        ConfigError: a file, a row or a reward setting is invalid.
    """
    assert isinstance(cfg.reward, TextRewardSettings)
    runner = build_reward_runner(cfg.reward, cfg.algorithm.sampling_params.max_new_tokens or 1)
    rows = open_checked_rows(cfg, cfg.rows, json_answers=not {*runner.names} & {*COMPARING_REWARDS})
    if "code" in runner.names:
        _check_tests(rows)
    return replace(context, parts={"rows": rows, "reward_runner": runner})


def _check_tests(rows: TextRows) -> None:
    """Check the tests of `reward.name=code`.

    Raises:
        ConfigError: tests of a row cannot verify a program in another process.
    """
    errors = [
        f"row {index + 1}: {reason}"
        for index in range(len(rows))
        for reason in find_reference_problems(rows[index].reference)
    ]
    if errors:
        raise ConfigError(
            f"reward.name=code: {len(errors)} tests of {rows.name} cannot verify a program. {'; '.join(errors[:3])}. "
            "Change these tests or remove the rows."
        )


def open_checked_rows(cfg: Config, data: RowSettings, *, json_answers: bool = False) -> TextRows:
    """Open and check the rows of a run, with its tokenizer and chat template.

    Raises:
        ConfigError: see `open_rows`.
    """
    from embodyrl.policies import POLICIES

    # The folder is None for a model with its own small vocabulary.
    folder = language_model_folder(cfg.model.weights) if cfg.model.weights is not None else None
    template = None if folder is None else ChatTemplate.from_settings(cfg.model, folder)
    included = getattr(POLICIES.get(cfg.model.model_type), "default_folder", None)
    vocabulary = language_model_folder(included) if folder is None and included is not None else folder
    return open_rows(data, tokenizer=folder, template=template, vocabulary=vocabulary, json_answers=json_answers)


def prompt_banner_lines(cfg: Config, folder: Path) -> list[tuple[str, str]]:
    """Return lines (label, text) with the first prompt that the model receives, and its number of unknown tokens.

    Raises:
        ConfigError: see `open_rows`.
    """
    if not cfg.has("data") or not isinstance(cfg.data, RowSettings) or cfg.data.path is None:
        return []
    template = ChatTemplate.from_settings(cfg.model, folder)
    removed_tokens = {} if template is None else find_control_tokens(folder, template)
    text = render_prompt(open_checked_rows(cfg, cfg.data, json_answers=True)[0], template, removed_tokens)
    ((length, num_unknown),), _ = count_unknown_tokens([text], folder, template=template)
    half = _MAX_PROMPT_CHARS // 2
    excerpt = text if len(text) <= _MAX_PROMPT_CHARS else f"{text[:half]} ... {text[-half:]}"
    lines = [("prompt", f"{json.dumps(excerpt, ensure_ascii=False)} ({length} tokens, {num_unknown} of them unknown)")]
    source = cfg.sources.get("data.prompt_template")
    if source is not None and cfg.data.prompt_template != "{prompt}":
        lines.append(("", f"with the text of data.prompt_template ({source})"))
    return lines


def text_problems(cfg: Config) -> list[str]:
    """Return errors in the sections `data` and `reward`, one line each."""
    assert isinstance(cfg.reward, TextRewardSettings)
    problems = find_reward_problems(cfg.reward)
    if cfg.data.path is None:
        problems.append(
            "data.path is not set. Set a .jsonl or .parquet file, a folder of such files, or package.module:function."
        )
    if cfg.algorithm.sampling_params.max_new_tokens is None:
        problems.append("algorithm.sampling_params.max_new_tokens is not set. Set it to the maximum length of a reply.")
    return problems
