"""Estimate of the memory of a run, computed before the run starts."""

import math
from collections import Counter
from dataclasses import replace

from embodyrl.algorithms.settings import BufferSettings
from embodyrl.channels.layout import OBSERVATION, Record
from embodyrl.cluster import LAUNCHERS
from embodyrl.config.paths import resolve_asset
from embodyrl.data.layout import INFO_PATH
from embodyrl.devices import visible_gpus
from embodyrl.envs.factory import get_max_tasks_in_memory
from embodyrl.files import read_json
from embodyrl.plan.episodes import groups_per_step
from embodyrl.plan.memory_plan import GIB, MemoryPlan
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.schema import Config
from embodyrl.policies.protocol import estimate_policy_costs
from embodyrl.types import ROWS_AT_A_TIME, ActionKind, PolicyCosts

MIB = 2**20
PROCESS = 260 * MIB
"""Host memory in bytes of a process with torch and a policy."""
_TRANSFORMERS, _ADAPTERS = 80 * MIB, 180 * MIB
"""Additional host memory of transformers, for text models, and of the adapter library with transformers."""
_CUDA = 600 * MIB
"""GPU memory of the CUDA context and of workspaces."""
_ENV_PROCESS, _DRIVER = 40 * MIB, 105 * MIB
"""Host memory of an env worker without its simulators, and of the process that starts the workers."""
_ENGINE = 2 * GIB
"""GPU memory of vLLM's workspaces and of a minimal KV cache."""
_UNKNOWN_SHARE = 0.4
"""Fraction of GPU memory for vLLM if the size of the GPU is unknown."""
_RESERVE = 0.05
"""Fraction of a GPU reserved for fragmentation and uncounted memory."""


def plan_memory(run_plan: RunPlan) -> MemoryPlan:
    """Estimate the memory of a run, and derive the settings that depend on memory.

    `nvidia-smi` is called only if necessary.
    """
    plan = _plan_training(run_plan) if run_plan.algorithm else _plan_evaluation(run_plan)
    if run_plan.cfg.rollout.backend == "vllm":
        plan = replace(plan, engine_memory_fraction=_compute_engine_fraction(run_plan, plan))
    return plan


def _plan_training(run_plan: RunPlan) -> MemoryPlan:
    """Estimate the memory of a training run.

    Gradients are synchronized once per step if `actor.fsdp.gradient_sync=auto` and the GPUs have the memory; vLLM
    does not sleep if `rollout.vllm.enable_sleep_mode=null` and the GPUs have memory for the replies of all
    environments.
    """
    cfg = run_plan.cfg
    sync, sleeps = cfg.actor.fsdp.gradient_sync, cfg.rollout.vllm.enable_sleep_mode
    # The fastest plan is preferred; if it exceeds the memory of a GPU, a slower and smaller plan is used.
    fast_plan = _plan(run_plan, "step" if sync == "auto" else sync, sleeps=bool(sleeps))
    may_sleep = fast_plan.engine > 0 and sleeps is None and not cfg.algorithm.max_staleness
    # Query the GPUs only if the result matters, because the query starts a program.
    query_gpus = may_sleep or (fast_plan.on_gpu and run_plan.ranks > 1 and sync == "auto")
    gpu = run_plan.gpus.free if query_gpus else 0
    cache = run_plan.policy_costs.inference_bytes * run_plan.num_envs if may_sleep else 0
    if not gpu or fullest_gpu(run_plan, fast_plan) + cache <= gpu:
        return fast_plan
    small_sync = "micro_batch" if sync == "auto" and run_plan.ranks > 1 else fast_plan.gradient_sync
    return _plan(run_plan, small_sync, sleeps=may_sleep or fast_plan.sleeps)


