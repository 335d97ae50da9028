"""What `--dry-run` says: all that can be known before a process starts."""

from embodyrl.cluster import LAUNCHERS
from embodyrl.commands.facts import facts, training_facts
from embodyrl.commands.run_folder import first_weights, resolve_weights, weight_facts
from embodyrl.plan.blueprint import draw_blueprint
from embodyrl.plan.held_out import evaluation_facts
from embodyrl.plan.roots import CollectConfig, DaggerConfig, EvalConfig, Root, ServeConfig, SftConfig, TrainConfig


def describe(cfg: Root) -> str:
    """Return the derived sizes of a run, a line each."""
    lines = _lines(cfg)
    if launcher := getattr(cfg, "launcher", None):
        hosts = LAUNCHERS.get(launcher.name).preview(getattr(cfg, "cluster", None))
        lines += [("hosts", hosts)] if hosts else []
    return "\n".join(f"  {name:<12} {text}" for name, text in lines)


def _lines(cfg: Root) -> list[tuple[str, str]]:
    if isinstance(cfg, TrainConfig) and cfg.algorithm.reference_path is not None:
        resolve_weights(cfg.algorithm.reference_path, "algorithm.reference_path")
    if isinstance(cfg, CollectConfig):
        from embodyrl.commands.collect import draw_collection

        blueprint = draw_collection(cfg)
        lines = [*facts(blueprint), *weight_facts(cfg, first_weights(cfg, blueprint.env))]
        lines.append(("demos", f"{cfg.collect.episodes} episodes to {cfg.collect.out}"))
        if isinstance(cfg, DaggerConfig):
            lines.append(("rounds", f"{cfg.dagger.rounds}, after the demonstrations in {cfg.data.path}"))
        return lines
    if isinstance(cfg, SftConfig):
        from embodyrl.commands.sft_setup import sft_facts

        return sft_facts(cfg)
    if isinstance(cfg, ServeConfig):
        from embodyrl.commands.serve import describe as describe_served
        from embodyrl.commands.serve import serving_facts

        env, spec = describe_served(cfg)
        weights = first_weights(cfg, env)
        return [*serving_facts(cfg, env, spec), *weight_facts(cfg, weights)]
    assert isinstance(cfg, EvalConfig)
    training = isinstance(cfg, TrainConfig) and not cfg.runner.only_eval
    blueprint = draw_blueprint(cfg, training=training)
    lines = [*facts(blueprint), *weight_facts(cfg, first_weights(cfg, blueprint.env))]
    if training:
        lines += training_facts(blueprint)
    return [*lines, *evaluation_facts(blueprint)]
