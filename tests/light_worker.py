"""A worker that imports nothing heavy and does as it is told."""

from __future__ import annotations

import os


class LightWorker:
    def __init__(self, init: str) -> None:
        pass

    def ready(self) -> str:
        return "ready"

    def handle(self, order: str) -> list[str]:
        if order == "exit":
            os._exit(7)
        return [os.environ.get("CUDA_VISIBLE_DEVICES", "all")] if order == "gpus" else [order]

    def close(self) -> None:
        pass
