"""Training of a language model with GRPO from Python: model, reward function and rows of data."""

from __future__ import annotations

import inspect
import json
import secrets
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodyrl.api.commands import compose, train
from embodyrl.config.compose import format_override
from embodyrl.errors import ConfigError

if TYPE_CHECKING:
    from embodyrl.commands.train import TrainResult

Reward = Callable[[str, str, str], float]
"""Reward function of prompt, response and reference; a reward of at least 1 is a success."""


class GRPO:
    """Trainer for a language model with GRPO (Shao et al. 2024, arXiv:2402.03300).

    For example:

        def short(prompt, response, reference):
            return 1.0 - len(response) / 100

        result = embodyrl.GRPO("models/Qwen3-0.6B", short, [{"prompt": "Say hello."}]).train()
    """

    def __init__(self, model: str, reward: Reward, rows: Sequence[Mapping[str, Any]], *overrides: str) -> None:
        """Store the arguments; `train` starts the training.

        Args:
            model: a folder in the Hugging Face layout, or "tiny": a random model of half a million parameters.
            reward: a function that `def` defines at the top level of a module, or a self-contained function of a script
                or notebook (imports in its body).
            rows: `{"prompt": text or messages, "answer": text}`; the answer may be missing.
            overrides: arguments as for `embodyrl train`, for example "runner.max_steps=50".
        """
        self.model, self.reward, self.rows, self.overrides = model, reward, list(rows), overrides

    def train(self, **callbacks: Any) -> TrainResult:
        """Train the model; `callbacks` are `on_step` and `on_eval`, as in `embodyrl.train`.

        Raises:
            ConfigError: worker processes cannot import the reward function by its name.
            EmbodyError: any other failure with a known cause.
        """
        with tempfile.TemporaryDirectory(prefix="embodyrl-rows-") as folder:
            rows = Path(folder) / "rows.jsonl"
            # Reward functions always receive a reference, which is empty for rows without an answer.
            row_lines = (json.dumps({"answer": "", **row}) + "\n" for row in self.rows)
            rows.write_text("".join(row_lines), encoding="utf-8")
            model = ["model=causal_lm", format_override("model.path", self.model)]
            if self.model == "tiny":
                model = ["model=causal_lm_tiny"]
            reward = f"reward.path={_get_import_path(self.reward, Path(folder))}"
            data_overrides = (format_override("data.path", str(rows)), reward)
            sys.path.insert(0, folder)  # spawned processes inherit sys.path
            try:
                cfg = compose("train", "env=text/math", *model, *_FIXED_OVERRIDES, *data_overrides, *self.overrides)
                return train(cfg, **callbacks)
            finally:
                sys.path.remove(folder)


_FIXED_OVERRIDES = (
    *("data.prompt_key=prompt", "data.answer_key=answer", 'data.prompt_template="{prompt}"', "reward.name=null"),
    *("algorithm.sampling_params.max_new_tokens=64", "eval.episodes=64"),
)


def _get_import_path(reward: Reward, folder: Path) -> str:
    """Return an import path (module:function) for a reward function.

    The source of a function of a script or notebook is written to a file in `folder`.

    Raises:
        ConfigError: the function has no name by which a process can import it.
    """
    in_script = reward.__module__ == "__main__"
    name = getattr(reward, "__name__" if in_script else "__qualname__", "")
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f"reward={reward!r:.80} cannot be imported by other processes. Define a function with `def` at the top "
            "level of a module, script or notebook."
        )
    if not in_script:
        return f"{reward.__module__}:{name}"
    module = f"embodyrl_reward_{secrets.token_hex(4)}"  # a new name, because this process has imported earlier modules
    (folder / f"{module}.py").write_text(textwrap.dedent(inspect.getsource(reward)), encoding="utf-8")
    return f"{module}:{name}"
