"""Output of `--dry-run`: a description of the run, built without worker processes."""

import importlib

from embodyrl.cluster import LAUNCHERS
from embodyrl.commands.evaluate import find_baseline
from embodyrl.commands.facts import evaluation_facts, facts, training_facts
from embodyrl.commands.run_folder import first_weights, weight_facts
from embodyrl.plan.run_plan import build_run_plan
from embodyrl.plan.schema import READS, Config
from embodyrl.policies import POLICIES


def describe(cfg: Config) -> str:
    """Return the output of `--dry-run` for a config; the command's function in `READS` provides the lines."""
    module, _, name = READS.get(cfg.command).dry_run.partition(":")
    lines: list[tuple[str, str]] = getattr(importlib.import_module(module), name)(cfg)
    if cfg.has("model") and hasattr(factory := POLICIES.get(cfg.model.model_type), "prompt_facts"):
        lines += factory.prompt_facts(cfg)
    if launcher := getattr(cfg, "launcher", None):
        hosts = LAUNCHERS.get(launcher.name).preview(getattr(cfg, "cluster", None))
        lines += [("hosts", hosts)] if hosts else []
    return "\n".join(f"  {label:<12} {text}" for label, text in lines)


def run_facts(cfg: Config) -> list[tuple[str, str]]:
    """Return the `--dry-run` lines (label, text) of a training or an evaluation."""
    training = cfg.trains and not cfg.runner.only_eval
    run_plan = build_run_plan(cfg, training=training)
    if not training:
        find_baseline(cfg)
    lines = [*facts(run_plan), *weight_facts(cfg, first_weights(cfg, run_plan.env), run_plan.env)]
    lines += training_facts(run_plan) if training else run_plan.resources.facts(run_plan)
    return [*lines, *evaluation_facts(run_plan)]
