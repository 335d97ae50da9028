"""Construction of the run plan; mismatches between components are reported before a process starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pkgutil import resolve_name

from embodyrl.algorithms.policy_gradient import Algorithm
from embodyrl.algorithms.settings import BufferSettings
from embodyrl.channels.layout import build_record_layout
from embodyrl.cluster import LAUNCHERS
from embodyrl.cluster.protocol import ProcessSettings
from embodyrl.devices import Devices, assign_devices, visible_gpus
from embodyrl.envs import ENVS
from embodyrl.envs.settings import CameraSettings, EnvSplit
from embodyrl.errors import ConfigError
from embodyrl.files import available_cores
from embodyrl.plan.checks import key_problems
from embodyrl.plan.environment import env_context
from embodyrl.plan.episodes import eval_episodes, groups_per_step
from embodyrl.plan.initial_states import select_reset_ids
from embodyrl.plan.memory import plan_memory
from embodyrl.plan.protocols import protocol_problems
from embodyrl.plan.run_plan import RunPlan, WorkerEnvs, place_policy
from embodyrl.plan.schema import Config
from embodyrl.plan.task_weights import weight_problems
from embodyrl.policies import POLICIES, suggest_models
from embodyrl.types import ActionKind, EnvSpec, PolicySpec

log = logging.getLogger(__name__)


def build_run_plan(cfg: Config, *, training: bool) -> RunPlan:
    """Derive the run plan from a config: specs of the components, worker processes, and resources.

    Raises:
        ConfigError: incompatible components, one line each.
        MissingDependencyError: the environment's packages or libraries are missing.
    """
    context = env_context(cfg)
    factory = ENVS.get(cfg.env.env_type)
    settings = cfg.env
    env = factory.spec(settings, context)
    algorithm = Algorithm(cfg.algorithm) if training and cfg.is_train_command else None
    value_dim = algorithm.value_dim(cfg.model.num_action_chunks) if algorithm else 0
    policy = POLICIES.get(cfg.model.model_type).spec(cfg.model, env, value_dim)
    if algorithm:
        algorithm.scored = policy.scored
    cameras = max(policy.inputs.num_images, env.reward.cameras)
    if isinstance(settings, CameraSettings) and policy.inputs.num_images and 0 < cameras < len(env.cameras.names):
        # Every camera costs rendering time and memory in each record; policy and reward use the first cameras. With a
        # history, each camera counts once for each step.
        settings = settings.with_cameras(settings.init_params.camera_names[: -(-cameras // env.history)])
        env = factory.spec(settings, context)
    learning_problems = _learning_problems(cfg, algorithm, env, policy) if algorithm else []
    if problems := [*mismatches(env, policy), *_rollout_problems(cfg, env, policy), *learning_problems]:
        raise ConfigError(problems)
    num_envs = cfg.env.train.total_num_envs if algorithm else 1
    validates = algorithm is None or cfg.runner.val_check_interval != -1
    for name, split in cfg.env.splits.items():
        if isinstance(split, EnvSplit) and (name != "eval" or validates):
            # The call reports missing tasks and states now, not at the first validation; the result is not used.
            select_reset_ids(env, split)
    if validates and cfg.has_evaluations:
        num_envs = max(num_envs, eval_episodes(cfg, env, policy).num_envs)
    devices = plan_devices(cfg, training=training)
    samples = _count_samples(cfg, algorithm) if algorithm else 0
    with_reference = algorithm is not None and algorithm.needs_reference
    # A GPU resizes faster than it copies images to the host.
    with_resized = algorithm is not None and not algorithm.estimator.needs_replay and not visible_gpus()
    layout = build_record_layout(
        env, policy, with_reference=with_reference, with_resized=with_resized, top=cfg.rollout.logprobs
    )
    run_plan = RunPlan(
        cfg=cfg,
        env_settings=settings,
        context=replace(context, known_spec=env),
        env=env,
        policy=policy,
        algorithm=algorithm,
        layout=layout,
        capacity=_count_records(cfg, env, algorithm, num_envs),
        env_workers=split_envs(num_envs, count_env_workers(cfg, env, devices, num_envs)),
        total_steps=_count_steps(cfg, env) if algorithm else 0,
        optimizer_steps_per_training_step=_count_optimizer_steps(cfg, samples) if algorithm else 0,
        max_samples=samples,
        ranks=count_ranks(cfg),
        devices=devices,
        nodes=component_nodes(cfg),
    )
    return replace(run_plan, memory=plan_memory(run_plan))


def _rollout_problems(cfg: Config, env: EnvSpec, policy: PolicySpec) -> Iterator[str]:
    """Yield the reasons why environment and policy do not support the command, one line each."""
    if env.action.kind in policy.action_kinds:
        yield from key_problems(cfg, policy)
    yield from protocol_problems(cfg, env)
    if cfg.env.delay[1] and (policy.scripted or cfg.has("collect")):
        yield (
            "env.control.latency_steps: the scripted expert and recorded demonstrations act at each step, without "
            "delay. Remove the key."
        )
    if env.simulator.lockstep and cfg.rollout.pipeline_stage_num > 1:
        yield (
            f"env '{env.name}' steps all environments of a worker at once, so rollout.pipeline_stage_num="
            f"{cfg.rollout.pipeline_stage_num} is not supported; set it to 1."
        )


def _learning_problems(cfg: Config, algorithm: Algorithm, env: EnvSpec, policy: PolicySpec) -> Iterator[str]:
    """Yield the reasons why environment and policy do not support training, one line each."""
    observes_scene = policy.inputs.num_images or env.action.kind is ActionKind.text
    if env.cameras.needed and not observes_scene and not policy.untrainable:
        yield (
            f"model '{policy.name}' reads no image, and the state of env '{env.name}' omits the scene, so the "
            "policy cannot observe it. Choose a model with image input, for example model=openvla_oft_tiny."
        )
    if policy.untrainable:
        yield (f"model '{policy.name}' cannot be trained: {policy.untrainable}. Use another model, or `embodyrl eval`.")
    estimator = algorithm.estimator
    chunk_step_keys = {
        "env.train.continue_episodes": "steps end with their episodes",
        "env.train.max_steps_per_rollout_epoch": f"adv_type '{cfg.algorithm.adv_type}' counts episodes, not steps",
    }
    for key, reason in chunk_step_keys.items():
        if key in cfg.changed and not estimator.counts_chunk_steps:
            log.warning("warning: %s has no effect: %s.", key, reason)
    yield from weight_problems(cfg, env, counts_chunk_steps=estimator.counts_chunk_steps)
    if estimator.check:
        yield from resolve_name(estimator.check)(cfg, algorithm, env, policy)
    sharded = count_ranks(cfg) > 1 or cfg.actor.fsdp.cpu_offload
    if cfg.algorithm.transitions and (sharded or cfg.algorithm.max_staleness):
        yield (
            f"adv_type '{cfg.algorithm.adv_type}' trains in one process, without staleness: use actor.fsdp.size=1, "
            "actor.fsdp.cpu_offload=false and algorithm.max_staleness=0."
        )
    updates_reference = cfg.algorithm.reference_interval is not None
    if updates_reference and (sharded or cfg.algorithm.reference_path):
        yield (
            "algorithm.reference_interval: the reference must be a copy of the policy in the same "
            "process. Set actor.fsdp.size=1, actor.fsdp.cpu_offload=false and remove algorithm.reference_path."
        )


def mismatches(env: EnvSpec, policy: PolicySpec) -> list[str]:
    """Return mismatches between the environment's outputs and the policy's inputs, one line each."""
    problems = []
    if env.action.dim != policy.action_dim:
        problems.append(
            f"env '{env.name}' takes {env.action.dim}-dimensional actions, but model '{policy.name}' outputs "
            f"{policy.action_dim} values; set model.action_dim={env.action.dim} or choose another model."
        )
    if env.action.kind not in policy.action_kinds:
        kinds = ", ".join(sorted(policy.action_kinds))
        problems.append(
            f"env '{env.name}' takes {env.action.kind} actions, but model '{policy.name}' outputs only {kinds} "
            f"actions; choose another model, for example {suggest_models(env)}."
        )
    if env.cameras.names and env.action.kind is ActionKind.text and not policy.inputs.num_images:
        problems.append(
            f"the rows of env '{env.name}' contain images, but model '{policy.name}' reads none; use model=vision_lm "
            "with the folder of a vision-language model, or model=vision_lm_tiny."
        )
    if policy.inputs.num_images > len(env.cameras.names):
        problems.append(
            f"model '{policy.name}' reads {policy.inputs.num_images} camera images, but env '{env.name}' has "
            f"{len(env.cameras.names)} ({', '.join(env.cameras.names) or 'none'}); "
            + ("set model.num_images_in_input or the cameras." if env.cameras.names else f"try {suggest_models(env)}.")
        )
    if policy.inputs.state and not env.state_dim:
        problems.append(
            f"model '{policy.name}' reads a state vector, but env '{env.name}' has none; try {suggest_models(env)}."
        )
    if policy.observed_steps not in (0, env.history):
        problems.append(
            f"env '{env.name}' provides {env.history} observation steps, but model '{policy.name}' reads "
            f"{policy.observed_steps}; set env.history={policy.observed_steps}, or for `embodyrl sft` "
            f"data.history={policy.observed_steps}."
        )
    if policy.scripted and not env.expert.tasks:
        problems.append(f"env '{env.name}' has no scripted expert; choose another model.")
    if not policy.scripted and (env.action.gripper is None) != (policy.gripper is None):
        declaring, missing = ("env", "model") if env.action.gripper else ("model", "env")
        problems.append(
            f"the {declaring} declares a gripper convention, but the {missing} does not; declare it in both."
        )
    return problems


def split_envs(num_envs: int, num_workers: int) -> tuple[WorkerEnvs, ...]:
    """Divide the environments into contiguous blocks of nearly equal size, one per worker, to keep groups together."""
    env_workers, start = [], 0
    for worker in range(num_workers):
        size = num_envs // num_workers + (worker < num_envs % num_workers)
        env_workers.append(WorkerEnvs(name=f"env_{worker}", env_indices=range(start, start + size)))
        start += size
    return tuple(env_workers)


def _runs_in_process(cfg: Config) -> bool:
    return LAUNCHERS.get(cfg.launcher.name).in_process


def count_ranks(cfg: Config) -> int:
    """Return the number of actor ranks: `actor.fsdp.size`, or one per free GPU if the run supports several ranks."""
    if cfg.actor.fsdp.size != -1:
        return cfg.actor.fsdp.size
    num_rollout_processes = cfg.rollout_processes
    asynchronous = cfg.is_train_command and cfg.algorithm.max_staleness > 0
    has_engine = cfg.has_rollouts and cfg.rollout.backend != "hf"
    replay = cfg.is_train_command and cfg.algorithm.transitions
    critic = cfg.is_train_command and (cfg.critic.path or cfg.algorithm.reference_interval) is not None
    # Each of these features works in one process only, so additional GPUs stay unused.
    is_single_process = (
        cfg.model.is_compiled or replay or critic or (not num_rollout_processes and (asynchronous or has_engine))
    )
    nodes, gpus = component_nodes(cfg), len(visible_gpus())
    free = gpus * len({*nodes["actor"], *nodes["rollout"]}) - num_rollout_processes
    return 1 if is_single_process or _runs_in_process(cfg) else max(1, min(free, gpus * len(nodes["actor"])))


def component_nodes(cfg: Config) -> Mapping[str, tuple[int, ...]]:
    """Return the host numbers of each component; 0 is the driver's host."""
    return LAUNCHERS.get(cfg.launcher.name).nodes(cfg.cluster)


