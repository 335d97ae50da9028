"""Joins environment, policy, algorithm and workers; every mismatch is found before a process starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from embodyrl.algorithms import Algorithm
from embodyrl.channels.arena import Arena
from embodyrl.channels.buckets import bucket_layout
from embodyrl.channels.layout import RecordLayout, record_layout
from embodyrl.config.schema import Config, RewardLevel, RolloutMode
from embodyrl.devices import Devices, deal_devices, visible_gpus
from embodyrl.envs import ENVS
from embodyrl.errors import ConfigError
from embodyrl.files import available_cores
from embodyrl.launch import LAUNCHERS
from embodyrl.policies import POLICIES, fitting_models
from embodyrl.runtime.dump import DUMP_LIMIT
from embodyrl.runtime.episodes import eval_plan, groups_per_step, selected_reset_ids
from embodyrl.runtime.fleet import Callback, Fleet
from embodyrl.runtime.policy_client import PolicyClient
from embodyrl.runtime.policy_hosts import Rendezvous, is_apart, plan_hosts, rendezvous, shared_arena
from embodyrl.runtime.rollouts import EnvSeat, RolloutRules, Rollouts
from embodyrl.runtime.texts import fit_lengths, sampling_problems, with_task
from embodyrl.runtime.timeline import Timeline
from embodyrl.types import EnvSpec, PolicySpec
from embodyrl.workers.env_worker import EnvWorkerInit
from embodyrl.workers.lifecycle import WorkerSpec

# Simulators and renderers spin up a thread per core each unless told otherwise; with several worker processes these
# threads fight (measured: 5 to 15 times slower).
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "LP_NUM_THREADS")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A run, fully described but not started."""

    cfg: Config
    env: EnvSpec
    policy: PolicySpec
    algorithm: Algorithm | None
    """None: evaluation only."""
    layout: RecordLayout
    capacity: int
    """Records of the arena: the largest rollout that can be under way."""
    seats: tuple[EnvSeat, ...]
    total_steps: int
    """Training steps."""
    optimizer_steps_per_step: int
    """Of a training step with `max_samples`."""
    max_samples: int
    """Chunk samples of one training step, at most."""
    ranks: int
    """Processes that train the policy."""
    devices: Devices
    single_step: bool = False
    """Every env step is a record: the policy is asked anew after each action."""

    @property
    def num_slots(self) -> int:
        return self.seats[-1].slots.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """The running workers of a run."""

    fleet: Fleet
    arena: Arena
    rollouts: Rollouts
    policy: PolicyClient
    meet: Rendezvous
    """Of the actor ranks."""
    trace: Path | None = None
    """Where the timeline goes at the end."""

    def close(self) -> None:
        """End all workers, write the trace and free the arena."""
        self.fleet.stop()
        if self.trace is not None:
            self.fleet.timeline.write(self.trace)
        self.policy.close()
        self.meet.close()
        self.arena.close()


def _with_protocol(cfg: Config, env: EnvSpec) -> Config:
    """Fill in what `eval.standard` stands for.

    Raises:
        ConfigError: the environment declares no horizon, or a setting contradicts the protocol.
    """
    if not cfg.eval.standard:
        return cfg
    if not env.max_episode_steps:
        raise ConfigError(f"eval.standard=true: env '{env.name}' declares no protocol of its own; leave it out.")
    split = cfg.env.eval
    chosen = {"eval.episodes": cfg.eval.episodes, "env.eval.task_ids": split.task_ids}
    chosen["env.eval.state_ids"] = split.state_ids
    if wrong := [f"{name}=null" for name, value in chosen.items() if value is not None]:
        raise ConfigError(f"eval.standard=true runs every initial state of every task; set {', '.join(wrong)}.")
    split = replace(split, max_episode_steps=env.max_episode_steps)
    counts = replace(cfg.eval, episodes_per_task=max(env.states_per_task))
    return replace(cfg, eval=counts, env=replace(cfg.env, eval=split))


