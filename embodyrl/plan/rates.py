"""How fast a training run should be on GPUs, and what bounds it, derived before anything starts."""

from dataclasses import dataclass

from embodyrl.devices import visible_gpus
from embodyrl.files import available_cores
from embodyrl.plan.blueprint import Blueprint
from embodyrl.plan.roots import TrainConfig

DEVICE = "an H100"
FLOPS, SLOW_FLOPS, BANDWIDTH = 650e12, 50e12, 2.8e12
"""Assumed of one GPU: large matrix products in bfloat16 and in float32, per second; bytes per second. About two thirds
of the data sheet's dense figure, and five sixths of its bandwidth."""
OVERHEAD = 1.5
"""Time of a pass over the time of its matrix products: metered kernel by kernel on a GPU that is not there."""
CHUNK = 8
"""Actions of the chunk that `EnvSpec.chunk_s` is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What each resource could do alone, per second; 0: not known, or no matter."""

    simulators: float
    """Chunks."""
    acting: float
    """Chunks."""
    training: float
    """Samples."""
    seconds: float
    """Of a training step with all its samples."""
    bound_by: str

    def lines(self, samples: int) -> list[tuple[str, str]]:
        """Name and text, human-readable."""
        simulators = f"{self.simulators:.0f} chunks/s" if self.simulators else "not known"
        return [
            (
                "predicted",
                f"simulators {simulators} · acting {self.acting:.0f} chunks/s · training {self.training:.1f} samples/s "
                f"· {self.seconds:.0f} s for {samples} samples, bound by {self.bound_by}",
            ),
            (
                "",
                f"assumed of each GPU ({DEVICE}): {FLOPS / 1e12:.0f} TFLOP/s in bfloat16, {BANDWIDTH / 1e12:.1f} TB/s, "
                f"{OVERHEAD} times the time of matrix products; nothing of it was measured on a GPU",
            ),
        ]


def predict(blueprint: Blueprint) -> Rates | None:
    """Rates of a training run; None without GPUs, or where the policy says nothing of its FLOPs."""
    cfg, policy, env = blueprint.config(TrainConfig), blueprint.policy, blueprint.env
    if not visible_gpus() or not policy.forward_flops:
        return None
    flops, item = (FLOPS, 2) if cfg.model.half else (SLOW_FLOPS, 4)
    acting = cfg.rollout.acting_processes or blueprint.ranks
    batch = max(1, blueprint.num_slots // (acting * cfg.rollout.pipeline_stage_num))
    # Acting is bound by reading all weights once a pass as long as its batch is small.
    reading = policy.act_passes * item * policy.num_parameters / BANDWIDTH
    act = acting * batch / (OVERHEAD * max(batch * policy.forward_flops / flops, reading))
    # Forward and backward pass: three forward passes, of frozen weights two; one more where layers are recomputed.
    passes = (2 if policy.num_trained is not None else 3) + cfg.actor.gradient_checkpointing
    once = OVERHEAD * policy.forward_flops / flops / blueprint.ranks
    assert blueprint.algorithm is not None
    rescored = blueprint.algorithm.recomputes_logprob + blueprint.algorithm.needs_reference
    train = 1.0 / (once * passes)
    workers = min(len(blueprint.env_workers), available_cores() * len(blueprint.nodes["env"]))
    simulators = workers / (env.chunk_s * policy.num_action_chunks / CHUNK) if env.chunk_s else 0.0
    samples = blueprint.max_samples
    parts = {
        "simulators": samples / simulators if simulators else 0.0,
        "acting": samples / act,
        "training": samples * (cfg.algorithm.update_epoch / train + rescored * once),
    }
    # Simulators and the policy work side by side while the episodes run; the update waits for both.
    seconds = max(parts["simulators"], parts["acting"]) + parts["training"]
    return Rates(
        simulators=simulators, acting=act, training=train, seconds=seconds, bound_by=max(parts, key=parts.__getitem__)
    )