def plan_devices(cfg: Config, *, training: bool) -> Devices:
    """Return the visible GPU of each process of the run; a single process uses all GPUs.

    All hosts are assumed to have the GPUs of this host. On several hosts, simulators share all GPUs of their host
    (`cluster/ray_cluster`).
    """
    num_rollout_processes = cfg.rollout_processes if training else 0
    ranks, nodes, gpus = count_ranks(cfg), component_nodes(cfg), () if _runs_in_process(cfg) else visible_gpus()
    hosts = [place_policy(nodes, number, ranks) for number in range(ranks + num_rollout_processes)]
    if len({0, *hosts, *nodes["env"]}) == 1:
        return assign_devices(gpus, ranks + num_rollout_processes)
    gpu_numbers = [hosts[:number].count(host) for number, host in enumerate(hosts)]
    return Devices(
        policies=tuple(gpus[gpu_number % len(gpus)] for gpu_number in gpu_numbers) if gpus else (), simulators=gpus
    )


def count_env_workers(cfg: Config, env: EnvSpec, devices: Devices, num_envs: int) -> int:
    """Count env worker processes: one per core, or per GPU for batched simulators."""
    if not isinstance(cfg.launcher, ProcessSettings):
        return 1
    if cfg.launcher.env_workers != "auto":
        return min(cfg.launcher.env_workers, num_envs)
    batched = env.simulator.lockstep and env.simulator.on_gpu
    workers_per_host = len(devices.simulators) if batched else available_cores()
    return max(1, min(workers_per_host * len(component_nodes(cfg)["env"]), num_envs))