def _plan(run_plan: RunPlan, gradient_sync: str, *, sleeps: bool) -> MemoryPlan:
    cfg, costs = run_plan.cfg, run_plan.policy_costs
    fsdp, total, on_gpu = cfg.actor.fsdp, costs.num_parameters, bool(visible_gpus())
    uses_bf16, adapters, is_separate = cfg.model.uses_bf16, costs.num_trained is not None, run_plan.is_disaggregated
    trained = total if costs.num_trained is None else costs.num_trained
    if critic := _get_second_model_costs(run_plan, cfg.critic.path):  # all its parameters are trained
        trained += critic.num_parameters
    weight_bytes = total * (2 if uses_bf16 else 4)
    # With adapters the base weights keep the compute precision; trained weights are float32.
    stored_bytes = (weight_bytes if adapters else 0) + 4 * trained
    sharded = run_plan.ranks > 1 or fsdp.cpu_offload
    # With HSDP, a copy of the weights has fewer shards than there are ranks.
    shards = (run_plan.ranks if fsdp.shard_size == -1 else fsdp.shard_size) if sharded else 1
    single_micro_batch = sharded and _get_micro_batches(run_plan) == 1
    whole_gradients = not sharded or (gradient_sync == "step" and not single_micro_batch)
    prompts = math.inf if sharded else _count_prompts(run_plan)
    copies = uses_bf16 and not adapters and not sharded
    activations = _get_activations(cfg, costs, trained, prompts=prompts, copies=copies, whole_gradients=whole_gradients)
    if critic:
        critic_costs = replace(critic, logit_bytes=(0, 0), output_gradient_bytes=(0, 0))  # critics have no log-probs
        activations += _get_activations(
            cfg, critic_costs, critic.num_parameters, prompts=math.inf, copies=uses_bf16, whole_gradients=True
        )
    gradients = 4 * trained // (1 if whole_gradients else shards)
    if single_micro_batch:  # shards are allocated while activations are freed
        gradients = max(0, gradients - (activations - _get_layer_gradients(costs)))
    offloaded = fsdp.cpu_offload and on_gpu
    average_bytes = 4 * trained if getattr(cfg.algorithm, "average", 0.0) else 0
    vllm = cfg.rollout.backend == "vllm"
    replay, loading_bytes = _estimate_replay(run_plan)
    process = _estimate_process(run_plan, on_gpu=on_gpu)
    inference_batch = _estimate_inference(run_plan, costs)
    engine = 2 * total + _ENGINE if vllm and on_gpu else 0
    return MemoryPlan(
        weights=0 if offloaded else (stored_bytes + average_bytes) // shards,
        gathered=weight_bytes + (2 * costs.outside_layers if uses_bf16 and not adapters else 0)
        if sharded and not is_separate
        else 0,
        reference=_estimate_reference(
            run_plan, stored_bytes if adapters else weight_bytes + (costs.outside_layers if uses_bf16 else 0)
        ),
        gradients=gradients,
        optimizer=0 if offloaded else 8 * trained // shards,
        activations=activations,
        in_use=_get_gathered_bytes(costs, total, uses_bf16=uses_bf16, adapters=adapters) if sharded and on_gpu else 0,
        inference_batch=0 if is_separate else inference_batch,
        keeps_inference_memory=cfg.model.uses_cuda_graphs and on_gpu,
        building=stored_bytes + loading_bytes if adapters or not on_gpu else 4 * trained,
        engine=0 if is_separate else engine,
        sleeps=sleeps and engine > 0 and not is_separate,
        process=process,
        saving=max(stored_bytes if sharded else 0, 8 * trained, loading_bytes) + replay if on_gpu else 0,
        offloaded=(stored_bytes + average_bytes + 12 * trained) // shards if offloaded else 0,
        inference=process + max(stored_bytes, weight_bytes + inference_batch + engine)
        if is_separate
        else 0,  # building its policy needs as much memory as in an actor
        on_gpu=on_gpu,
        gradient_sync=gradient_sync,
        env_worker=_ENV_PROCESS + _estimate_simulators(run_plan, run_plan.env_costs.host_bytes),
        env_gpu=_estimate_simulators(run_plan, run_plan.env_costs.gpu_bytes),
        driver=0 if LAUNCHERS.get(cfg.launcher.name).in_process else _DRIVER,
        arena=run_plan.layout.offsets(run_plan.capacity)[1],
        replay=0 if on_gpu else replay,
        checkpoint=12 * trained
        + average_bytes
        + (weight_bytes if run_plan.policy.steering else 0)  # frozen weights are saved with the steering weights
        + (replay if isinstance(cfg.algorithm, BufferSettings) and cfg.algorithm.save_replay else 0),
    )


