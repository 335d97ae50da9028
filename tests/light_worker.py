"""A worker without heavy imports that follows scripted commands."""

from __future__ import annotations

import errno
import os


class Word(str):
    """A request without records."""

    def get_read_access(self) -> tuple[()]:
        return ()

    get_write_access = get_read_access


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
        if request == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return [os.environ.get("CUDA_VISIBLE_DEVICES", "all")] if request == "gpus" else [request]

    def close(self) -> None:
        pass
