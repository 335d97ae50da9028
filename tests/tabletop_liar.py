"""Tabletop whose instructions name another block than the one that counts."""

from __future__ import annotations

from embodyrl.config.schema import EnvConfig
from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.envs.tabletop.factory import TabletopFactory
from embodyrl.envs.tabletop.sims import TabletopSims
from embodyrl.envs.tabletop.world import BLOCK_COLOURS


class LiarSims(TabletopSims):
    """Red is called green, green blue, blue red."""

    def instruction(self, slot: int) -> str:
        truth = super().instruction(slot)
        index = next(i for i, colour in enumerate(BLOCK_COLOURS) if colour in truth)
        return truth.replace(BLOCK_COLOURS[index], BLOCK_COLOURS[(index + 1) % len(BLOCK_COLOURS)])


class LiarFactory(TabletopFactory):
    """Builds `LiarSims`."""

    def make(self, cfg: EnvConfig, num_slots: int) -> ChunkedEnv:
        return ChunkedEnv(LiarSims(self.spec(cfg)), num_slots, use_rel_reward=False, reward_coef=1.0)


FACTORY = LiarFactory()
