"""LIBERO with the instruction of the next task, which in libero_spatial refers to a bowl at another place."""

from __future__ import annotations

from dataclasses import replace

from embodyrl.envs.libero.factory import LiberoFactory, LiberoSettings
from embodyrl.envs.protocol import EnvContext
from embodyrl.types import EnvSpec


class LiarFactory(LiberoFactory):
    """Factory with the instruction of the next task."""

    def describe(self, cfg: LiberoSettings, context: EnvContext) -> EnvSpec:
        spec = super().describe(cfg, context)
        return replace(spec, tasks=(*spec.tasks[1:], spec.tasks[0]))


FACTORY = LiarFactory()