def _count_samples(cfg: Config, algorithm: Algorithm) -> int:
    """Return the maximum number of samples (action chunks) of one training step."""
    split = cfg.env.train
    steps = split.max_episode_steps
    if algorithm.estimator.counts_chunk_steps:
        steps = split.max_steps_per_rollout_epoch or steps
    return split.total_num_envs * cfg.algorithm.rollout_epoch * -(-steps // cfg.chunk_steps)


def _count_optimizer_steps(cfg: Config, samples: int) -> int:
    """Return the number of optimizer steps of a training step with `samples` samples."""
    rules = cfg.algorithm
    if isinstance(rules, BufferSettings):
        # An off-policy update samples from the buffer, independent of the batch of this step and of `update_epoch`.
        return max(1, round(samples * rules.updates_per_sample))
    return rules.update_epoch * (cfg.actor.minibatches or -(-samples // cfg.actor.global_batch_size))


def _count_records(cfg: Config, env: EnvSpec, algorithm: Algorithm | None, num_envs: int) -> int:
    in_flight = 2 * num_envs  # for each environment, the records of its current chunk and of its next observation
    if algorithm is None:
        return in_flight
    samples = _count_samples(cfg, algorithm)
    finals = 0
    if algorithm.needs_final_observations:
        # One more record for the last observation of each truncated or cut episode, or of each episode with hindsight.
        any_length = env.simulator.may_truncate or cfg.algorithm.needs_terminal_observations
        shortest = 1 if any_length else cfg.env.train.max_episode_steps
        # With the shortest possible episodes, the number of last observations is largest.
        per_episode = -(-shortest // cfg.model.num_action_chunks)
        finals = samples // per_episode + cfg.env.train.total_num_envs * cfg.algorithm.rollout_epoch
    return (samples + finals) * (1 + cfg.algorithm.max_staleness) + in_flight


def _count_steps(cfg: Config, env: EnvSpec) -> int:
    steps = cfg.runner.max_steps
    if cfg.runner.max_epochs >= 0:
        ids = len(select_reset_ids(env, cfg.env.train))
        steps = min(steps, -(-cfg.runner.max_epochs * ids // groups_per_step(cfg)))
    return steps
