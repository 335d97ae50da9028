"""Episode logic for simulators: action chunks, time limits, terminations and rewards."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from embodyrl.envs.protocol import AfterStep, instruction_for
from embodyrl.envs.reward import RewardStep, StepReward, StepRewardSettings
from embodyrl.envs.simulators import SimSteps, Simulators
from embodyrl.errors import EnvError
from embodyrl.specs import ActionSpec
from embodyrl.types import ByteArray, ChunkResult, DoubleArray, EpisodeStart, FloatArray, IntArray, ObservationOut

ActionFunction = Callable[[IntArray, int, IntArray], FloatArray]
"""Function that returns actions [n, A]. Arguments: rows [n] of the chunk array, step in the chunk, environments [n]."""

_NO_EPISODE, _RUNNING, _ENDED = 0, 1, 2
"""Phases of an environment: no episode, running episode, ended episode."""


def add_noise(spec: ActionSpec, action: FloatArray, seed: int, step: int, scale: float) -> FloatArray:
    """Return the expert's action [A] with Gaussian noise, seeded by the episode and its step, within the bounds."""
    noise = np.random.default_rng([seed, step]).normal(0.0, scale, spec.dim)
    if spec.gripper is not None:
        noise[spec.gripper.index] = 0.0
    return np.clip(action + noise, *spec.bounds).astype(np.float32)