def draw_blueprint(cfg: Config, *, training: bool) -> Blueprint:
    """Describe the run.

    Raises:
        ConfigError: parts that do not fit together, one line each.
        MissingDependencyError: the environment's packages or libraries are missing.
    """
    cfg = with_task(cfg)
    env = ENVS.get(cfg.env.env_type).spec(cfg.env)
    cfg = fit_lengths(cfg, env)
    cfg = _with_protocol(cfg, env)
    algorithm = Algorithm(cfg.algorithm) if training else None
    value_dim = 0
    if algorithm is not None and algorithm.needs_values:
        value_dim = 1 if cfg.algorithm.reward_type == RewardLevel.chunk_level else cfg.model.num_action_chunks
    policy = POLICIES.get(cfg.model.model_type).spec(cfg.model, env, value_dim)
    if 0 < policy.num_images < len(env.cameras):
        # Every camera costs rendering time and memory in each record; a policy reads the first ones.
        cameras = list(env.cameras[: policy.num_images])
        cfg = replace(cfg, env=replace(cfg.env, init_params=replace(cfg.env.init_params, camera_names=cameras)))
        env = ENVS.get(cfg.env.env_type).spec(cfg.env)
    problems = mismatches(cfg, env, policy)
    if training and not policy.has_logprobs:
        problems.append(
            f"model '{policy.name}' gives no action probabilities, so RL cannot train it; choose a model with discrete "
            "action tokens (model.action_head=discrete), or run `embodyrl sft` or `embodyrl eval`."
        )
    if algorithm is not None and algorithm.needs_groups and not cfg.env.train.use_fixed_reset_state_ids:
        problems.append(
            f"env.train.use_fixed_reset_state_ids=false: adv_type '{cfg.algorithm.adv_type}' compares episodes of one "
            "reset id; set it to true."
        )
    if problems:
        raise ConfigError(problems)
    for split in (cfg.env.train, cfg.env.eval):
        selected_reset_ids(env, split)
    slots = _count_slots(cfg, env, policy, training=training)
    devices = plan_devices(cfg, training=training)
    seats = deal_slots(slots, count_env_workers(cfg, env, devices, slots))
    samples = _max_samples(cfg, algorithm)
    layout = record_layout(env, policy, with_reference=algorithm is not None and algorithm.needs_reference)
    if cfg.rollout.dump and samples * layout.record_bytes > DUMP_LIMIT:
        raise ConfigError(
            f"rollout.dump=true: a step may need {samples * layout.record_bytes / 2**30:.1f} GiB, dumps hold at most "
            f"{DUMP_LIMIT / 2**30:.0f}; use fewer episodes per step."
        )
    return Blueprint(
        cfg=cfg,
        env=env,
        policy=policy,
        algorithm=algorithm,
        layout=layout,
        capacity=_capacity(cfg, env, algorithm, slots),
        seats=seats,
        total_steps=_total_steps(cfg, env) if training else 0,
        optimizer_steps_per_step=cfg.algorithm.update_epoch * -(-samples // cfg.actor.global_batch_size),
        max_samples=samples,
        ranks=count_ranks(cfg),
        devices=devices,
    )


def mismatches(cfg: Config, env: EnvSpec, policy: PolicySpec) -> list[str]:
    """Compare what the environment gives with what the policy takes; one line per mismatch."""
    problems = []
    if env.action_dim != policy.action_dim:
        problems.append(
            f"env '{env.name}' takes {env.action_dim}-dimensional actions, model '{policy.name}' gives "
            f"{policy.action_dim}; set model.action_dim={env.action_dim} or choose another model."
        )
    if env.action_kind in policy.action_kinds:
        problems += sampling_problems(cfg, policy)
    else:
        can = ", ".join(sorted(policy.action_kinds))
        problems.append(
            f"env '{env.name}' takes {env.action_kind} actions, model '{policy.name}' gives {can} ones only; choose "
            f"another model, for example {fitting_models(env)}."
        )
    if policy.num_images > len(env.cameras):
        problems.append(
            f"model '{policy.name}' reads {policy.num_images} camera images, env '{env.name}' gives "
            f"{len(env.cameras)} ({', '.join(env.cameras) or 'none'}); set model.num_images_in_input or the cameras."
        )
    if env.lockstep and cfg.rollout.pipeline_stage_num > 1:
        problems.append(
            f"env '{env.name}' steps all slots of a worker at once, rollout.pipeline_stage_num="
            f"{cfg.rollout.pipeline_stage_num} steps some of them at a time; set it to 1."
        )
    if policy.uses_state and not env.state_dim:
        problems.append(f"model '{policy.name}' reads proprioception, env '{env.name}' has none.")
    if policy.scripted and not env.expert_tasks:
        problems.append(f"env '{env.name}' has no scripted demonstrator; choose another model.")
    if not policy.scripted and (env.gripper is None) != (policy.gripper is None):
        has, lacks = ("env", "model") if env.gripper else ("model", "env")
        problems.append(f"the {has} declares a gripper convention, the {lacks} does not; they do not fit together.")
    return problems


def start_crew(
    blueprint: Blueprint, log_dir: Path, say: Callable[[str], None], *, start_from: Path | None = None
) -> Crew:
    """Create the arena, start all workers and wait until they are ready."""
    cfg, algorithm = blueprint.cfg, blueprint.algorithm
    arena = Arena.create(blueprint.layout, blueprint.capacity)
    names = [seat.name for seat in blueprint.seats]
    timeline = Timeline(num_slots=blueprint.num_slots, env_workers=names, arena=arena, keep=cfg.runner.trace)
    launcher = LAUNCHERS.get(cfg.launcher.name)(log_dir, cfg.cluster)
    fleet = Fleet(launcher, cfg.faults, say, timeline)
    # One bucket is filled while the other is taken.
    mail = Arena.create(bucket_layout(), 2) if is_apart(blueprint) else None
    # Collectives also count the time of a freeze; the driver's own deadline for an update ends them much earlier.
    meet = rendezvous(blueprint.ranks, launcher.host, timeout_s=24 * cfg.faults.update_timeout_s)
    hosts = plan_hosts(blueprint, arena, start_from, mail=mail, seat=meet.seat)
    policy = PolicyClient(fleet, hosts, timeout_s=cfg.faults.update_timeout_s, mail=mail)
    rules = RolloutRules(
        stages=cfg.rollout.pipeline_stage_num,
        deterministic=cfg.runner.deterministic,
        needs_values=algorithm is not None and algorithm.needs_values,
        step_timeout_s=cfg.faults.step_timeout_s,
        total_slots=blueprint.num_slots,
        value_dim=blueprint.policy.value_dim,
        lockstep=blueprint.env.lockstep,
        max_attempts=max(2, cfg.faults.max_restarts_per_worker),
    )
    rollouts = Rollouts(fleet, arena, blueprint.seats, policy, rules)
    specs: dict[str, tuple[WorkerSpec, Callback]] = {
        spec.name: (spec, partial(policy.on_message, spec.name)) for spec in hosts
    }
    for number, seat in enumerate(blueprint.seats):
        specs[seat.name] = (env_spec(blueprint, arena, number), partial(rollouts.on_message, seat.name))
    try:
        fleet.start(specs)
    except BaseException:
        fleet.stop()
        policy.close()
        meet.close()
        arena.close()
        raise
    trace = log_dir / "trace.json" if cfg.runner.trace else None
    return Crew(fleet=fleet, arena=arena, rollouts=rollouts, policy=policy, meet=meet, trace=trace)


def env_spec(blueprint: Blueprint, arena: Arena, number: int) -> WorkerSpec:
    """How to start an env worker."""
    cfg, seat = blueprint.cfg, blueprint.seats[number]
    init = EnvWorkerInit(
        cfg=cfg,
        num_slots=len(seat.slots),
        arena=arena.handle,
        scripted=blueprint.policy.scripted,
        single_step=blueprint.single_step,
        shared_arena=shared_arena(cfg, arena),
    )
    return WorkerSpec(
        name=seat.name,
        entry="embodyrl.workers.env_worker:EnvWorker",
        init=init,
        environ=_ONE_THREAD,
        component="env",
        gpu=blueprint.devices.of_env_worker(number, on_gpu=blueprint.env.on_gpu),
    )


def deal_slots(num_slots: int, num_workers: int) -> tuple[EnvSeat, ...]:
    """Give neighbouring slots (members of one group) to the same worker, as evenly as possible."""
    seats, start = [], 0
    for worker in range(num_workers):
        size = num_slots // num_workers + (worker < num_slots % num_workers)
        seats.append(EnvSeat(name=f"env_{worker}", slots=range(start, start + size)))
        start += size
    return tuple(seats)


def _count_slots(cfg: Config, env: EnvSpec, policy: PolicySpec, *, training: bool) -> int:
    evaluating = not training or cfg.runner.val_check_interval != -1
    eval_slots = eval_plan(cfg, env, policy).num_slots if evaluating else 0
    return max(eval_slots, cfg.env.train.total_num_envs if training else 0)


def count_ranks(cfg: Config) -> int:
    """Actor ranks: `actor.fsdp.size`, or one per GPU that nobody else needs where the run can be spread."""
    if cfg.actor.fsdp.size != -1:
        return cfg.actor.fsdp.size
    apart = cfg.rollout.mode == RolloutMode.disaggregated
    alone = cfg.model.compile or (not apart and (cfg.algorithm.max_staleness or cfg.rollout.backend != "hf"))
    free = len(visible_gpus()) - (cfg.rollout.num_workers if apart else 0)
    return 1 if alone or cfg.launcher.name == "inline" else max(1, free)


def plan_devices(cfg: Config, *, training: bool) -> Devices:
    """Which GPU each process of the run will see; inline everything is one process, which sees them all."""
    apart = training and cfg.rollout.mode == RolloutMode.disaggregated
    gpus = () if cfg.launcher.name == "inline" else visible_gpus()
    return deal_devices(gpus, count_ranks(cfg) + (cfg.rollout.num_workers if apart else 0))


def count_env_workers(cfg: Config, env: EnvSpec, devices: Devices, slots: int) -> int:
    """Env worker processes for so many slots: one per core, or per GPU where it steps all slots of a worker at once."""
    if cfg.launcher.env_workers != "auto":
        return min(int(cfg.launcher.env_workers), slots)
    batched = env.lockstep and env.on_gpu
    places = len(devices.simulators) if batched else available_cores()
    return 1 if cfg.launcher.name == "inline" else max(1, min(places, slots))


def _max_samples(cfg: Config, algorithm: Algorithm | None) -> int:
    """Chunk samples of one training step, at most."""
    split = cfg.env.train
    steps = split.max_episode_steps
    if algorithm is not None and algorithm.counts_chunk_steps:
        steps = split.max_steps_per_rollout_epoch or steps
    return split.total_num_envs * cfg.algorithm.rollout_epoch * -(-steps // cfg.model.num_action_chunks)


def _capacity(cfg: Config, env: EnvSpec, algorithm: Algorithm | None, num_slots: int) -> int:
    in_flight = 2 * num_slots
    if algorithm is None:
        return in_flight
    samples = _max_samples(cfg, algorithm)
    finals = 0
    if algorithm.needs_values:
        # One more record per episode that is truncated or cut, for the value of its last observation.
        shortest = 1 if env.may_truncate else cfg.env.train.max_episode_steps
        per_episode = -(-shortest // cfg.model.num_action_chunks)
        finals = samples // per_episode + cfg.env.train.total_num_envs * cfg.algorithm.rollout_epoch
    return (samples + finals) * (1 + cfg.algorithm.max_staleness) + in_flight


def _total_steps(cfg: Config, env: EnvSpec) -> int:
    steps = cfg.runner.max_steps
    if cfg.runner.max_epochs >= 0:
        ids = len(selected_reset_ids(env, cfg.env.train))
        steps = min(steps, -(-cfg.runner.max_epochs * ids // groups_per_step(cfg)))
    return steps
