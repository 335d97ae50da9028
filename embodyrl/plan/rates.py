"""Estimate of the speed of a training run on GPUs and of its bottleneck, computed before the run starts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from embodyrl.algorithms.settings import BufferSettings
from embodyrl.config.paths import cache_dir
from embodyrl.devices import Gpus, visible_gpus
from embodyrl.files import available_cores
from embodyrl.plan.run_plan import RunPlan


@dataclass(frozen=True, slots=True)
class Speed:
    """Rates of a GPU; assumed rates are about 2/3 of the FLOP/s and 5/6 of the bandwidth in the data sheet."""

    name: str
    flops: float
    """FLOP/s of large matrix products in bfloat16."""
    slow_flops: float
    """FLOP/s of large matrix products in float32."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    source: str = ""
    """Path of the report with the measured rates; empty: assumed rates."""


SPEEDS = (
    Speed("B200", 1500e12, 55e12, 6.6e12),
    Speed("H200", 650e12, 50e12, 4.0e12),
    Speed("H100 PCIe", 500e12, 34e12, 1.7e12),
    Speed("H100", 650e12, 50e12, 2.8e12),
    Speed("A100", 210e12, 13e12, 1.6e12),
    Speed("L40S", 240e12, 60e12, 0.72e12),
    Speed("L40", 120e12, 60e12, 0.72e12),
    Speed("RTX 6000 Ada", 240e12, 60e12, 0.8e12),
    Speed("A6000", 100e12, 25e12, 0.64e12),
    Speed("RTX 5090", 140e12, 70e12, 1.5e12),
    Speed("RTX 4090", 110e12, 55e12, 0.84e12),
    Speed("RTX 3090", 47e12, 23e12, 0.78e12),
    Speed("A10", 83e12, 20e12, 0.5e12),
    Speed("L4", 80e12, 20e12, 0.25e12),
)
"""Assumed rates of GPUs; the first entry whose name occurs in the name from `nvidia-smi` is used.
GeForce GPUs have half the rate for matrix products with float32 accumulation."""
DEFAULT_SPEED = Speed("H100", 650e12, 50e12, 2.8e12)
INFERENCE_FACTOR = 1.4
"""Ratio of inference time to the time of the matrix products alone, measured with OpenVLA-OFT 7B on an H100 (batches of
32 and 64)."""
TRAINING_FACTOR = 2.2
"""Ratio of update time to the time of the matrix products alone. Measured values (docs/results/gpu.md): 1.8 for
micro-batches of 16 with gradient checkpointing; 2.6 to 2.8 for micro-batches of 8 without gradient checkpointing."""
ACTIONS_PER_CHUNK = 8
"""Number of actions per chunk for which `EnvCosts.chunk_s` is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Maximum rate of each resource, per second; 0: unknown or irrelevant."""

    simulators: float
    """Chunks per second that the env workers execute."""
    inference: float
    """Chunks per second that the policy generates."""
    training: float
    """Samples per second in forward and backward passes."""
    seconds: float
    """Duration of a training step (rollout and update), in seconds."""
    bound_by: str
    speed: Speed
    known: bool
    """True if the rates of this host's GPUs are known (measured, or in `SPEEDS`)."""
    chunk_source: str = ""
    """Path of the report with the measured time of an environment chunk; empty: assumed time."""

    def lines(self, samples: int) -> list[tuple[str, str]]:
        """Return the lines (label, text) of `--dry-run` about speed."""
        simulators = f"{self.simulators:.0f} chunks/s" if self.simulators else "not known"
        return [
            (
                "predicted",
                f"simulators {simulators} · acting {self.inference:.0f} chunks/s · training {self.training:.1f} "
                f"samples/s · {self.seconds:.0f} s for {samples} samples, bound by {self.bound_by}",
            ),
            (
                "",
                f"{self._basis}: {self.speed.flops / 1e12:.0f} TFLOP/s in bfloat16, {self.speed.bandwidth / 1e12:.1f} "
                f"TB/s; acting {INFERENCE_FACTOR}, training {TRAINING_FACTOR} times the time of matrix products "
                f"(measured on an H100); {self._origin}",
            ),
        ]

    @property
    def _basis(self) -> str:
        if self.speed.source:
            return f"measured for each GPU ({self.speed.name})"
        return f"assumed for each GPU ({self.speed.name}{'' if self.known else ', because the GPU is unknown'})"

    @property
    def _origin(self) -> str:
        is_measured = self.speed.source != ""
        rates = f"rates from {self.speed.source}" if is_measured else "this GPU was not measured (tools/gpu_check)"
        return f"{rates}, time of simulators from {self.chunk_source}" if self.chunk_source else rates


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """Rates of a GPU or an environment, measured by `tools/gpu_check` and stored in the user's cache."""

    rates: Mapping[str, float]
    report: str
    """Path of the report with the measurements."""
    day: str

    @property
    def source(self) -> str:
        """Path and day of the report."""
        return f"{self.report} ({self.day})"


