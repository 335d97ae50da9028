"""What a run will need and do, derived before anything starts: `--dry-run` and the start-up banner."""

import os
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from embodyrl.algorithms.policy_losses import ClipSettings
from embodyrl.devices import visible_gpus
from embodyrl.envs.memory import tasks_in_memory
from embodyrl.envs.settings import PlayedSplit
from embodyrl.errors import ConfigError
from embodyrl.files import available_bytes, available_cores
from embodyrl.runtime.build import Blueprint, draw_blueprint
from embodyrl.runtime.episodes import train_plan
from embodyrl.runtime.held_out import evaluation_facts
from embodyrl.runtime.policy_hosts import is_apart
from embodyrl.runtime.roots import ActingConfig, CollectConfig, EvalConfig, Root, RunConfig, SftConfig, TrainConfig
from embodyrl.runtime.rundir import resolve_weights
from embodyrl.types import EnvSpec

MIB, GIB = 2**20, 2**30
_PROCESS = 340 * MIB
"""A process with torch and a model library, on the host."""
_ADAPTERS = 90 * MIB
"""What the adapter library adds to it."""
_CUDA = 600 * MIB
"""Context and workspaces on a GPU."""
_ENV_PROCESS = 160 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of each part of one policy process, and of what it shares the host with."""

    weights: int
    gathered: int
    """Whole weights while acting, where they are sharded while training."""
    reference: int
    gradients: int
    optimizer: int
    activations: int
    process: int
    acting: int
    """Of each process that only acts."""
    env_worker: int
    env_gpu: int
    """Of each env worker on its GPU."""
    arena: int
    checkpoint: int
    """On disk."""
    on_gpu: bool

    @property
    def policy(self) -> int:
        """Peak of one policy process."""
        fixed = self.weights + self.reference + self.optimizer + self.process
        training = self.gradients + self.activations
        # What was gathered for acting is freed for training, but in pieces that the C library keeps.
        return fixed + (max(self.gathered, training) if self.on_gpu else self.gathered + training)

    def lines(self, ranks: int, env_workers: int) -> list[tuple[str, str]]:
        """Name and text for people."""
        parts = ("weights", "gathered", "reference", "gradients", "optimizer", "activations", "process")
        named = [f"{name} {getattr(self, name) / GIB:.2f}" for name in parts if getattr(self, name)]
        env, arena = f"{self.env_worker / GIB:.2f} GiB", self.arena / GIB
        env += f" and {self.env_gpu / GIB:.2f} on a GPU" if self.env_gpu else ""
        acting = f"{self.acting / GIB:.2f} GiB for each process that acts · " if self.acting else ""
        return [
            ("memory", f"{self.policy / GIB:.2f} GiB for each of {ranks} policy processes: {', '.join(named)}"),
            ("", f"{acting}{env} for each of {env_workers} env workers · {arena:.2f} GiB shared by all"),
        ]


def plan_memory(blueprint: Blueprint) -> MemoryPlan:
    """Derive the memory of a training run; figures of adapters and activations are estimates."""
    cfg, policy = blueprint.config(TrainConfig), blueprint.policy
    fsdp = cfg.actor.fsdp
    half = cfg.model.half
    total = policy.num_parameters
    trained = total if policy.num_trained is None else policy.num_trained
    frozen = total if policy.num_trained is not None else 0
    kept = frozen * (2 if half else 4) + trained * 4
    sharded = blueprint.ranks > 1 or fsdp.cpu_offload
    shards = (blueprint.ranks if fsdp.shard_size == -1 else fsdp.shard_size) if sharded else 1
    gradients = 4 * trained
    copies = 2 * trained if half and not frozen else 0  # autocast keeps bfloat16 copies for the backward pass
    adam = 8 * trained // shards
    on_gpu = bool(visible_gpus())
    per_sample = policy.recomputed_bytes if cfg.actor.gradient_checkpointing else policy.activation_bytes
    apart = is_apart(blueprint)
    process = _CUDA if on_gpu else _PROCESS + (_ADAPTERS if frozen else 0)
    whole = total * (2 if half else 4)
    compares = blueprint.algorithm is not None and blueprint.algorithm.needs_reference
    env, slots = blueprint.env, len(blueprint.seats[0].slots)
    tasks = len(cfg.env.train.task_ids or env.tasks) if env.task_bytes else slots
    return MemoryPlan(
        weights=0 if fsdp.cpu_offload and on_gpu else kept // shards,
        gathered=whole if sharded and not apart else 0,
        reference=(kept if frozen else 4 * total) if compares else 0,
        gradients=gradients + (gradients // shards if sharded else 0),
        optimizer=0 if fsdp.cpu_offload and on_gpu else adam,
        activations=cfg.actor.micro_batch_size * per_sample + copies,
        process=process,
        # While it is built, its weights are those of an actor.
        acting=process + (kept if frozen else 4 * total) if apart else 0,
        on_gpu=on_gpu,
        env_worker=_ENV_PROCESS + env.task_bytes,
        env_gpu=env.gpu_bytes[0] + env.gpu_bytes[1] * min(slots, tasks),
        arena=blueprint.layout.offsets(blueprint.capacity)[1],
        checkpoint=12 * trained,
    )


def require_memory(blueprint: Blueprint, plan: MemoryPlan) -> None:
    """Refuse a run that cannot fit.

    Raises:
        ConfigError: says what is needed, what is there, and which keys make it smaller.
    """
    acting = blueprint.config(TrainConfig).rollout.num_workers
    policies, envs = plan.policy * blueprint.ranks + plan.acting * acting, plan.env_worker * len(blueprint.seats)
    smaller = "actor.micro_batch_size, model.is_lora=true, actor.gradient_checkpointing=true or more actor ranks"
    if visible_gpus():
        gpu, needed = _gpu_memory(), _fullest_gpu(blueprint, plan)
        if gpu and needed > gpu:
            raise ConfigError(
                f"A policy process needs about {plan.policy / GIB:.1f} GiB, and with all that shares its GPU "
                f"{needed / GIB:.1f}; a GPU here has {gpu / GIB:.1f} GiB. "
                f"Try a smaller launcher.env_workers, {smaller}, or actor.fsdp.cpu_offload=true."
            )
        policies = _PROCESS * (blueprint.ranks + (acting if plan.acting else 0))
    needed, free = policies + envs + plan.arena, available_bytes()
    if needed > free:
        raise ConfigError(
            f"This run needs about {needed / GIB:.1f} GiB of memory ({policies / GIB:.1f} for the policy, "
            f"{envs / GIB:.1f} for {len(blueprint.seats)} env workers, {plan.arena / GIB:.1f} shared), "
            f"{free / GIB:.1f} GiB are free. Try a smaller launcher.env_workers or env.train.total_num_envs, {smaller}."
        )


def _fullest_gpu(blueprint: Blueprint, plan: MemoryPlan) -> int:
    """What the processes of that GPU need that gets most of all, bytes; inline everything is on one."""
    devices, needed = blueprint.devices, Counter[str]()
    for number, gpu in enumerate(devices.policies or ("inline",)):
        needed[gpu] += plan.policy if number < blueprint.ranks else plan.acting
    for number in range(len(blueprint.seats) if plan.env_gpu else 0):
        needed[devices.of_env_worker(number, on_gpu=True) or "inline"] += plan.env_gpu
    return max(needed.values())


def _gpu_memory() -> int:
    """Memory of the smallest GPU, bytes; 0 if unknown. Asked without a CUDA context in this process."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    query = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    sizes = [int(line) for line in done.stdout.split() if line.isdigit()]
    return min(sizes, default=0) * MIB


