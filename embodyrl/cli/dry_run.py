"""Output of `--dry-run`: a description of the run, built without worker processes."""

from embodyrl.cluster import LAUNCHERS
from embodyrl.commands.banner import (
    evaluation_banner_lines,
    machine_banner_lines,
    start_banner_lines,
    training_banner_lines,
)
from embodyrl.commands.run_folder import resolve_initial_weights
from embodyrl.monitor.phases import format_rough_duration
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.memory_limits import resource_banner_lines
from embodyrl.plan.rates import predict
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.schema import Config
from embodyrl.plan.text import prompt_banner_lines
from embodyrl.policies import POLICIES


def describe(cfg: Config) -> str:
    """Return the output of `--dry-run` for a config."""
    lines = _get_banner_lines(cfg)
    if find_folder := getattr(POLICIES.get(cfg.model.model_type), "folder", None):
        lines += prompt_banner_lines(cfg, find_folder(cfg.model))
    if cfg.has("launcher"):
        hosts = LAUNCHERS.get(cfg.launcher.name).describe_hosts(cfg.cluster)
        lines += [("hosts", hosts)] if hosts else []
    return "\n".join(f"  {label:<12} {line_text}" for label, line_text in lines)


def run_banner_lines(cfg: Config) -> list[tuple[str, str]]:
    """Return the `--dry-run` lines (label, text) of a training or an evaluation."""
    training = cfg.is_train_command and not cfg.runner.only_eval
    run_plan = build_run_plan(cfg, training=training)
    lines = start_banner_lines(run_plan, resolve_initial_weights(cfg, run_plan.env))
    lines += training_banner_lines(run_plan) if training else resource_banner_lines(run_plan)
    return [*lines, *evaluation_banner_lines(run_plan), *machine_banner_lines(run_plan), *_describe_verdict(run_plan)]


def _describe_verdict(run_plan: RunPlan) -> list[tuple[str, str]]:
    """Return the last line of `--dry-run`, which confirms that the run fits on this machine."""
    if run_plan.algorithm is None:
        return [("verdict", "fits on this machine")]
    rates, steps = predict(run_plan), run_plan.total_steps
    if rates is None:
        return [("verdict", "fits on this machine · no time prediction on CPUs; each step line shows the time left")]
    total = format_rough_duration(rates.seconds * steps)
    return [("verdict", f"fits on this machine · about {total} for {steps} steps, without validations")]


def _get_banner_lines(cfg: Config) -> list[tuple[str, str]]:
    """Return the banner lines (label, text) of the command, and import only the module of this command."""
    if cfg.command == "collect":
        from embodyrl.commands.collect import collection_banner_lines as lines
    elif cfg.command == "dagger":
        from embodyrl.commands.dagger import dagger_banner_lines as lines
    elif cfg.command == "serve":
        from embodyrl.serving.serve import server_banner_lines as lines
    elif cfg.command == "sft":
        from embodyrl.commands.sft_setup import sft_banner_lines as lines
    else:
        lines = run_banner_lines
    return [*lines(cfg)]
