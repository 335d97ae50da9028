"""A worker without heavy imports that follows scripted commands."""

from __future__ import annotations

import os

from embodyrl.channels.messages import EnvReport, Request


class Word(str):
    """A request without records."""

    def reads(self) -> tuple[()]:
        return ()

    writes = reads


class LightWorker:
    def __init__(self, init: str) -> None:
        pass

    def ready(self) -> str:
        return "ready"

    def handle(self, request: str) -> list[str]:
        if request == "exit":
            os._exit(7)
        if request == "abort":
            os.abort()
        return [os.environ.get("CUDA_VISIBLE_DEVICES", "all")] if request == "gpus" else [request]

    def close(self) -> None:
        pass


class LyingWorker(LightWorker):
    """A worker that repeats the report of the previous request."""

    def handle(self, request: Request) -> list[EnvReport]:
        return [EnvReport(sequence=request.sequence - 1, stage=0, sim_s=0.0, render_s=0.0, reset_s=0.0)]
