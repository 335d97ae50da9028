"""Collection of demonstrations: roll out a policy, filter episodes, and append them to a data set."""

import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import Record
from embodyrl.checkpoint.store import read_step
from embodyrl.commands.banner import start_banner_lines
from embodyrl.commands.run_folder import RunFolder, lock_folder, open_run, resolve_initial_weights
from embodyrl.commands.session import build_console_monitor, print_banner
from embodyrl.config.compose import format_override
from embodyrl.config.paths import resolve_asset
from embodyrl.data.cards import read_card
from embodyrl.data.checks import describe_differences
from embodyrl.data.custom_reward import get_custom_reward
from embodyrl.data.layout import ENVIRONMENT_PATH, Actor, Card, Demonstration, Source
from embodyrl.data.settings import EpisodeFilter, FrameFormat, Labels
from embodyrl.data.writer import DatasetWriter
from embodyrl.errors import ConfigError, EmbodyError, Interrupted
from embodyrl.files import write_atomically
from embodyrl.monitor.group import MonitorGroup
from embodyrl.plan.build import build_run_plan, count_env_workers, split_envs
from embodyrl.plan.episodes import EpisodeList, make_single_wave
from embodyrl.plan.experts import find_expert
from embodyrl.plan.initial_states import get_reset_ids, get_selected_states, select_tasks
from embodyrl.plan.memory import plan_memory
from embodyrl.plan.memory_limits import require_resources, resource_banner_lines
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.saved import dump_config
from embodyrl.plan.schema import Config
from embodyrl.plan.seeds import derive, derive_small
from embodyrl.scheduler.rollout import Rollout
from embodyrl.scheduler.start import RolloutWorkers, start_workers
from embodyrl.types import EnvSpec, Episode, EpisodeSpec

_MAX_TRIALS_PER_EPISODE = 20
"""Maximum number of trials per requested episode of a task before `collect` fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectResult:
    """Result of one call of `collect`: size of the data set, and outcomes and duration of the call."""

    folder: Path
    episodes: int
    frames: int
    tried: int
    succeeded: int
    dropped: int
    wall_s: float


def collection_banner_lines(cfg: Config) -> list[tuple[str, str]]:
    """Return the banner lines (label, text) of a collection."""
    run_plan = build_collection_plan(cfg)
    lines = start_banner_lines(run_plan, resolve_initial_weights(cfg, run_plan.env))
    lines += resource_banner_lines(run_plan)
    return [*lines, ("demos", f"{cfg.collect.episodes} episodes to {cfg.collect.out}")]


def collect(cfg: Config, *, overrides: Sequence[str] = ()) -> CollectResult:
    """Collect `collect.episodes` episodes into `collect.out`, the same number for each task.

    Each env step is stored as a frame. As in `eval`, all actions of a chunk are executed before the next inference.
    With expert labels, the policy computes an action at each step.

    Raises:
        EmbodyError: any failure with a known cause; data that are already written stay usable.
    """
    assert cfg.collect.out is not None, "checked by check_components"
    run_plan = build_collection_plan(cfg)
    require_resources(run_plan)
    weights = resolve_initial_weights(cfg, run_plan.env)
    with (
        lock_folder(Path(cfg.collect.out)),
        open_run(cfg, "collect", overrides, None) as folder,
        closing(build_console_monitor(cfg)) as monitor,
    ):
        return _Collection(run_plan, monitor, weights).run(folder)


def build_collection_plan(cfg: Config) -> RunPlan:
    """Build the run plan of a collection, with the environments of the training split and one record per env step.

    Raises:
        ConfigError: incompatible components, a task without an expert, or demonstrations of another environment.
        EmbodyError: the demonstrations of a DAgger run are missing or damaged.
    """
    base = build_run_plan(cfg, training=False)
    tasks = select_tasks(base.env, cfg.env.train)
    is_labeled = cfg.collect.labels is Labels.expert
    if cfg.command == "dagger":
        is_labeled |= find_expert(cfg.dagger.expert).scripted
    if (base.policy.scripted or is_labeled) and (
        unsolved_tasks := [task for task in tasks if task not in base.env.expert.tasks]
    ):
        solved_tasks = ",".join(map(str, base.env.expert.tasks))
        raise ConfigError(
            f"env '{base.env.name}' has no scripted expert for tasks {unsolved_tasks}. Set "
            f"env.train.task_ids=[{solved_tasks}]."
        )
    if is_labeled and not base.policy.scripted and not base.env.expert.reacts:
        raise ConfigError(
            f"env '{base.env.name}': the scripted expert follows a plan and cannot label states that another policy "
            f"visits. Collect episodes of the expert instead: embodyrl collect model=scripted (model.expert_noise "
            "adds recoveries). Add them to SFT with data.more."
        )
    if cfg.command == "dagger":
        demonstrations = read_card(resolve_asset(str(cfg.data.path)), cfg.demonstrations).env
        if difference := describe_differences(demonstrations, base.env):
            raise ConfigError(
                f"The demonstrations in {cfg.data.path} and env '{base.env.name}' differ in {difference}. Choose the "
                "environment and the cameras of the demonstrations, or other data."
            )
    num_envs = min(cfg.env.train.total_num_envs, cfg.collect.episodes)
    run_plan = replace(
        base,
        env_workers=split_envs(num_envs, count_env_workers(cfg, base.env, base.devices, num_envs)),
        # Space for the running episode of each environment and for its open requests.
        capacity=num_envs * (cfg.env.train.max_episode_steps + 2),
        single_step=True,
        labeled=is_labeled,
    )
    return replace(run_plan, memory=plan_memory(run_plan))


def list_demonstration_episodes(cfg: Config, env: EnvSpec, trials: Sequence[tuple[int, int]]) -> EpisodeList:
    """Return the episodes of trials, each of which is a pair of task id and trial number.

    The trials of a task use the initial states of `env.train` in seeded permutations, each state equally often.
    """
    split = cfg.env.train
    episodes = []
    for index, (task, trial) in enumerate(trials):
        ids = list(get_reset_ids(env, split, task))
        epoch, position = divmod(trial, len(ids))
        order = np.random.default_rng(derive(cfg.seed, "demonstration-ids", task, epoch)).permutation(len(ids))
        episodes.append(
            EpisodeSpec(
                episode_id=index,
                reset_id=ids[int(order[position])],
                task_id=task,
                group_id=index,
                member=0,
                seed=derive_small(cfg.seed, "demonstration", task, trial),
                noise_seed=derive(cfg.seed, "demonstration-noise", task, trial),
            )
        )
    return make_single_wave(cfg, split, episodes)


def write_environment(cfg: Config, folder: Path) -> None:
    """Save the environment's settings in the data set, for `embodyrl eval` of policies trained on the data."""
    write_atomically(folder / ENVIRONMENT_PATH, dump_config(cfg, group="env"))


