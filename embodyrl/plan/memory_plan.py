"""Planned memory of the processes of a run."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory in bytes of each part of a policy process, and of the other processes of its host."""

    weights: int = 0
    """Weights and, if enabled, their moving average."""
    gathered: int = 0
    """Bytes of the full weights that are gathered for rollouts, if the training weights are sharded."""
    reference: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Bytes of the activations of a micro-batch, including the log-probabilities."""
    in_use: int = 0
    """Bytes of the weights of the layers that FSDP gathers at the same time during training."""
    inference_batch: int = 0
    """Bytes of the activations of the largest inference batch."""
    keeps_inference_memory: bool = False
    """True if inference memory stays allocated during training, for example by CUDA graphs."""
    building: int = 0
    """Peak memory of construction: full float32 weights (not yet sharded or cast), or loaded demonstrations."""
    engine: int = 0
    """Minimum GPU memory of the vLLM engine."""
    sleeps: bool = False
    """True if vLLM frees its memory during updates."""
    process: int = 0
    saving: int = 0
    """Host memory of rank 0, in runs with GPUs, for the replay buffer and for gathered weights or optimizer state."""
    offloaded: int = 0
    """Host memory per rank for offloaded weights, gradients and optimizer state (actor.fsdp.cpu_offload)."""
    inference: int = 0
    """Memory of each rollout process, if rollouts run in separate processes."""
    env_worker: int = 0
    driver: int = 0
    """Memory of the process that starts the workers; 0 if the process is also the policy process."""
    env_gpu: int = 0
    """GPU memory of each env worker."""
    replay: int = 0
    """Size of the replay buffer at the end of the run, for off-policy runs without GPUs."""
    arena: int = 0
    checkpoint: int = 0
    """Size of a checkpoint on disk."""
    on_gpu: bool = False
    gradient_sync: str = "micro_batch"
    """Gradient synchronization between ranks: step or micro_batch."""
    engine_memory_fraction: float = 0.0
    """Fraction of a GPU's memory for vLLM."""

    @property
    def policy(self) -> int:
        """Peak memory of one policy process."""
        return sum(self.peak_parts().values())

    def peak_parts(self) -> dict[str, int]:
        """Return the bytes of each part of a policy process's memory at its peak, by name."""
        constant = self._parts("weights", "reference", "replay", "optimizer", "process")
        training = self._parts("gradients", "activations", "in_use", *(() if self.sleeps else ("engine",)))
        inference = self._parts("gathered", "inference_batch", "engine")
        # Gathered weights are freed for training, but the C library does not return the memory.
        update = training if self.on_gpu else self._parts("gathered") | training
        running = max(inference, update, key=lambda parts: sum(parts.values()))
        # CUDA graphs keep the memory in which they were recorded.
        running = inference | training if self.keeps_inference_memory else running
        building = self._parts("building", "process")
        return max(constant | running, building, key=lambda parts: sum(parts.values()))

    def _parts(self, *names: str) -> dict[str, int]:
        return {name: getattr(self, name) for name in names}

    def host(self, ranks: int) -> int:
        """Return the bytes of host memory that policy processes on GPUs need for replay, checkpoints and offloading."""
        return self.saving + self.offloaded * ranks

    def lines(self, ranks: int, env_workers: int) -> list[tuple[str, str]]:
        """Return the lines (label, text) of `--dry-run` about memory."""
        hundredths = {name.replace("_", " "): round(100 * size / GIB) for name, size in self.peak_parts().items()}
        policy = sum(hundredths.values())  # the sum of the printed numbers
        size_text = " + ".join(f"{name} {size / 100:.2f}" for name, size in hundredths.items() if size)
        size_text += "; vLLM sleeps while weights are trained" * self.sleeps
        env, arena = f"{self.env_worker / GIB:.2f} GiB", f"{self.arena / GIB:.2f} GiB shared by all"
        env += f" and {self.env_gpu / GIB:.2f} on a GPU" if self.env_gpu else ""
        driver = f"{self.driver / GIB:.2f} GiB for the driver · " if self.driver else ""
        inference = f"{self.inference / GIB:.2f} GiB for each rollout process · " if self.inference else ""
        if host := self.host(ranks):
            inference += f"{host / GIB:.2f} GiB of the host (checkpoints, offloading) · "
        return [
            ("memory", f"{policy / 100:.2f} GiB for each of {ranks} policy processes at its peak: {size_text}"),
            ("", f"{inference}{env} for each of {env_workers} env workers · {driver}{arena}"),
        ]