def describe(cfg: Root) -> str:
    """Return the derived sizes of a run, a line each."""
    if isinstance(cfg, ActingConfig) and cfg.ckpt is not None:
        resolve_weights(cfg.ckpt)
    if isinstance(cfg, CollectConfig):
        from embodyrl.runtime.collect import draw_collection

        lines = facts(draw_collection(cfg))
        lines.append(("demos", f"{cfg.collect.episodes} episodes to {cfg.collect.out}"))
        return _layout(lines)
    if isinstance(cfg, SftConfig):
        from embodyrl.runtime.sft_setup import sft_facts

        return _layout(sft_facts(cfg))
    assert isinstance(cfg, EvalConfig)
    training = isinstance(cfg, TrainConfig) and not cfg.runner.only_eval
    blueprint = draw_blueprint(cfg, training=training)
    lines = facts(blueprint)
    if training:
        lines += _training_facts(blueprint)
    return _layout([*lines, *evaluation_facts(blueprint)])


def _layout(lines: list[tuple[str, str]]) -> str:
    return "\n".join(f"  {name:<12} {text}" for name, text in lines)


def facts(blueprint: Blueprint) -> list[tuple[str, str]]:
    """Name and text of the banner's lines."""
    cfg, env, policy = blueprint.cfg, blueprint.env, blueprint.policy
    split = cfg.env.splits["train" if blueprint.algorithm or blueprint.single_step else "eval"]
    lines = {
        "env": f"{env.name} ({len(env.tasks)} tasks) · {blueprint.num_slots} slots in {len(blueprint.seats)} workers · "
        f"{split.max_episode_steps} steps/episode · {_sight(env)}",
        "policy": f"{policy.name} · {_count(policy.num_parameters)} parameters · {cfg.model.precision_name} · "
        f"chunk {policy.num_action_chunks} x {policy.action_dim}",
    }
    if env.task_bytes:
        lines["simulators"] = memory_of_tasks(env, split, len(blueprint.seats))
    if blueprint.algorithm is not None:
        a = blueprint.algorithm.settings
        clip = f" · clip {a.clip_ratio_low}/{a.clip_ratio_high}" if isinstance(a, ClipSettings) else ""
        lines["algorithm"] = f"{a.adv_type} + {a.loss_type} · group {a.group_size}{clip} · {a.logprob_type.value}"
    mib = blueprint.layout.offsets(blueprint.capacity)[1] / MIB
    arena = f"shared arena {mib:.0f} MiB ({blueprint.capacity} records)"
    lines["machine"] = f"{available_cores()} cores · {arena} · disk {_free_disk(cfg) / GIB:.0f} GiB free"
    return list(lines.items())