def _plan_evaluation(run_plan: RunPlan) -> MemoryPlan:
    """Estimate the memory of a run without training, whose policy has no gradients and no optimizer."""
    cfg, costs, on_gpu = run_plan.cfg, run_plan.policy_costs, bool(visible_gpus())
    engine = 2 * costs.num_parameters + _ENGINE if cfg.rollout.backend == "vllm" and on_gpu else 0
    return MemoryPlan(
        weights=costs.num_parameters * (2 if cfg.model.uses_bf16 else 4),
        inference_batch=_estimate_inference(run_plan, replace(costs, num_trained=0)),
        engine=engine,
        process=_estimate_process(run_plan, on_gpu=on_gpu),
        env_worker=_ENV_PROCESS + _estimate_simulators(run_plan, run_plan.env_costs.host_bytes),
        env_gpu=_estimate_simulators(run_plan, run_plan.env_costs.gpu_bytes),
        driver=0 if LAUNCHERS.get(cfg.launcher.name).in_process else _DRIVER,
        arena=run_plan.layout.offsets(run_plan.capacity)[1],
        on_gpu=on_gpu,
    )


def _estimate_process(run_plan: RunPlan, *, on_gpu: bool) -> int:
    """Return the memory of libraries in a policy process: on its GPU, or without a GPU in host memory."""
    if on_gpu:
        return _CUDA
    if getattr(run_plan.cfg.model, "uses_adapters", False):
        return PROCESS + _ADAPTERS
    return PROCESS + _TRANSFORMERS * (run_plan.env.action.kind is ActionKind.text)


def _estimate_simulators(run_plan: RunPlan, sizes: tuple[int, int]) -> int:
    """Return the memory of an env worker's simulators from `sizes`: fixed, and per environment or cached task."""
    env, num_simulators = run_plan.env_costs, len(run_plan.env_workers[0].env_indices)
    if env.task_bytes:
        cfg = run_plan.cfg
        split = cfg.env.splits["eval" if run_plan.algorithm is None and cfg.has_evaluations else "train"]
        tasks = len(split.task_ids or run_plan.env.tasks)
        tasks = min(tasks, get_max_tasks_in_memory(env.task_bytes, run_plan.env_workers_per_node))
        num_simulators = min(num_simulators, tasks) if run_plan.env.simulator.on_gpu else tasks
    return sizes[0] + sizes[1] * num_simulators


