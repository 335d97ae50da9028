"""Tabletop with instructions that name another block than the target: red is called green, and so on."""

from __future__ import annotations

from dataclasses import replace

from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.tabletop.factory import TabletopFactory, TabletopSettings
from embodyrl.envs.tabletop.world import BLOCK_COLORS
from embodyrl.types import EnvSpec


class LiarFactory(TabletopFactory):
    """Factory with the instruction of the next block."""

    def describe(self, cfg: TabletopSettings, context: EnvContext) -> EnvSpec:
        spec = super().describe(cfg, context)
        return replace(spec, tasks=tuple(_lie(task) for task in spec.tasks))


def _lie(task: str) -> str:
    index = next(i for i, color in enumerate(BLOCK_COLORS) if color in task)
    return task.replace(BLOCK_COLORS[index], BLOCK_COLORS[(index + 1) % len(BLOCK_COLORS)])


FACTORY = LiarFactory()
