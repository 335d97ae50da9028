"""Memory and speed in `--dry-run`, and errors for runs that do not fit in memory, with settings that reduce memory."""

import os
from collections import Counter

from embodyrl.devices import Devices, Gpus, visible_gpus
from embodyrl.errors import ConfigError
from embodyrl.files import available_bytes
from embodyrl.plan.build import component_nodes, count_ranks
from embodyrl.plan.memory import PROCESS, fullest_gpu
from embodyrl.plan.memory_plan import GIB, MemoryPlan
from embodyrl.plan.rates import predict
from embodyrl.plan.run_plan import RunPlan, place_policy
from embodyrl.plan.schema import Config


def resource_banner_lines(run_plan: RunPlan) -> list[tuple[str, str]]:
    """Return the lines (label, text) of `--dry-run` about memory and speed.

    Raises:
        ConfigError: see `require_resources`.
    """
    require_resources(run_plan)
    lines = run_plan.memory.lines(run_plan.ranks, len(run_plan.env_workers))
    if run_plan.algorithm is None:
        return lines
    if run_plan.memory.engine:
        lines.append(("", f"vLLM gets {run_plan.memory.engine_memory_fraction:.0%} of its GPU"))
    rates = predict(run_plan)
    return lines + (rates.lines(run_plan.max_samples) if rates else [])


def require_resources(run_plan: RunPlan) -> None:
    """Check GPUs and memory; commands call this function before they create a run folder or start a process.

    Raises:
        ConfigError: the run needs more memory or GPUs than the machine has.
    """
    require_devices(run_plan.cfg, run_plan.devices, run_plan.gpus)
    require_memory(run_plan, run_plan.memory)


def require_devices(cfg: Config, devices: Devices, gpus: Gpus) -> None:
    """Raise an error if a run needs GPUs that the host does not have.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES contains a missing GPU, or several actor ranks would share a GPU.
    """
    if missing := gpus.missing:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}: this host has no GPU {', '.join(missing)}. "
            "Use GPUs that `nvidia-smi -L` lists, or set CUDA_VISIBLE_DEVICES= to run on the CPU."
        )
    nodes, count = component_nodes(cfg), count_ranks(cfg)
    used = Counter((place_policy(nodes, rank, count), devices.get_policy_gpu(rank)) for rank in range(count))
    if devices.policies and max(used.values()) > 1:
        raise ConfigError(
            f"actor.fsdp.size={count}: each process needs its own GPU, but only {len(used)} are visible. Set "
            f"actor.fsdp.size={len(used)}, or list more GPUs in CUDA_VISIBLE_DEVICES."
        )


def require_memory(run_plan: RunPlan, plan: MemoryPlan) -> None:
    """Raise an error if a run does not fit in memory.

    Raises:
        ConfigError: the run does not fit; the message contains needed and free memory, and keys that reduce memory.
    """
    if visible_gpus():
        gpu, needed = run_plan.gpus.free, fullest_gpu(run_plan, plan)
        if gpu and needed > gpu:
            raise ConfigError(
                "The run does not fit on this machine. "
                f"A policy process needs about {plan.policy / GIB:.1f} GiB, and all processes on its GPU need "
                f"{needed / GIB:.1f} GiB, but the smallest GPU has only {gpu / GIB:.1f} GiB free. "
                f"{_suggest_settings(run_plan, plan, needed - plan.policy)}"
            )
    policies, workers = _find_fullest_host(run_plan, plan)
    envs = plan.env_worker * workers
    needed, free = policies + envs + plan.driver + plan.arena, available_bytes()
    if needed > free:
        raise ConfigError(
            "The run does not fit on this machine. "
            f"This run needs about {needed / GIB:.1f} GiB of memory on a host ({policies / GIB:.1f} for the policy, "
            f"{envs / GIB:.1f} for {workers} env workers, {plan.driver / GIB:.1f} for the driver, "
            f"{plan.arena / GIB:.1f} shared), but "
            f"only {free / GIB:.1f} GiB are free. {_suggest_settings(run_plan, plan)}"
        )


def _suggest_settings(run_plan: RunPlan, plan: MemoryPlan, rendering_bytes: int | None = None) -> str:
    """Return a sentence with settings that the run does not use and that would reduce its memory.

    `rendering_bytes` is the memory of the simulators on the fullest GPU, or None if the memory of a host is too small.
    """
    cfg, workers, on_gpu = run_plan.cfg, len(run_plan.env_workers), rendering_bytes is not None
    learns, keys = run_plan.algorithm is not None, list[str]()
    if rendering_bytes and not run_plan.env.simulator.lockstep:
        keys.append(f"MUJOCO_GL=osmesa, which renders on the CPU and frees {rendering_bytes / GIB:.1f} GiB")
    if workers > 1 and (rendering_bytes or not on_gpu):
        keys.append(f"launcher.env_workers below {workers}")
    split = "env.train" if learns else "env.eval"
    if not on_gpu and run_plan.num_envs > (cfg.algorithm.group_size if learns else 1):
        keys.append(f"{split}.total_num_envs below {run_plan.num_envs}")
    if learns and not cfg.actor.gradient_checkpointing:
        keys.append("actor.gradient_checkpointing=true")
    if learns and getattr(cfg.actor, "micro_batch_size", 1) > 1:
        keys.append("a smaller actor.micro_batch_size")
    if learns and run_plan.policy_costs.num_trained is None and hasattr(cfg.model, "is_lora"):
        keys.append("model.is_lora=true" + (" with rollout.backend=hf" if cfg.rollout.backend == "vllm" else ""))
    if not learns and hasattr(cfg.model, "precision") and not cfg.model.uses_bf16:
        keys.append("model.precision=bf16")
    if learns and on_gpu:
        keys.append("more actor ranks" + (" or actor.fsdp.cpu_offload=true" if not cfg.actor.fsdp.cpu_offload else ""))
    return f"Try {', '.join([*keys, 'a smaller model'])}."


def _find_fullest_host(run_plan: RunPlan, plan: MemoryPlan) -> tuple[int, int]:
    """Return the bytes of policy processes and the number of env workers on the host with the highest memory demand."""
    policies, workers, gpus = Counter[int](), Counter[int](), bool(visible_gpus())
    for number in range(run_plan.ranks + run_plan.cfg.rollout_processes):
        trains = number < run_plan.ranks
        process_bytes = plan.policy if trains else plan.inference
        policies[run_plan.policy_node(number)] += PROCESS + plan.offloaded * trains if gpus else process_bytes
    policies[run_plan.policy_node(0)] += plan.saving
    for number in range(len(run_plan.env_workers)):
        workers[run_plan.env_node(number)] += 1
    fullest = max({*policies, *workers}, key=lambda node: policies[node] + plan.env_worker * workers[node])
    return policies[fullest], workers[fullest]
