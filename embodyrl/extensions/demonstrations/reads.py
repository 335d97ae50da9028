"""Config sections that the commands `collect`, `sft` and `dagger` use."""

from collections.abc import Iterator
from typing import Any

from embodyrl.plan.schema import ACT, LOOP, RUN, SAMPLED, Reads

_FOLDER = "embodyrl.extensions.demonstrations"
_RECORDED = {
    "never: recordings are a data set": "video_cfg faults.on_video_error",
    "never: `collect` plays env.train and collect.episodes": "env.eval eval.episodes eval.episodes_per_task "
    "eval.samples eval.baseline eval.show_replies eval.sampling_params.temperature",
}


def _collect_problems(cfg: Any) -> Iterator[str]:
    if cfg.collect.out is None:
        yield "collect.out is not set. Set a folder for the demonstrations, for example collect.out=demos/a."


def _data_problems(cfg: Any) -> Iterator[str]:
    if cfg.data.path is None:
        yield "data.path is not set. Set a folder with demonstrations, for example a result of `embodyrl collect`."


def _dagger_problems(cfg: Any) -> Iterator[str]:
    from embodyrl.extensions.demonstrations.experts import EXPERTS

    yield from EXPERTS.problems([cfg.dagger.expert], "dagger.expert")
    yield from _collect_problems(cfg)
    yield from _data_problems(cfg)


COLLECT = Reads(
    sections=ACT,
    dry_run=f"{_FOLDER}.collect:collection_facts",
    plays=("train",),
    needs={
        "never: nothing is trained": f"{LOOP} actor.optim",
        "never: collect.out is the data set": "runner.keep_episodes",
    }
    | SAMPLED
    | _RECORDED,
    problems=_collect_problems,
)
SFT = Reads(
    sections=f"{RUN} checkpoint",
    dry_run=f"{_FOLDER}.sft_setup:sft_facts",
    needs={
        "never: no episodes are played": "runner.only_eval runner.keep_episodes runner.val_suites runner.trace "
        "faults.step_timeout_s faults.on_env_crash faults.max_restarts_per_worker",
        "objective.name=dpo: the statistics are those of data.path": "model.unnorm_key",
        "runner.val_check_interval!=-1": "data.val_path data.val_split checkpoint.keep_best",
    },
    problems=_data_problems,
)
DAGGER = Reads(
    sections=f"{ACT} checkpoint",
    dry_run=f"{_FOLDER}.dagger:dagger_facts",
    plays=("train",),
    needs={
        "never: every round collects all episodes with labels of the expert": "collect.labels collect.filter",
        "never: the labels are imitated": "objective.name",
        "never: the same command resumes an incomplete run": "runner.on_existing runner.resume_dir",
    }
    | SAMPLED
    | _RECORDED,
    problems=_dagger_problems,
)