def rates_file() -> Path:
    """Return the path of the cache file with the measured rates."""
    return cache_dir() / "gpu_rates.json"


def read_measured_rates() -> dict[str, MeasuredRates]:
    """Return the cached measurements by name of the GPU or environment; empty if the cache file cannot be read."""
    try:
        return TypeAdapter(dict[str, MeasuredRates]).validate_json(rates_file().read_bytes())
    except (OSError, ValidationError):
        return {}


def predict(run_plan: RunPlan) -> Rates | None:
    """Return the rates of a training run; None without GPUs, or if the FLOPs of the policy are unknown."""
    cfg, costs, env = run_plan.cfg, run_plan.policy_costs, run_plan.env_costs
    if not visible_gpus() or not costs.forward_flops:
        return None
    measurements = read_measured_rates()
    known_rates = _find_slowest_speed(run_plan.gpus, measurements)
    speed = known_rates or DEFAULT_SPEED
    flops, bytes_per_value = (speed.flops, 2) if cfg.model.uses_bf16 else (speed.slow_flops, 4)
    num_processes = cfg.rollout_processes or run_plan.ranks
    batch = max(1, run_plan.num_envs // (num_processes * cfg.rollout.pipeline_stage_num))
    # With a small batch, inference is bound by reading all weights once per pass.
    read_s = costs.act_passes * bytes_per_value * costs.num_parameters / speed.bandwidth
    inference_rate = num_processes * batch / (INFERENCE_FACTOR * max(batch * costs.forward_flops / flops, read_s))
    # Cost in forward passes: three with backward, two for frozen weights, and one more with recomputed layers.
    passes = (2 if costs.num_trained is not None else 3) + cfg.actor.gradient_checkpointing
    pass_s = costs.forward_flops / flops / run_plan.ranks
    assert run_plan.algorithm is not None
    num_rescored = run_plan.algorithm.recomputes_logprob + run_plan.algorithm.needs_reference
    training_rate = 1.0 / (TRAINING_FACTOR * pass_s * passes)
    workers = min(len(run_plan.env_workers), available_cores() * len(run_plan.nodes["env"]))
    chunk = measurements.get(env.chunk_name)
    chunk_s = chunk.rates.get("chunk_s", env.chunk_s) if chunk else env.chunk_s
    simulators = workers / (chunk_s * run_plan.policy.num_action_chunks / ACTIONS_PER_CHUNK) if chunk_s else 0.0
    if env.gpu_s:
        numbers = range(len(run_plan.env_workers))
        gpus = {run_plan.devices.get_env_worker_gpu(number, on_gpu=True) for number in numbers}
        simulators = min(simulators, len(gpus) * len(run_plan.nodes["env"]) / env.gpu_s)
    samples = run_plan.max_samples
    num_updated = samples * cfg.algorithm.update_epoch
    if isinstance(cfg.algorithm, BufferSettings):
        num_updated = run_plan.optimizer_steps_per_training_step * cfg.actor.global_batch_size
    durations = {
        "simulators": samples / simulators if simulators else 0.0,
        "acting": samples / inference_rate,
        "training": num_updated / training_rate + samples * num_rescored * INFERENCE_FACTOR * pass_s,
    }
    # Simulators and policy run in parallel during the rollout; the update starts afterwards.
    seconds = max(durations["simulators"], durations["acting"]) + durations["training"]
    return Rates(
        simulators=simulators,
        inference=inference_rate,
        training=training_rate,
        seconds=seconds,
        bound_by=max(durations, key=durations.__getitem__),
        speed=speed,
        known=known_rates is not None,
        chunk_source=chunk.source if chunk else "",
    )


def find_known_speed(gpu_model: str) -> Speed | None:
    """Return the assumed rates of a GPU by its name in `nvidia-smi`; None if `SPEEDS` has no entry for the name."""
    # Match whole words: L4 does not match L40S.
    return next((entry for entry in SPEEDS if re.search(rf"\b{entry.name}\b", gpu_model)), None)


def _get_measured_speed(gpu_model: str, measurements: Mapping[str, MeasuredRates]) -> Speed | None:
    measurement = measurements.get(gpu_model)
    if measurement is None or not {"flops", "slow_flops", "bandwidth"} <= measurement.rates.keys():
        return None
    rates = {name: measurement.rates[name] for name in ("flops", "slow_flops", "bandwidth")}
    return Speed(gpu_model, **rates, source=measurement.source)


def _find_slowest_speed(gpus: Gpus, measurements: Mapping[str, MeasuredRates]) -> Speed | None:
    """Return the rates of the slowest visible GPU; None if a visible GPU is neither measured nor in the table."""
    speeds = [_get_measured_speed(gpu_model, measurements) or find_known_speed(gpu_model) for gpu_model in gpus.kinds]
    known_speeds = [speed for speed in speeds if speed is not None]
    if len(known_speeds) < len(speeds):
        return None
    return min(known_speeds, key=lambda speed: speed.flops, default=None)