def _count_prompts(run_plan: RunPlan) -> float:
    """Return the number of distinct prompts in a micro-batch; infinity if episodes have several chunks."""
    cfg, total, groups = run_plan.cfg, run_plan.max_samples, groups_per_step(run_plan.cfg)
    size, samples = cfg.algorithm.group_size, cfg.actor.micro_batch_size
    groups_are_adjacent = cfg.actor.global_batch_size >= total and not cfg.actor.max_tokens_per_mbs
    max_prompts = min(groups, samples // size + 2 * (samples % size > 0)) if groups_are_adjacent else groups
    return max_prompts if total == groups * size else math.inf


def _estimate_inference(run_plan: RunPlan, costs: PolicyCosts) -> int:
    """Return the bytes of an inference batch on the GPU.

    With vLLM, the policy module runs only to compute values, or log-probabilities for a temperature other than 1.
    """
    cfg, num_envs = run_plan.cfg, run_plan.num_envs
    if cfg.rollout.backend != "vllm":
        # Number of weights of which autocast keeps bfloat16 copies; sharded weights are gathered in bfloat16.
        num_copied = costs.num_trained
        if num_copied is None:
            has_copies = run_plan.ranks == 1 and not cfg.actor.fsdp.cpu_offload
            num_copied = costs.num_parameters - costs.outside_layers if has_copies else 0
        return costs.inference_bytes * -(-num_envs // run_plan.ranks) + (2 * num_copied if cfg.model.uses_bf16 else 0)
    if run_plan.policy.value_dim or cfg.algorithm.sampling_params.temperature != 1.0:
        rows = min(num_envs, ROWS_AT_A_TIME)
        return costs.largest_layer[1] * rows + costs.estimate_logprob_bytes(rows)[0]
    return 0


def _get_second_model_costs(run_plan: RunPlan, path: str | None) -> PolicyCosts | None:
    """Return the costs of a second model of the policy's type (teacher or separate critic); None without `path`."""
    if path is None:
        return None
    model = run_plan.cfg.model
    return estimate_policy_costs(model.without_adapters(path), run_plan.env, 0)


def _estimate_reference(run_plan: RunPlan, own_bytes: int) -> int:
    """Return the bytes of the frozen reference weights in compute precision; 0 for a reference server."""
    cfg = run_plan.cfg
    if run_plan.algorithm is None or not run_plan.algorithm.needs_reference or cfg.algorithm.reference_url:
        return 0
    teacher = _get_second_model_costs(run_plan, cfg.algorithm.reference_path)
    return own_bytes if teacher is None else teacher.num_parameters * (2 if cfg.model.uses_bf16 else 4)


def _estimate_replay(run_plan: RunPlan) -> tuple[int, int]:
    """Return the bytes of the replay buffer, and the additional bytes needed while demonstrations are loaded.

    For SAC, the buffers contain the observation and action of each record, up to the capacity, and all chunks of the
    demonstrations. Loading temporarily needs all frames of the demonstrations, and a second copy of the chunks.

    For filtered behavior cloning, the buffer contains at most all records, and the frames of the demonstrations.
    """
    cfg, policy = run_plan.cfg, run_plan.policy
    if not isinstance(cfg.algorithm, BufferSettings):
        return 0, 0
    size = {field.name: field.record_bytes for field in run_plan.layout.fields}
    stored = record_bytes = sum(size[name] for name in (*OBSERVATION, Record.action))
    if policy.steering:  # a noise token consists of two numbers
        action_bytes = size[Record.action if policy.steering.is_residual else Record.tokens]
        stored = 4 * run_plan.policy_costs.steering_features + action_bytes
    data_infos = [read_json(resolve_asset(str(folder)) / INFO_PATH) for folder in cfg.algorithm.demonstrations]
    frames, length = sum(info["total_frames"] for info in data_infos), policy.num_action_chunks
    chunks = frames // length + (sum(info["total_episodes"] for info in data_infos) if length > 1 else 0)  # upper bound
    if not cfg.algorithm.transitions:
        longer = (policy.imitated or length) / length  # chunks are stored with the imitated length
        chunk_bytes = record_bytes - size[Record.action] + int(longer * size[Record.action])
        num_stored = min(cfg.algorithm.replay_size, run_plan.max_samples * run_plan.total_steps)
        return chunk_bytes * num_stored + record_bytes * frames, record_bytes * frames * (len(data_infos) > 1)
    num_stored = min(cfg.algorithm.replay_size, 2 * run_plan.max_samples * run_plan.total_steps)
    return stored * (num_stored + chunks), record_bytes * (frames * min(len(data_infos), 2) + chunks)


def _get_micro_batches(run_plan: RunPlan) -> int:
    """Return the maximum number of micro-batches of an optimizer step on each rank."""
    cfg, rules = run_plan.cfg, run_plan.cfg.algorithm
    batch = -(-run_plan.max_samples // max(1, run_plan.optimizer_steps_per_training_step // rules.update_epoch))
    batch = cfg.actor.global_batch_size if isinstance(rules, BufferSettings) else batch
    budget, tokens = cfg.actor.max_tokens_per_mbs, run_plan.policy_costs.sample_tokens
    size = max(1, budget // tokens) if budget and tokens > 1 else cfg.actor.micro_batch_size
    return -(-batch // (run_plan.ranks * size))


def _get_activations(
    cfg: Config, costs: PolicyCosts, trained: int, *, prompts: float, copies: bool, whole_gradients: bool
) -> int:
    """Return the activation bytes of a micro-batch with at most `prompts` distinct prompts.

    If `copies`, autocast keeps bfloat16 copies of the weights for the backward pass. If `whole_gradients`, unsharded
    gradients of an earlier micro-batch exist. Otherwise, unsharded gradients of one
    layer and of the output matrix are needed in addition to the shards. Embedding gradients are computed last.
    """
    off_policy = cfg.algorithm.transitions
    if off_policy and costs.steering_features:
        return 0  # updates read stored features; actor and critics are small
    samples = float(cfg.actor.global_batch_size if off_policy else cfg.actor.micro_batch_size)
    # The policies of robots have no token budget.
    if (budget := cfg.actor.max_tokens_per_mbs) and costs.sample_tokens > 1:
        samples = max(1.0, budget / costs.sample_tokens)
    layer_gradients = 0 if whole_gradients else _get_layer_gradients(costs)
    scoring, recomputed_scoring = costs.estimate_logprob_bytes(samples)
    if cfg.actor.gradient_checkpointing:  # backward computes log-probabilities before the layers
        return int(samples * costs.recomputed_bytes) + max(
            int(samples * costs.largest_layer[1]) + layer_gradients, recomputed_scoring
        )
    return (
        costs.estimate_activation_bytes(samples, min(samples, prompts))
        + (0 if visible_gpus() else costs.estimate_fragmented_bytes(samples, min(samples, prompts)))
        + max(scoring, layer_gradients)
        + (2 * (trained - costs.outside_layers) if copies else 0)
    )


def _get_layer_gradients(costs: PolicyCosts) -> int:
    """Return the bytes of the unsharded gradients of one layer and of the output matrix; 0 with adapters."""
    return 0 if costs.num_trained is not None else 4 * (costs.outside_layers // 2 + costs.largest_layer[0])


def _get_gathered_bytes(costs: PolicyCosts, total: int, *, uses_bf16: bool, adapters: bool) -> int:
    """Return the bytes of weights that FSDP gathers simultaneously: two layers and all weights outside the layers."""
    # Without known layers, a quarter of all weights is assumed.
    if not costs.largest_layer[0]:
        return total // 4
    return (2 if uses_bf16 else 4) * 2 * costs.largest_layer[0] + (
        2 if uses_bf16 and adapters else 4
    ) * costs.outside_layers


def _compute_engine_fraction(run_plan: RunPlan, plan: MemoryPlan) -> float:
    """Return the fraction of a GPU's memory for vLLM: the free memory beyond the plan, minus a reserve."""
    gpu = run_plan.gpus.free
    if not gpu:
        return _UNKNOWN_SHARE
    if run_plan.algorithm:
        # The engine may use its minimum, which is part of the plan, and all free memory.
        other_memory = replace(plan, engine=0)
        if plan.sleeps:
            other_memory = replace(other_memory, gradients=0, activations=0, in_use=0)
        free_bytes = gpu - (plan.inference if run_plan.is_disaggregated else fullest_gpu(run_plan, other_memory))
        if run_plan.is_disaggregated:
            free_bytes += 2 * run_plan.policy_costs.num_parameters + _ENGINE
    else:
        free_bytes = gpu - (2 if run_plan.cfg.model.uses_bf16 else 4) * run_plan.policy_costs.num_parameters - _CUDA
    # vLLM takes its fraction of the total memory, even if another process uses a part.
    return max(0.05, int(100 * (free_bytes / (run_plan.gpus.total or gpu) - _RESERVE)) / 100)


def fullest_gpu(run_plan: RunPlan, plan: MemoryPlan) -> int:
    """Return the bytes needed on the GPU with the highest demand; with the inline launcher there is only one GPU."""
    devices, needed = run_plan.devices, Counter[tuple[int, str]]()
    for number, gpu in enumerate(devices.policies or ("inline",)):
        needed[run_plan.policy_node(number), gpu] += plan.policy if number < run_plan.ranks else plan.inference
    for number in range(len(run_plan.env_workers) if plan.env_gpu else 0):
        index = number // len(run_plan.nodes["env"])
        gpu = devices.get_env_worker_gpu(index, on_gpu=True) or "inline"
        needed[run_plan.env_node(number), gpu] += plan.env_gpu
    return max(needed.values())
