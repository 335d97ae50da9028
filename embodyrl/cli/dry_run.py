"""Output of `--dry-run`: a description of the run, built without worker processes."""

from embodyrl.cluster import LAUNCHERS
from embodyrl.commands.facts import evaluation_banner, facts, training_facts
from embodyrl.commands.run_folder import first_weights, weight_facts
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.schema import Config
from embodyrl.plan.text import prompt_facts
from embodyrl.policies import POLICIES
from embodyrl.reports.history import read_baseline


def describe(cfg: Config) -> str:
    """Return the output of `--dry-run` for a config."""
    lines = _lines(cfg)
    if find_folder := getattr(POLICIES.get(cfg.model.model_type), "folder", None):
        lines += prompt_facts(cfg, find_folder(cfg.model))
    if cfg.has("launcher"):
        hosts = LAUNCHERS.get(cfg.launcher.name).preview(cfg.cluster)
        lines += [("hosts", hosts)] if hosts else []
    return "\n".join(f"  {label:<12} {line_text}" for label, line_text in lines)


def run_facts(cfg: Config) -> list[tuple[str, str]]:
    """Return the `--dry-run` lines (label, text) of a training or an evaluation."""
    training = cfg.trains and not cfg.runner.only_eval
    run_plan = build_run_plan(cfg, training=training)
    if not training:
        read_baseline(cfg)
    lines = [*facts(run_plan), *weight_facts(cfg, first_weights(cfg, run_plan.env), run_plan.env)]
    lines += training_facts(run_plan) if training else run_plan.resources.facts(run_plan)
    return [*lines, *evaluation_banner(run_plan)]


def _lines(cfg: Config) -> list[tuple[str, str]]:
    """Return the lines of the command; the modules of other commands are not imported."""
    if cfg.command == "collect":
        from embodyrl.commands.collect import collection_facts as lines
    elif cfg.command == "dagger":
        from embodyrl.commands.dagger import dagger_facts as lines
    elif cfg.command == "serve":
        from embodyrl.serving.serve import server_facts as lines
    elif cfg.command == "sft":
        from embodyrl.commands.sft_setup import sft_facts as lines
    else:
        lines = run_facts
    return [*lines(cfg)]
