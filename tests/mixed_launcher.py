"""A launcher with env workers in real processes and the policy in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toy_runs import toy_words

from embodyrl.cluster.inline import InlineLauncher
from embodyrl.cluster.local import LocalLauncher
from embodyrl.cluster.protocol import ClusterSettings, Event, Launcher
from embodyrl.plan.config import load_config
from embodyrl.plan.schema import Config
from embodyrl.workers.lifecycle import WorkerSpec


class MixedLauncher(Launcher):
    host = "127.0.0.1"

    def __init__(self, log_dir: Path, cluster: ClusterSettings | None = None) -> None:
        self._local, self._inline = LocalLauncher(log_dir, cluster), InlineLauncher(log_dir, cluster)

    def _of(self, worker: str) -> Any:
        return self._local if worker.startswith("env_") else self._inline

    def start(self, spec: WorkerSpec, *, timeout_s: float) -> None:
        self._of(spec.name).start(spec, timeout_s=timeout_s)

    def send(self, worker: str, request: Any, *, timeout_s: float) -> None:
        self._of(worker).send(worker, request, timeout_s=timeout_s)

    def wait(self, timeout_s: float) -> list[Event]:
        events = self._inline.wait(0.0)
        return events + self._local.wait(0.0 if events else timeout_s)

    def interrupt(self) -> None:
        self._inline.interrupt()

    def stop(self, *, grace_s: float = 10.0) -> None:
        self._local.stop(grace_s=grace_s)
        self._inline.stop(grace_s=grace_s)


def mixed_config(folder: Path, *overrides: str, name: str = "run") -> Config:
    """Config of a toy run with real env workers that prints and logs to files."""
    words = ("runner.logger.backends=[console,jsonl]", "launcher.name=mixed_launcher:MixedLauncher", *overrides)
    return load_config("train", toy_words(folder, *words, name=name))