def build_card(run_plan: RunPlan) -> Card:
    """Return the metadata card of a collection; collections with equal cards contain the same episodes."""
    cfg = run_plan.cfg
    return Card(
        env=run_plan.env,
        fps=cfg.video_cfg.fps,
        video=cfg.collect.images == FrameFormat.mp4,
        actors=True,
        collected={
            "model": run_plan.policy.name,
            "weights": cfg.ckpt or cfg.model.weights,
            "greedy": not cfg.eval.sampling_params.do_sample,
            "temperature": cfg.algorithm.sampling_params.temperature,
            "expert_noise": getattr(cfg.model, "expert_noise", 0.0),
            "filter": cfg.collect.filter.value,
            **({"labels": cfg.collect.labels.value} if run_plan.labeled else {}),
            **get_custom_reward(cfg.reward),
            "seed": cfg.seed,
            "state_ids": get_selected_states(run_plan.env, cfg.env.train),
            "max_episode_steps": cfg.env.train.max_episode_steps,
            "ignore_terminations": cfg.env.train.ignore_terminations,
        },
    )


class _Collection:
    """State of a running collection: run plan, number of trials and number of stored episodes per task."""

    def __init__(self, run_plan: RunPlan, monitor: MonitorGroup, weights: Path | None) -> None:
        self.run_plan = run_plan
        self.cfg = run_plan.cfg
        self.monitor = monitor
        self.weights = weights
        self.version = -1 if run_plan.policy.scripted else read_step(weights)
        tasks = select_tasks(run_plan.env, self.cfg.env.train)
        num_episodes = self.cfg.collect.episodes
        self.quota = {
            task: num_episodes // len(tasks) + (index < num_episodes % len(tasks)) for index, task in enumerate(tasks)
        }
        self.num_stored: Counter[int] = Counter()
        self.next_trial: Counter[int] = Counter()
        self.tried = self.succeeded = self.dropped = 0
        self.wall_s = 0.0

    def run(self, folder: RunFolder) -> CollectResult:
        out = Path(str(self.cfg.collect.out))
        writer = DatasetWriter(out, build_card(self.run_plan))
        try:
            write_environment(self.cfg, out)
            for row in writer.episodes:
                task = row["embodyrl/task_id"]
                self.num_stored[task] += 1
                self.next_trial[task] = max(self.next_trial[task], row["embodyrl/trial"] + 1)
            continued = f", {len(writer.episodes)} already collected" if writer.episodes else ""
            demos = f"{self.cfg.collect.episodes} episodes of {len(self.quota)} tasks to {out}{continued}"
            lines = [*start_banner_lines(self.run_plan, self.weights), ("demos", demos)]
            print_banner(self.monitor, self.cfg, folder, "collect", lines)
            if self._list_missing_trials():
                self._collect(writer, folder.logs)
        finally:
            writer.close()
        result = CollectResult(
            folder=out,
            episodes=len(writer.episodes),
            frames=writer.num_frames,
            tried=self.tried,
            succeeded=self.succeeded,
            dropped=self.dropped,
            wall_s=self.wall_s,
        )
        self._report(result)
        return result

    def _collect(self, writer: DatasetWriter, logs: Path) -> None:
        try:
            workers = start_workers(
                self.run_plan, logs, self.monitor.text, start_from=self.weights, progress=self.monitor.progress
            )
            with workers.running():
                while trials := self._list_missing_trials():
                    self._run_batch(workers, writer, trials)
        except Interrupted as interruption:
            writer.flush()
            interruption.args = (
                f"stopped; {len(writer.episodes)} episodes are in {writer.root}; run the same command to resume",
            )
            raise

    def _list_missing_trials(self) -> list[tuple[int, int]]:
        """Return task id and trial number of the missing episodes of each task.

        Raises:
            EmbodyError: a task fails so often that the collection would take too long.
        """
        trials: list[tuple[int, int]] = []
        for task, quota in self.quota.items():
            first = self.next_trial[task]
            if first >= _MAX_TRIALS_PER_EPISODE * quota > 0 and self.num_stored[task] < quota:
                raise EmbodyError(
                    f"task {task} ('{self.run_plan.env.tasks[task]}'): only {self.num_stored[task]} of {first} "
                    "episodes succeeded, so the collection would take too long. Use another policy, a lower "
                    "model.expert_noise, a longer env.train.max_episode_steps, or collect.filter=all."
                )
            trials += [(task, first + index) for index in range(max(0, quota - self.num_stored[task]))]
        return trials

    def _run_batch(self, workers: RolloutWorkers, writer: DatasetWriter, trials: Sequence[tuple[int, int]]) -> None:
        """Run the episodes of `trials`, and write the kept episodes in the order of `trials`."""
        finished: dict[int, Demonstration | None] = {}
        pending = list(range(len(trials)))

        def write(*, flush_all: bool) -> None:
            # Written in the order of trials, so that the data set does not depend on the number of workers.
            while pending and (pending[0] in finished or flush_all):
                demonstration = finished.pop(pending.pop(0), None)
                if demonstration is not None:
                    self.num_stored[demonstration.source.task_id] += 1
                    writer.append(demonstration)

        def on_episode(episode: Episode) -> None:
            self.tried += 1
            self.succeeded += episode.success_once
            is_selected = episode.success_once or self.cfg.collect.filter == EpisodeFilter.all
            trial = trials[episode.spec.episode_id][1]
            is_expert = self.run_plan.labeled or self.run_plan.policy.scripted
            actor = Actor.expert if is_expert else Actor.policy
            finished[episode.spec.episode_id] = (
                copy_episode(workers.arena, episode, actor, trial=trial, version=self.version) if is_selected else None
            )
            # Copied above: the arena has space for only one running episode per environment.
            workers.scheduler.release(rollout.out, [episode])
            write(flush_all=False)
            self.monitor.progress(sum(self.num_stored.values()), self.cfg.collect.episodes, "kept episodes")

        plan = list_demonstration_episodes(self.cfg, self.run_plan.env, trials)
        for task, _ in trials:
            self.next_trial[task] += 1
        rollout = Rollout(plan, greedy=not self.cfg.eval.sampling_params.do_sample, on_episode=on_episode)
        try:
            collection = workers.scheduler.collect(rollout)
            self.dropped += collection.dropped
            self.wall_s += collection.stats.wall_s
        finally:
            write(flush_all=True)
        writer.flush()

    def _report(self, result: CollectResult) -> None:
        if result.tried:
            speed = result.wall_s / max(1, result.tried)
            self.monitor.text(
                f"  {result.succeeded} of {result.tried} episodes succeeded, {result.dropped} were dropped; "
                f"{result.wall_s:.1f} s ({speed:.2f} s per episode)"
            )
        self.monitor.text(f"  data     {result.folder}: {result.episodes} episodes, {result.frames} frames")
        self.monitor.text(f"  next     embodyrl sft {shlex.quote(format_override('data.path', str(result.folder)))}")


def copy_episode(arena: Arena, episode: Episode, actor: Actor, *, trial: int, version: int) -> Demonstration:
    """Copy an episode from the arena, whose records are reused later. Each record must contain one env step.

    Args:
        arena: shared memory with the records of the episode.
        episode: the episode.
        actor: policy, expert or person that chose all actions.
        trial: number of the episode among all episodes of its task.
        version: training step of the weights; -1: no weights.
    """
    records, spec = episode.records, episode.spec
    assert episode.valid[:, 0].all() and not episode.valid[:, 1:].any(), "one env step per record"
    return Demonstration(
        images=arena[Record.images][records],
        state=arena[Record.observed_state][records],
        action=arena[Record.action][records, 0],
        reward=np.ascontiguousarray(episode.reward[:, 0]),
        success=np.ascontiguousarray(episode.success[:, 0]),
        instruction=episode.instruction,
        source=Source(task_id=spec.task_id, reset_id=spec.reset_id, trial=trial, seed=spec.seed, version=version),
        actor=actor,
    )