def memory_of_tasks(env: EnvSpec, split: PlayedSplit, workers: int) -> str:
    """What loaded tasks cost, and how many of them each env worker keeps."""
    wanted = len(split.task_ids or env.tasks)
    kept = min(wanted, tasks_in_memory(env.task_bytes, workers))
    return (
        f"up to {env.task_bytes / 2**30:.1f} GiB per loaded task, {available_bytes() / 2**30:.1f} GiB free: each of "
        f"{workers} workers keeps {kept} of {wanted} tasks"
    )


def _training_facts(blueprint: Blueprint) -> list[tuple[str, str]]:
    cfg = blueprint.config(TrainConfig)
    assert blueprint.algorithm is not None
    plan = train_plan(cfg, blueprint.env, 0, counts_chunk_steps=blueprint.algorithm.counts_chunk_steps)
    quota = plan.waves[0].quota_chunks
    if quota is not None:
        per_step = f"{quota} chunk steps x {plan.num_slots} slots x {len(plan.waves)} rollouts"
    else:
        per_step = f"{plan.num_episodes} episodes, {plan.num_episodes // cfg.algorithm.group_size} groups"
    memory = plan_memory(blueprint)
    require_memory(blueprint, memory)
    free = _free_disk(cfg)
    if memory.checkpoint * (cfg.checkpoint.keep + 1) > free:
        raise ConfigError(
            f"A checkpoint needs {memory.checkpoint / GIB:.1f} GiB; {cfg.checkpoint.keep} are kept while one more is "
            f"written, and {free / GIB:.1f} GiB are free in {cfg.runner.output_dir}. Free some, or checkpoint.keep=1."
        )
    samples = blueprint.max_samples
    return [
        ("per step", f"{per_step} · up to {samples} samples, {blueprint.optimizer_steps_per_step} optimizer steps"),
        ("in total", f"{blueprint.total_steps} training steps"),
        *memory.lines(blueprint.ranks, len(blueprint.seats)),
        ("disk", f"{memory.checkpoint / GIB:.2f} GiB per checkpoint, {cfg.checkpoint.keep} kept"),
    ]


def _sight(env: EnvSpec) -> str:
    """What the policy can see."""
    if not env.cameras:
        return f"state [{env.state_dim}]"
    return f"{', '.join(env.cameras)} {env.image_size[0]}x{env.image_size[1]}"


def _count(number: int) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return str(number)


def _free_disk(cfg: RunConfig) -> int:
    folder = Path(cfg.runner.output_dir)
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"runner.output_dir={cfg.runner.output_dir}: {folder} is no folder that can be written to.")
    return shutil.disk_usage(folder).free
