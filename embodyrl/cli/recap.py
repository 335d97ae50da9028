"""The command `recap`: rounds of collection, value training, labels and SFT, as in RECAP (arXiv 2511.14759)."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.cli.output import show_result
from embodyrl.commands import COMMANDS
from embodyrl.commands.recap_arguments import Arguments, read_arguments
from embodyrl.commands.recap_labelling import Stage, label_in_process
from embodyrl.commands.run_folder import lock_folder
from embodyrl.commands.sft import MEMORY_KEYS, WEIGHT_KEYS
from embodyrl.commands.sft_data import require_instructions
from embodyrl.commands.unchanged_data import check_unchanged
from embodyrl.config.compose import dir_flags, format_override
from embodyrl.config.paths import resolve_asset
from embodyrl.config.trust import format_shell_command
from embodyrl.data.cards import read_card
from embodyrl.data.recap.report import REPORT_TEXT, Round, read_score, write_report
from embodyrl.errors import Interrupted
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config
from embodyrl.plan.saved import find_ckpt_config
from embodyrl.plan.schema import Config
from embodyrl.policies import POLICIES
from embodyrl.policies.settings import ModelSettings
from embodyrl.types import PolicySpec

_EVALUATION_KEYS = ("seed", "model", "env", "eval", "reward", "algorithm.sampling_params")
"""Config keys that affect the success rate of an evaluation."""


def recap(args: argparse.Namespace) -> int:
    """Run `embodyrl recap`: all rounds, with a report."""
    arguments = read_arguments(args.words)
    with (
        contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext(),
        lock_folder(arguments.out),
    ):
        try:
            rounds, lines = Rounds(arguments, args.config_dir).run()
        except Interrupted as error:
            error.args = (f"{error}; to continue all rounds, run the same command again",)
            raise
    text = arguments.out / REPORT_TEXT
    show_result(args, {"rounds": rounds, "report": text}, [*lines, f"report   {text}"])
    return 0


class Rounds:
    """Runs the rounds of `embodyrl recap`; stages whose output files exist are not repeated."""

    def __init__(self, arguments: Arguments, config_dirs: Sequence[Path] = ()) -> None:
        self._arguments, self._cfg, self._dirs = arguments, arguments.cfg, config_dirs
        self._commands: list[str] = []
        self.finished: list[Round] = []

    def run(self) -> tuple[list[Round], list[str]]:
        """Run all unfinished stages; return the rounds and the report as lines of text.

        Raises:
            EmbodyError: any failure with a known cause.
        """
        out, lines = self._arguments.out, list[str]()
        require_instructions(self._policy())
        path_argument, *_ = (argument for argument in self._arguments.model if argument.startswith("model.path="))
        score = self._evaluate("round_0", list(self._arguments.model))
        self.finished.append(Round(number=0, run=path_argument.removeprefix("model.path="), **score))
        for number in range(1, self._cfg.rounds + 1):
            previous = out / f"round_{number - 1}"
            policy_arguments = [format_override("ckpt", str(previous))] if number > 1 else list(self._arguments.model)
            data = out / f"episodes_{number}"
            self._collect(number, data, policy_arguments)
            sft_cfg, run = self._sft_config(number), out / f"round_{number}"
            values = self._label(number, sft_cfg.model)
            check_unchanged(sft_cfg, run, keys=WEIGHT_KEYS, exempt=MEMORY_KEYS, alternative="recap.out")
            if sft_cfg.runner.max_steps not in CheckpointStore(run / "checkpoints").folders():
                COMMANDS.get("sft")(sft_cfg, resume=run if run.exists() else None)
            score = self._evaluate(run.name, [format_override("ckpt", str(run))])
            self.finished.append(Round(number=number, run=str(run), data=str(data), values=values, **score))
            lines = write_report(out, self.finished, self._commands)
        return self.finished, lines

    def _data_folders(self, number: int) -> list[str]:
        """Return the data sets of round `number`: the demonstrations and the episodes of rounds 1 to `number`."""
        return [
            self._arguments.demos,
            *(str(self._arguments.out / f"episodes_{index}") for index in range(1, number + 1)),
        ]

    def _collect(self, number: int, data: Path, policy_arguments: list[str]) -> None:
        """Collect episodes with the policy of the previous round; each round has a different seed."""
        round_arguments = [format_override("collect.out", str(data)), f"seed={self._arguments.seed + number}"]
        collect_arguments = ["collect.filter=all", "eval.sampling_params.do_sample=true", *round_arguments]
        cfg = self._compose(
            "collect",
            [
                *policy_arguments,
                *self._stage_arguments("collect"),
                *collect_arguments,
                *self._run_arguments(f"{data.name}_run"),
            ],
        )
        COMMANDS.get("collect")(cfg)

    def _label(self, number: int, model: ModelSettings) -> dict[str, Any]:
        """Train value models on the data sets of a round, and label all frames; return the metrics."""
        labels = self._labels_path(number)
        stage = Stage(
            folders=tuple(self._data_folders(number)),
            cfg=self._cfg,
            model=model,
            seed=self._arguments.seed,
            labels=labels,
            summary=labels.with_suffix(".json"),
        )
        return label_in_process(stage)

    def _labels_path(self, number: int) -> Path:
        return self._arguments.out / f"labels_{number}.parquet"

    def _sft_config(self, number: int) -> Config:
        """Return the SFT config of a round, with the initial weights and the labelled data sets of the round."""
        return self._compose("sft", self._sft_arguments(number))

    def _policy(self) -> PolicySpec:
        """Return the spec of the trained policy for the environment of the demonstrations."""
        model = self._load("sft", self._sft_arguments(1)).model
        return POLICIES.get(model.model_type).spec(model, read_card(resolve_asset(self._arguments.demos)).env, 0)

    def _sft_arguments(self, number: int) -> list[str]:
        extra_data = f"data.more=[{','.join(shlex.quote(path) for path in self._data_folders(number)[1:])}]"
        arguments = [
            extra_data,
            "data.val_share=0",
            format_override("objective.labels", str(self._labels_path(number))),
        ]
        run_arguments = self._run_arguments(f"round_{number}")
        return [*self._arguments.model, *self._stage_arguments("sft"), *arguments, *run_arguments]

    def _evaluate(self, name: str, policy_arguments: list[str]) -> dict[str, Any]:
        """Evaluate a policy on env.eval; return the success rate and its interval as fields of `Round`."""
        if not self._cfg.evaluate:
            return {}
        run = self._arguments.out / f"{name}_eval"
        cfg = self._compose("eval", [*policy_arguments, *self._stage_arguments("eval"), *self._run_arguments(run.name)])
        check_unchanged(
            cfg, run, keys=_EVALUATION_KEYS, exempt=("env.train", "env.eval.total_num_envs"), alternative="recap.out"
        )
        if (score := read_score(run)) is None:
            COMMANDS.get("eval")(cfg, resume=run if run.exists() else None)
            score = read_score(run)
        return score or {}

    def _stage_arguments(self, stage: str) -> tuple[str, ...]:
        return self._arguments.by_stage[stage]

    def _run_arguments(self, name: str) -> list[str]:
        folder = format_override("runner.output_dir", str(self._arguments.out))
        return [folder, f"runner.experiment_name={name}", "runner.on_existing=resume"]

    def _compose(self, command: str, arguments: list[str]) -> Config:
        """Compose and check the config of a stage, and record its command for the report."""
        cfg = self._load(command, arguments)
        self._commands.append(format_shell_command([command, *arguments, *dir_flags(self._dirs)], cfg))
        return cfg

    def _load(self, command: str, arguments: list[str]) -> Config:
        """Compose and check the config of a stage."""
        base = find_ckpt_config(arguments) if command != "sft" else None
        cfg = load_config(command, arguments, config_dirs=self._dirs, base=base)
        check_components(cfg)
        return cfg