class ChunkedEnv:
    """Environment (`Env`) that runs episodes in `Simulators` and executes action chunks.

    An episode is *terminated* when the simulator reports the end of the task, unless the episode ignores terminations.
    It is *truncated* when it reaches `max_episode_steps` or the simulator's own limit; it is never both. Actions of a
    chunk after the end of the episode are not executed: their reward is 0 and `valid` is False.

    The reward of step t is `coef * (R_t - R_{t-1})` with `R_{-1} = 0` if `use_rel_reward`, else `coef * R_t`, where R
    is the simulator's reward; the relative rewards of an episode therefore sum to `coef * R_last`. A user's `reward`
    function replaces this reward or is added to it, also multiplied by `coef`.
    """

    def __init__(
        self,
        sims: Simulators,
        num_envs: int,
        *,
        use_rel_reward: bool,
        reward_coef: float,
        reward: StepRewardSettings | None = None,
    ) -> None:
        self._step_reward = StepReward(reward) if reward is not None and reward.path is not None else None
        spec = replace(sims.spec, reward=replace(sims.spec.reward, factor=reward_coef))
        self.spec = self._step_reward.add_to_spec(spec) if self._step_reward else spec
        self.task_limit = sims.task_limit
        self._uses_relative_reward, self._reward_coef = use_rel_reward, reward_coef
        self._sims = sims
        self._phase = np.full(num_envs, _NO_EPISODE, np.int8)
        self._reset_id, self._seed, self._steps, self._max_steps = (np.zeros(num_envs, np.int64) for _ in range(4))
        self._ignores_terminations, self._reward_failed = np.zeros((2, num_envs), np.bool_)
        self._last_reward = np.zeros(num_envs, np.float64)
        self._final_observations: dict[int, ObservationOut] = {}
        """Final observation by truncated environment; copied, because a batched simulator may step it again."""

    def reset(self, env_indices: Sequence[int], starts: Sequence[EpisodeStart]) -> None:
        """Start an episode in each environment.

        Raises:
            EnvError: the reset id of a start is unknown, or its time limit is below 1.
        """
        self._check_starts(starts)
        rows = np.array(env_indices, np.int64)
        # Set before the simulator is called: after a failed reset there is no episode.
        self._phase[rows] = _NO_EPISODE
        self._reset_id[rows] = [start.reset_id for start in starts]
        self._seed[rows] = [start.seed for start in starts]
        self._max_steps[rows] = [start.max_episode_steps for start in starts]
        self._ignores_terminations[rows] = [start.ignore_terminations for start in starts]
        self._reward_failed[rows] = False
        self._start_episodes(rows)

    def solved_at_reset(self, env_indices: Sequence[int]) -> list[int]:
        """Return the environments whose goal was reached at the start of the episode (see `ReportsSolvedStarts`)."""
        return [env_index for env_index in env_indices if env_index in self._sims.solved]

    def _start_episodes(self, env_indices: IntArray) -> None:
        self._steps[env_indices], self._last_reward[env_indices] = 0, 0.0
        try:
            self._sims.reset(env_indices, self._reset_id[env_indices], self._seed[env_indices])
        except Exception as error:
            self._add_error_note(error, env_indices)
            raise
        self._phase[env_indices] = _RUNNING
        for env_index in env_indices.tolist() if self._final_observations else ():
            self._final_observations.pop(env_index, None)

    def step_chunk(
        self, env_indices: Sequence[int], actions: FloatArray, *, after_step: AfterStep | None = None
    ) -> ChunkResult:
        """Execute a chunk of actions `[n, K, A]` in the given environments; all result arrays are `[n, K]`.

        Raises:
            EnvError: an action has the wrong shape or is not finite (no action was executed), an environment has no
                running episode, or the simulator returned a non-finite reward.
        """
        rows = np.array(env_indices, np.int64)
        self._require_running_episode(rows)
        self._check_actions(env_indices, actions)
        return self._run(rows, actions.shape[1], lambda row_indices, index, _: actions[row_indices, index], after_step)

    def expert_chunk(
        self,
        env_indices: Sequence[int],
        num_actions: int,
        *,
        noise: float,
        executed: FloatArray | None = None,
        after_step: AfterStep | None = None,
    ) -> tuple[FloatArray, ChunkResult]:
        """Execute actions of the scripted expert (see `Env.expert_chunk`)."""
        rows = np.array(env_indices, np.int64)
        for env_index in env_indices:
            if self._get_task(env_index) not in self.spec.expert.tasks:
                raise EnvError(
                    f"{self._describe_position(env_index)}: this task has no scripted expert. Set env.train.task_ids "
                    "and "
                    f"env.eval.task_ids to tasks with an expert: {list(self.spec.expert.tasks)}."
                )
        self._require_running_episode(rows)
        if executed is not None:
            self._check_actions(env_indices, executed)
        expert_actions = np.zeros((len(env_indices), num_actions, self.spec.action.dim), np.float32)

        def choose_actions(row_indices: IntArray, index: int, active_envs: IntArray) -> FloatArray:
            for row, env_index in zip(row_indices.tolist(), active_envs.tolist(), strict=True):
                expert_actions[row, index] = self._sims.expert(env_index)
            if executed is not None:
                return executed[row_indices, index]
            spec, seed, step = self.spec.action, self._seed[active_envs].tolist(), self._steps[active_envs].tolist()
            return np.stack(
                [
                    add_noise(spec, *arguments, noise)
                    for arguments in zip(expert_actions[row_indices, index], seed, step, strict=True)
                ]
            )

        return expert_actions, self._run(rows, num_actions, choose_actions, after_step)

    def _run(
        self, env_indices: IntArray, num_actions: int, choose_actions: ActionFunction, after_step: AfterStep | None
    ) -> ChunkResult:
        result = ChunkResult.empty(len(env_indices), num_actions, num_components=len(self.spec.reward.components))
        rows = np.arange(len(env_indices))
        for group in rows[:, None] if self._sims.sequential else (rows,):
            self._run_envs(result, group, env_indices, choose_actions, after_step)
        if self.spec.simulator.lockstep:
            # Episodes that wait for their first action were stepped, too; they restart from the same initial state.
            unstarted = (self._phase == _RUNNING) & (self._steps == 0)
            unstarted[env_indices] = False
            if unstarted.any():
                self._start_episodes(np.flatnonzero(unstarted))
        return result

    def _run_envs(
        self,
        result: ChunkResult,
        rows: IntArray,
        env_indices: IntArray,
        choose_actions: ActionFunction,
        after_step: AfterStep | None,
    ) -> None:
        """Execute a chunk in several environments together, one step at a time, and write the results into `rows`."""
        truncated_envs: list[int] = []
        for index in range(result.valid.shape[1]):
            running = rows[self._phase[env_indices[rows]] == _RUNNING]
            if not running.size:
                return
            # Save the observations of environments that were truncated in the last step before the batch is stepped
            # again.
            self._final_observations.update(
                (env_index, self._read_observation(env_index)) for env_index in truncated_envs
            )
            active_envs = env_indices[running]
            actions = choose_actions(running, index, active_envs)
            try:
                step = self._sims.step(active_envs, actions)
            except Exception as error:
                self._add_error_note(error, active_envs)
                raise
            self._record_step(result, running, index, active_envs, actions, step)
            if after_step is not None:
                for row, env_index in zip(running.tolist(), active_envs.tolist(), strict=True):
                    after_step(env_index, bool(result.success[row, index]))
            if self.spec.simulator.lockstep:
                truncated_envs = active_envs[result.truncated[running, index]].tolist()

    def _record_step(
        self,
        result: ChunkResult,
        rows: IntArray,
        index: int,
        env_indices: IntArray,
        actions: FloatArray,
        step: SimSteps,
    ) -> None:
        """Write the results of step k of the chunk into `rows` and column k of the result arrays."""
        reward = np.asarray(step.reward, np.float64)
        for name in ("reward", "terminated", "success", "truncated"):
            if (shape := np.shape(getattr(step, name))) != env_indices.shape:
                raise EnvError(
                    f"env '{self.spec.name}': step returned {name} of shape {shape}, expected {env_indices.shape}."
                )
        if not np.isfinite(reward).all():
            bad_index = int(np.flatnonzero(~np.isfinite(reward))[0])
            raise self._non_finite_error(int(env_indices[bad_index]), float(reward[bad_index]))
        self._steps[env_indices] += 1
        rewards = reward - self._last_reward[env_indices] if self._uses_relative_reward else reward
        self._last_reward[env_indices] = reward
        # A goal that is reached in the last allowed step terminates the episode, without bootstrapping.
        terminated = np.asarray(step.terminated, np.bool_) & ~self._ignores_terminations[env_indices]
        truncated = (
            np.asarray(step.truncated, np.bool_) | (self._steps[env_indices] >= self._max_steps[env_indices])
        ) & ~terminated
        self._phase[env_indices[terminated | truncated]] = _ENDED
        result.valid[rows, index] = True
        result.success[rows, index] = step.success
        result.terminated[rows, index], result.truncated[rows, index] = terminated, truncated
        if self._step_reward is not None:
            rewards = self._compute_step_rewards(self._step_reward, result, rows, index, env_indices, actions, rewards)
        result.reward[rows, index] = self._reward_coef * rewards

    def _compute_step_rewards(
        self,
        step_reward: StepReward,
        result: ChunkResult,
        rows: IntArray,
        index: int,
        env_indices: IntArray,
        actions: FloatArray,
        simulator_rewards: DoubleArray,
    ) -> DoubleArray:
        """Return the rewards [n] of the user's reward function; `simulator_rewards` [n] are the simulator's rewards."""
        rewards = np.zeros(len(env_indices))
        assert result.components is not None
        for position, (row, env_index) in enumerate(zip(rows.tolist(), env_indices.tolist(), strict=True)):
            reset_id = int(self._reset_id[env_index])
            step = RewardStep(
                env_index=env_index,
                step=int(self._steps[env_index]),
                reset_id=reset_id,
                task_id=self._get_task(env_index),
                instruction=self.instruction(env_index),
                action=actions[position],
                reward=float(self._last_reward[env_index]),
                success=bool(result.success[row, index]),
                terminated=bool(result.terminated[row, index]),
                truncated=bool(result.truncated[row, index]),
                look=lambda env_index=env_index: self._read_observation(env_index),
                ask=lambda env_index=env_index: self._sims.info(env_index),
            )
            parts, problem = step_reward.compute_components(step, float(simulator_rewards[position]))
            result.components[row] += parts
            rewards[position] = step_reward.compute_total(parts)
            if problem is not None and not self._reward_failed[env_index]:  # reported once per episode
                self._reward_failed[env_index] = True
                result.reward_errors[env_index] = f"{self._describe_position(env_index)}: {problem}"
        return rewards

    def observe(
        self, env_indices: Sequence[int], images: ByteArray, state: FloatArray, rows: IntArray | None = None
    ) -> None:
        """Write the current observations, also of environments whose episode has ended (see `Env.observe`)."""
        env_index_array = np.array(env_indices, np.int64)
        rows = np.arange(len(env_indices)) if rows is None else rows
        self._require_episode(env_index_array)
        if self._final_observations:
            is_final = np.array([env_index in self._final_observations for env_index in env_indices])
            for env_index, row in zip(env_index_array[is_final].tolist(), rows[is_final].tolist(), strict=True):
                images[row], state[row] = (
                    self._final_observations[env_index].images,
                    self._final_observations[env_index].state,
                )
            env_index_array, rows = env_index_array[~is_final], rows[~is_final]
        if len(env_index_array):
            try:
                self._sims.observe(env_index_array, images, state, rows)
            except Exception as error:
                self._add_error_note(error, env_index_array)
                raise

    def _read_observation(self, env_index: int) -> ObservationOut:
        """Return an environment's observation in newly allocated arrays."""
        images = np.zeros((1, len(self.spec.cameras.names), *self.spec.cameras.size, 3), np.uint8)
        state = np.zeros((1, self.spec.state_dim), np.float32)
        self._sims.observe(np.array([env_index]), images, state, np.array([0]))
        return ObservationOut(images=images[0], state=state[0])

    def render(self, env_index: int) -> np.ndarray:
        """Return an upright RGB frame [H, W, 3] uint8 of the environment."""
        self._require_episode(np.array([env_index]))
        return self._sims.render(env_index)

    def save(self, env_index: int) -> tuple[int, float, Any]:
        """Return a copy of the state of the environment's episode (see `SavesState`)."""
        return self._get_position(env_index)[1], float(self._last_reward[env_index]), self._sims.save(env_index)

    def load(self, env_index: int, state: tuple[int, float, Any]) -> None:
        """Restore a saved state of the environment's episode."""
        self._require_episode(np.array([env_index]))
        self._steps[env_index], self._last_reward[env_index], simulator_state = state
        self._sims.load(env_index, simulator_state)
        self._phase[env_index] = _RUNNING
        self._final_observations.pop(env_index, None)

    def instruction(self, env_index: int) -> str:
        """Return the language instruction of the environment's current episode."""
        reset_id = self._get_position(env_index)[0]
        text = self._sims.instruction(env_index)
        return instruction_for(self.spec, reset_id) if text is None else text

    def close(self) -> None:
        """Free the simulators; idempotent."""
        self._sims.close()

    def _get_position(self, env_index: int) -> tuple[int, int]:
        """Return the reset id of the environment's episode and its number of executed steps."""
        if self._phase[env_index] == _NO_EPISODE:
            self._require_episode(np.array([env_index]))
        return int(self._reset_id[env_index]), int(self._steps[env_index])

    def _get_task(self, env_index: int) -> int:
        return self.spec.task_of(self._get_position(env_index)[0])[0]

    def _describe_position(self, env_index: int) -> str:
        """Format the environment, task, initial state and step for an error message."""
        reset_id, steps = int(self._reset_id[env_index]), int(self._steps[env_index])
        task, state = self.spec.task_of(reset_id)
        return (
            f"env '{self.spec.name}', environment {env_index}, task {task} ('{self.spec.tasks[task]}'), initial "
            f"state {state}, "
            f"step {steps}"
        )

    def _add_error_note(self, error: Exception, env_indices: IntArray) -> None:
        """Add a note with the environments and their episodes to an error of the simulator."""
        if (env_index := self._sims.current_env) is not None:
            error.add_note(self._describe_position(env_index))
        else:
            ids = dict(zip(env_indices.tolist(), self._reset_id[env_indices].tolist(), strict=True))
            error.add_note(f"env '{self.spec.name}', environments and their reset ids {ids}")

    def _check_starts(self, starts: Sequence[EpisodeStart]) -> None:
        for start in starts:
            if not 0 <= start.reset_id < self.spec.num_reset_ids:
                raise EnvError(
                    f"env '{self.spec.name}': reset id {start.reset_id} is outside 0..{self.spec.num_reset_ids - 1}."
                )
            if start.max_episode_steps < 1:
                raise EnvError(
                    f"env '{self.spec.name}': max_episode_steps is {start.max_episode_steps}, but must be at least 1."
                )

    def _check_actions(self, env_indices: Sequence[int], actions: FloatArray) -> None:
        has_shape = (
            actions.ndim == 3 and actions.shape[0] == len(env_indices) and actions.shape[2] == self.spec.action.dim
        )
        if not has_shape or actions.shape[1] == 0:
            raise EnvError(
                f"env '{self.spec.name}', environments {list(env_indices)} on tasks "
                f"{[self._get_task(s) for s in env_indices]}: actions "
                f"have shape {tuple(actions.shape)}, expected ({len(env_indices)}, K >= 1, {self.spec.action.dim}). "
                "Check model.action_dim and the policy's action head."
            )
        if not np.isfinite(actions).all():
            row, index, dim = (int(value) for value in np.argwhere(~np.isfinite(actions))[0])
            raise EnvError(
                f"{self._describe_position(env_indices[row])}: action {index} of the chunk is "
                f"{actions[row, index, dim]} in "
                f"dimension {dim}, expected finite numbers. Likely cause: the policy's weights or action statistics "
                "are not finite."
            )

    def _require_episode(self, env_indices: IntArray) -> None:
        if (idle_envs := env_indices[self._phase[env_indices] == _NO_EPISODE]).size:
            raise EnvError(
                f"env '{self.spec.name}', environment {idle_envs[0]}: there is no episode; call reset first."
            )

    def _require_running_episode(self, env_indices: IntArray) -> None:
        self._require_episode(env_indices)
        if (ended_envs := env_indices[self._phase[env_indices] == _ENDED]).size:
            raise EnvError(
                f"{self._describe_position(int(ended_envs[0]))}: the episode has ended. Reset the environment before "
                "step_chunk."
            )

    def _non_finite_error(self, env_index: int, reward: float) -> EnvError:
        return EnvError(
            f"{self._describe_position(env_index)}: the simulator returned reward {reward}, expected a finite number. "
            "Likely cause: the physics diverged, or the environment's reward is wrong. The episode cannot be used."
        )
