"""The toy environment with one seeded fault, selected by `env.kwargs.plant`; see `CHECK_OF_FAULT`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from toy_env import ToyFactory, ToySettings, ToySims

from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.simulators import SimStep
from embodyrl.errors import EnvError
from embodyrl.types import ByteArray, ChunkResult, EnvSpec, EpisodeStart, FloatArray, ObservationOut

CHECK_OF_FAULT = {
    "one_text_instead_of_lines": "factory",
    "heavy_import_in_validate": "light",
    "one_count_too_many": "spec",
    "gripper_without_place": "spec",
    "another_spec_when_made": "make",
    "last_state_missing": "reset",
    "nan_in_state": "observe",
    "row_not_written": "observe",
    "wrong_instruction": "instruction",
    "unseeded_reset": "reset_repeats",
    "reset_id_ignored": "reset_ids_differ",
    "reward_in_float64": "step",
    "reward_is_nan": "step",
    "after_step_forgotten": "step",
    "both_flags": "flags",
    "valid_after_the_end": "flags",
    "time_limit_ignored": "time_limit",
    "goes_on_after_the_end": "over",
    "terminates_when_told_not_to": "ignore_terminations",
    "memory_of_older_episodes": "repeatable",
    "slots_share_a_world": "independent_envs",
    "floats_as_pixels": "image_range",
    "channels_first": "render",
    "upside_down": "render",
    "rendering_moves_things": "render",
    "expert_out_of_range": "expert",
    "expert_never_succeeds": "expert",
    "expert_reports_something_else": "expert_replays",
    "second_close_fails": "close",
}
"""Check that must detect each seeded fault."""


class FaultySims(ToySims):
    def __init__(self, spec: EnvSpec, kwargs: Mapping[str, Any]) -> None:
        super().__init__(spec, kwargs)
        self.plant = kwargs["plant"]
        self.steps = 0
        self.resets = 0
        self.closed = False

    def reset_env(self, env_index: int, reset_id: int, seed: int) -> None:
        if self.plant == "slots_share_a_world":
            env_index = 0
        super().reset_env(env_index, reset_id, seed)
        state = self.spec.task_of(reset_id)[1]
        if self.plant == "last_state_missing" and state == 3:
            raise KeyError(reset_id)
        if self.plant == "unseeded_reset":
            self.resets += 1
            self._position[env_index] += 0.02 * self.resets  # never the same twice, as a random shift might be
        if self.plant == "reset_id_ignored":
            self._position[env_index] -= 0.1 * state

    def step_env(self, env_index: int, action: FloatArray) -> SimStep:
        if self.plant == "slots_share_a_world":
            env_index = 0
        self.steps += 1
        if self.plant == "memory_of_older_episodes":
            action = action * (1.0 + 0.01 * self.steps)
        step = super().step_env(env_index, action)
        return step._replace(reward=float("nan")) if self.plant == "reward_is_nan" else step

    def observe_env(self, env_index: int, out: ObservationOut) -> None:
        if self.plant == "slots_share_a_world":
            env_index = 0
        if self.plant == "row_not_written":
            kept = out.images[:, -1].copy()
            super().observe_env(env_index, out)
            out.images[:, -1] = kept
            return
        super().observe_env(env_index, out)
        if self.plant == "nan_in_state":
            out.state[0] = np.nan
        if self.plant == "floats_as_pixels":
            out.images[...] = (out.images / 255.0).astype(np.uint8)

    def expert(self, env_index: int) -> FloatArray:
        factor = {"expert_out_of_range": 3.0, "expert_never_succeeds": -1.0}.get(self.plant, 1.0)
        return super().expert(env_index) * np.float32(factor)

    def render(self, env_index: int) -> ByteArray:
        frame = super().render(env_index)
        if self.plant == "rendering_moves_things":
            self._position[env_index] += 0.5
        return {"channels_first": frame.transpose(2, 0, 1), "upside_down": frame[::-1]}.get(self.plant, frame)

    def close(self) -> None:
        if self.closed and self.plant == "second_close_fails":
            raise RuntimeError("already closed")
        self.closed = True


class FaultyEnv(ChunkedEnv):
    def __init__(self, sims: FaultySims, num_envs: int) -> None:
        super().__init__(sims, num_envs, use_rel_reward=True, reward_coef=1.0)
        self.plant = sims.plant
        if self.plant == "another_spec_when_made":
            self.spec = replace(self.spec, max_episode_steps=self.spec.max_episode_steps + 1)

    def reset(self, env_indices: Sequence[int], starts: Sequence[EpisodeStart]) -> None:
        if self.plant == "time_limit_ignored":
            starts = [replace(start, max_episode_steps=1000) for start in starts]
        if self.plant == "terminates_when_told_not_to":
            starts = [replace(start, ignore_terminations=False) for start in starts]
        super().reset(env_indices, starts)

    def instruction(self, env_index: int) -> str:
        return self.spec.tasks[0] if self.plant == "wrong_instruction" else super().instruction(env_index)

    def step_chunk(self, env_indices, actions, *, after_step=None) -> ChunkResult:
        if self.plant == "after_step_forgotten":
            after_step = None
        try:
            result = super().step_chunk(env_indices, actions, after_step=after_step)
        except EnvError:
            if self.plant != "goes_on_after_the_end":
                raise
            nothing = np.zeros(actions.shape[:2], np.bool_)
            zero = nothing.astype(np.float32)
            return ChunkResult(reward=zero, terminated=nothing, truncated=nothing, valid=nothing, success=nothing)
        if self.plant == "reward_in_float64":
            result = replace(result, reward=result.reward.astype(np.float64))
        if self.plant == "both_flags":
            result = replace(result, truncated=result.truncated | result.terminated)
        if self.plant == "valid_after_the_end":
            result = replace(result, valid=np.ones_like(result.valid))
        return result

    def expert_chunk(self, env_indices, num_actions, *, noise, executed=None, after_step=None):
        clean, result = super().expert_chunk(
            env_indices, num_actions, noise=noise, executed=executed, after_step=after_step
        )
        return clean * (0.9 if self.plant == "expert_reports_something_else" else 1.0), result


class FaultyFactory(ToyFactory):
    def validate(self, cfg: ToySettings) -> list[str]:
        if cfg.kwargs["plant"] == "heavy_import_in_validate":
            import gymnasium  # noqa: F401
        if cfg.kwargs["plant"] == "one_text_instead_of_lines":
            return "colors are missing"  # type: ignore[return-value]
        return []

    def spec(self, cfg: ToySettings, context: EnvContext) -> EnvSpec:
        spec = super().spec(cfg, context)
        if cfg.kwargs["plant"] == "one_count_too_many":
            spec = replace(spec, states_per_task=(*spec.states_per_task, 4))
        if cfg.kwargs["plant"] == "gripper_without_place":
            assert spec.action.gripper is not None
            spec = replace(spec, action=replace(spec.action, gripper=replace(spec.action.gripper, index=7)))
        return spec

    def make(self, cfg: ToySettings, context: EnvContext) -> ChunkedEnv:
        return FaultyEnv(FaultySims(self.spec(cfg, context), cfg.kwargs), context.num_envs)


FACTORY = FaultyFactory()
