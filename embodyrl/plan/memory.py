"""What memory a run will need, derived before anything starts."""

import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass

from embodyrl.devices import visible_gpus
from embodyrl.errors import ConfigError
from embodyrl.files import available_bytes
from embodyrl.plan.blueprint import Blueprint
from embodyrl.plan.roots import TrainConfig

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
        """Name and text, human-readable."""
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
    cfg, policy, env = blueprint.config(TrainConfig), blueprint.policy, blueprint.env
    fsdp, total, on_gpu = cfg.actor.fsdp, policy.num_parameters, bool(visible_gpus())
    whole = total * (2 if cfg.model.half else 4)
    adapters = policy.num_trained is not None
    trained = policy.num_trained if policy.num_trained is not None else total
    # Beside adapters the rest is kept in the compute precision; what is trained is fp32, and autocast keeps bfloat16
    # copies of it for the backward pass.
    kept = (whole if adapters else 0) + 4 * trained
    copies = 2 * trained if cfg.model.half and not adapters else 0
    sharded = blueprint.ranks > 1 or fsdp.cpu_offload
    shards = (blueprint.ranks if fsdp.shard_size == -1 else fsdp.shard_size) if sharded else 1
    offloaded = fsdp.cpu_offload and on_gpu
    per_sample = policy.recomputed_bytes if cfg.actor.gradient_checkpointing else policy.activation_bytes
    apart = blueprint.is_disaggregated
    process = _CUDA if on_gpu else _PROCESS + (_ADAPTERS if adapters else 0)
    slots = len(blueprint.env_workers[0].slots)
    tasks = len(cfg.env.train.task_ids or env.tasks) if env.task_bytes else slots
    return MemoryPlan(
        weights=0 if offloaded else kept // shards,
        gathered=whole if sharded and not apart else 0,
        reference=kept if blueprint.algorithm is not None and blueprint.algorithm.needs_reference else 0,
        # Whole ones of a backward pass, and what is left of them for the optimizer.
        gradients=4 * trained + (4 * trained // shards if sharded else 0),
        optimizer=0 if offloaded else 8 * trained // shards,
        activations=cfg.actor.micro_batch_size * per_sample + copies,
        process=process,
        acting=process + kept if apart else 0,  # while it is built, its weights are those of an actor
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
    acting = blueprint.cfg.rollout.acting_processes
    policies, envs = plan.policy * blueprint.ranks + plan.acting * acting, plan.env_worker * len(blueprint.env_workers)
    smaller = "actor.micro_batch_size, model.is_lora=true, actor.gradient_checkpointing=true or more actor ranks"
    if visible_gpus():
        gpu, needed = _gpu_memory(), _fullest_gpu(blueprint, plan)
        if gpu and needed > gpu:
            raise ConfigError(
                f"A policy process needs about {plan.policy / GIB:.1f} GiB, and with all that shares its GPU "
                f"{needed / GIB:.1f}; a GPU here has {gpu / GIB:.1f} GiB. "
                f"Try a smaller launcher.env_workers, {smaller}, or actor.fsdp.cpu_offload=true."
            )
        policies = _PROCESS * (blueprint.ranks + acting)
    needed, free = policies + envs + plan.arena, available_bytes()
    if needed > free:
        raise ConfigError(
            f"This run needs about {needed / GIB:.1f} GiB of memory ({policies / GIB:.1f} for the policy, "
            f"{envs / GIB:.1f} for {len(blueprint.env_workers)} env workers, {plan.arena / GIB:.1f} shared), "
            f"{free / GIB:.1f} GiB are free. Try a smaller launcher.env_workers or env.train.total_num_envs, {smaller}."
        )


def _fullest_gpu(blueprint: Blueprint, plan: MemoryPlan) -> int:
    """What the processes of that GPU need that gets most of all, bytes; inline everything is on one."""
    devices, needed = blueprint.devices, Counter[str]()
    for number, gpu in enumerate(devices.policies or ("inline",)):
        needed[gpu] += plan.policy if number < blueprint.ranks else plan.acting
    for number in range(len(blueprint.env_workers) if plan.env_gpu else 0):
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
