"""DAgger (arXiv 1011.0686): the policy acts, the expert labels, in rounds of collection and training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.errors import Interrupted
from embodyrl.extensions.demonstrations.collect import collect, collection_facts
from embodyrl.extensions.demonstrations.settings import EpisodeFilter, Labels
from embodyrl.extensions.demonstrations.sft import sft
from embodyrl.plan.config import overridden
from embodyrl.plan.schema import Config
from embodyrl.plan.settings import OnExisting
from embodyrl.plan.weights import resolve_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class DaggerResult:
    """Result of the last round."""

    run: Path
    """Run folder of the SFT run of the round."""
    data: tuple[Path, ...]
    """Folders of the labelled episodes of each round."""


def dagger(cfg: Config, *, overrides: Sequence[str] = ()) -> DaggerResult:
    """Run DAgger from `data.path` and `ckpt` or the model's own weights; each round continues from the last weights.

    Round n plays `collect.episodes` other episodes into <collect.out>/round_n and trains <name>_round_n for
    `runner.max_steps` steps on everything so far. The same command resumes with the first round that is not complete,
    if `runner.experiment_name` is set.

    Raises:
        EmbodyError: any failure with a known cause.
    """
    out = Path(str(cfg.collect.out))
    name = cfg.runner.experiment_name or out.resolve().name
    runs = [Path(cfg.runner.output_dir) / f"{name}_round_{number + 1}" for number in range(cfg.dagger.rounds)]
    data = [out / f"round_{number + 1}" for number in range(cfg.dagger.rounds)]
    for number, (run, folder) in enumerate(zip(runs, data, strict=True), start=1):
        if not _is_over(run, cfg.runner.max_steps):
            before = runs[number - 2] if number > 1 else None
            common = _continued(cfg, before) | {"runner.on_existing": OnExisting.resume}
            played = {"collect.out": str(folder), "collect.labels": Labels.expert, "collect.filter": EpisodeFilter.all}
            named = {"seed": cfg.seed + number, "runner.experiment_name": f"{run.name}_acting"}
            acting = overridden(cfg, {**common, **played, **named})
            more = [*cfg.data.more, *map(str, data[:number])]
            learned = overridden(cfg, {**common, "data.more": more, "runner.experiment_name": run.name})
            try:
                collect(acting)
                sft(learned, overrides=overrides, resume=run if run.exists() else None)
            except Interrupted as error:
                error.args = (f"{error}; to continue all rounds, run the same command again",)
                raise
    return DaggerResult(run=runs[-1], data=tuple(data))


def _continued(cfg: Config, before: Path | None) -> dict[str, str]:
    """Return the keys of a round's initial weights: those of the previous round, or those of the config."""
    ckpt = cfg.ckpt if before is None else str(before)
    return {} if ckpt is None else {"ckpt": ckpt, "model.path": str(resolve_weights(ckpt))}


def dagger_facts(cfg: Config) -> list[tuple[str, str]]:
    """Return the banner lines of the rounds."""
    return [*collection_facts(cfg), ("rounds", f"{cfg.dagger.rounds}, after the demonstrations in {cfg.data.path}")]


def _is_over(run: Path, steps: int) -> bool:
    return steps in CheckpointStore(run / "checkpoints").folders()
