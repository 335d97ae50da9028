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

Choice = Callable[[IntArray, int, IntArray], FloatArray]
"""Function that returns actions [n, A]. Arguments: rows [n] of the chunk array, step k in the chunk, and slots [n]."""

_EMPTY, _RUNNING, _OVER = 0, 1, 2
"""Phases of a slot: no episode, running episode, ended episode."""


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
        num_slots: int,
        *,
        use_rel_reward: bool,
        reward_coef: float,
        reward: StepRewardSettings | None = None,
    ) -> None:
        self._own = StepReward(reward) if reward is not None and reward.path is not None else None
        spec = replace(sims.spec, reward=replace(sims.spec.reward, factor=reward_coef))
        self.spec = self._own.declare(spec) if self._own else spec
        self.task_limit = sims.task_limit
        self._relative, self._coef = use_rel_reward, reward_coef
        self._sims = sims
        self._phase = np.full(num_slots, _EMPTY, np.int8)
        self._reset_id, self._seed, self._steps, self._limit = (np.zeros(num_slots, np.int64) for _ in range(4))
        self._ignores, self._reward_failed = np.zeros((2, num_slots), np.bool_)
        self._last_reward = np.zeros(num_slots, np.float64)
        self._final: dict[int, ObservationOut] = {}
        """Final observation by truncated slot; copied, because a batched simulator may step the slot again."""

    def reset(self, slots: Sequence[int], starts: Sequence[EpisodeStart]) -> None:
        """Start an episode in each slot.

        Raises:
            EnvError: the reset id of a start is unknown, or its time limit is below 1.
        """
        self._check_starts(starts)
        rows = np.array(slots, np.int64)
        # Set before the simulator is called: after a failed reset there is no episode.
        self._phase[rows] = _EMPTY
        self._reset_id[rows] = [start.reset_id for start in starts]
        self._seed[rows] = [start.seed for start in starts]
        self._limit[rows] = [start.max_episode_steps for start in starts]
        self._ignores[rows], self._reward_failed[rows] = [start.ignore_terminations for start in starts], False
        self._begin(rows)

    def solved_at_reset(self, slots: Sequence[int]) -> list[int]:
        """Return the slots whose goal was already reached at the start of the episode (see `ReportsSolvedStarts`)."""
        return [slot for slot in slots if slot in self._sims.solved]

    def _begin(self, slots: IntArray) -> None:
        self._steps[slots], self._last_reward[slots] = 0, 0.0
        try:
            self._sims.reset(slots, self._reset_id[slots], self._seed[slots])
        except Exception as error:
            self._name_slots(error, slots)
            raise
        self._phase[slots] = _RUNNING
        for slot in slots.tolist() if self._final else ():
            self._final.pop(slot, None)

    def step_chunk(
        self, slots: Sequence[int], actions: FloatArray, *, after_step: AfterStep | None = None
    ) -> ChunkResult:
        """Execute a chunk of actions `[n, K, A]` in the given slots; all result arrays are `[n, K]`.

        Raises:
            EnvError: an action has the wrong shape or is not finite (no action was executed), a slot has no running
                episode, or the simulator returned a non-finite reward.
        """
        rows = np.array(slots, np.int64)
        self._require_running(rows)
        self._check_actions(slots, actions)
        return self._run(rows, actions.shape[1], lambda at, k, _: actions[at, k], after_step)

    def expert_chunk(
        self,
        slots: Sequence[int],
        num_actions: int,
        *,
        noise: float,
        instead: FloatArray | None = None,
        after_step: AfterStep | None = None,
    ) -> tuple[FloatArray, ChunkResult]:
        """Execute actions of the scripted expert (see `Env.expert_chunk`)."""
        rows = np.array(slots, np.int64)
        for slot in slots:
            if self._task(slot) not in self.spec.expert.tasks:
                raise EnvError(
                    f"{self._where(slot)}: this task has no scripted expert. Set env.train.task_ids and "
                    f"env.eval.task_ids to tasks with an expert: {list(self.spec.expert.tasks)}."
                )
        self._require_running(rows)
        if instead is not None:
            self._check_actions(slots, instead)
        clean = np.zeros((len(slots), num_actions, self.spec.action.dim), np.float32)

        def choose(at: IntArray, k: int, acting: IntArray) -> FloatArray:
            for row, slot in zip(at.tolist(), acting.tolist(), strict=True):
                clean[row, k] = self._sims.expert(slot)
            if instead is not None:
                return instead[at, k]
            spec, seed, step = self.spec.action, self._seed[acting].tolist(), self._steps[acting].tolist()
            return np.stack([add_noise(spec, *each, noise) for each in zip(clean[at, k], seed, step, strict=True)])

        return clean, self._run(rows, num_actions, choose, after_step)

    def _run(self, slots: IntArray, num_actions: int, choose: Choice, after_step: AfterStep | None) -> ChunkResult:
        result = ChunkResult.empty(len(slots), num_actions, parts=len(self.spec.reward.components))
        rows = np.arange(len(slots))
        for together in rows[:, None] if self._sims.sequential else (rows,):
            self._run_together(result, together, slots, choose, after_step)
        if self.spec.simulator.lockstep:
            # Episodes that wait for their first action were stepped, too; they restart from the same initial state.
            waiting = (self._phase == _RUNNING) & (self._steps == 0)
            waiting[slots] = False
            if waiting.any():
                self._begin(np.flatnonzero(waiting))
        return result

    def _run_together(
        self, result: ChunkResult, rows: IntArray, slots: IntArray, choose: Choice, after_step: AfterStep | None
    ) -> None:
        """Execute a chunk in several slots together, one step at a time, and write the results into `rows`."""
        cut: list[int] = []
        for k in range(result.valid.shape[1]):
            running = rows[self._phase[slots[rows]] == _RUNNING]
            if not running.size:
                return
            # Save the observations of slots that were truncated in the last step before the batch is stepped again.
            self._final.update((slot, self._look(slot)) for slot in cut)
            acting = slots[running]
            actions = choose(running, k, acting)
            try:
                step = self._sims.step(acting, actions)
            except Exception as error:
                self._name_slots(error, acting)
                raise
            self._record(result, running, k, acting, actions, step)
            if after_step is not None:
                for row, slot in zip(running.tolist(), acting.tolist(), strict=True):
                    after_step(slot, bool(result.success[row, k]))
            if self.spec.simulator.lockstep:
                cut = acting[result.truncated[running, k]].tolist()

    def _record(
        self, result: ChunkResult, rows: IntArray, k: int, slots: IntArray, actions: FloatArray, step: SimSteps
    ) -> None:
        """Write the results of step k of the chunk into `rows` and column k of the result arrays."""
        reward = np.asarray(step.reward, np.float64)
        for name in ("reward", "terminated", "success", "truncated"):
            if (shape := np.shape(getattr(step, name))) != slots.shape:
                raise EnvError(f"env '{self.spec.name}': step returned {name} of shape {shape}, not {slots.shape}.")
        if not np.isfinite(reward).all():
            bad = int(np.flatnonzero(~np.isfinite(reward))[0])
            raise self._diverged(int(slots[bad]), float(reward[bad]))
        self._steps[slots] += 1
        earned = reward - self._last_reward[slots] if self._relative else reward
        self._last_reward[slots] = reward
        # A goal that is reached in the last allowed step terminates the episode, without bootstrapping.
        ended = np.asarray(step.terminated, np.bool_) & ~self._ignores[slots]
        cut = (np.asarray(step.truncated, np.bool_) | (self._steps[slots] >= self._limit[slots])) & ~ended
        self._phase[slots[ended | cut]] = _OVER
        result.valid[rows, k] = True
        result.success[rows, k] = step.success
        result.terminated[rows, k], result.truncated[rows, k] = ended, cut
        if self._own is not None:
            earned = self._own_rewards(self._own, result, rows, k, slots, actions, earned)
        result.reward[rows, k] = self._coef * earned

    def _own_rewards(
        self,
        own: StepReward,
        result: ChunkResult,
        rows: IntArray,
        k: int,
        slots: IntArray,
        actions: FloatArray,
        simulated: DoubleArray,
    ) -> DoubleArray:
        """Return the rewards [n] of the user's reward function; `simulated` [n] are the simulator's rewards."""
        earned = np.zeros(len(slots))
        assert result.components is not None
        for place, (row, slot) in enumerate(zip(rows.tolist(), slots.tolist(), strict=True)):
            reset_id = int(self._reset_id[slot])
            step = RewardStep(
                slot=slot,
                step=int(self._steps[slot]),
                reset_id=reset_id,
                task_id=self._task(slot),
                instruction=self.instruction(slot),
                action=actions[place],
                reward=float(self._last_reward[slot]),
                success=bool(result.success[row, k]),
                terminated=bool(result.terminated[row, k]),
                truncated=bool(result.truncated[row, k]),
                look=lambda slot=slot: self._look(slot),
                ask=lambda slot=slot: self._sims.info(slot),
            )
            parts, problem = own.parts(step, float(simulated[place]))
            result.components[row] += parts
            earned[place] = own.total(parts)
            if problem is not None and not self._reward_failed[slot]:  # reported once per episode
                self._reward_failed[slot] = True
                result.reward_errors[slot] = f"{self._where(slot)}: {problem}"
        return earned

    def observe(self, slots: Sequence[int], images: ByteArray, state: FloatArray, rows: IntArray | None = None) -> None:
        """Write the current observations of the slots, including slots whose episode has ended (see `Env.observe`)."""
        chosen = np.array(slots, np.int64)
        rows = np.arange(len(slots)) if rows is None else rows
        self._require_begun(chosen)
        if self._final:
            kept = np.array([slot in self._final for slot in slots])
            for slot, row in zip(chosen[kept].tolist(), rows[kept].tolist(), strict=True):
                images[row], state[row] = self._final[slot].images, self._final[slot].state
            chosen, rows = chosen[~kept], rows[~kept]
        if len(chosen):
            try:
                self._sims.observe(chosen, images, state, rows)
            except Exception as error:
                self._name_slots(error, chosen)
                raise

    def _look(self, slot: int) -> ObservationOut:
        """Return a slot's observation in newly allocated arrays."""
        images = np.zeros((1, len(self.spec.cameras.names), *self.spec.cameras.size, 3), np.uint8)
        state = np.zeros((1, self.spec.state_dim), np.float32)
        self._sims.observe(np.array([slot]), images, state, np.array([0]))
        return ObservationOut(images=images[0], state=state[0])

    def render(self, slot: int) -> np.ndarray:
        """Return an upright RGB frame [H, W, 3] uint8 of the slot."""
        self._require_begun(np.array([slot]))
        return self._sims.render(slot)

    def save(self, slot: int) -> tuple[int, float, Any]:
        """Return a copy of the state of the slot's episode (see `SavesState`)."""
        return self._position(slot)[1], float(self._last_reward[slot]), self._sims.save(slot)

    def load(self, slot: int, state: tuple[int, float, Any]) -> None:
        """Restore a saved state of the slot's episode."""
        self._require_begun(np.array([slot]))
        self._steps[slot], self._last_reward[slot], saved = state
        self._sims.load(slot, saved)
        self._phase[slot] = _RUNNING
        self._final.pop(slot, None)

    def instruction(self, slot: int) -> str:
        """Return the language instruction of the slot's current episode."""
        reset_id = self._position(slot)[0]
        own = self._sims.instruction(slot)
        return instruction_for(self.spec, reset_id) if own is None else own

    def close(self) -> None:
        """Free the simulators; idempotent."""
        self._sims.close()

    def _position(self, slot: int) -> tuple[int, int]:
        """Return the reset id of the slot's episode and its number of executed steps."""
        if self._phase[slot] == _EMPTY:
            self._require_begun(np.array([slot]))
        return int(self._reset_id[slot]), int(self._steps[slot])

    def _task(self, slot: int) -> int:
        return self.spec.task_of(self._position(slot)[0])[0]

    def _where(self, slot: int) -> str:
        """Format the slot, task, initial state and step for an error message."""
        reset_id, steps = int(self._reset_id[slot]), int(self._steps[slot])
        task, state = self.spec.task_of(reset_id)
        return (
            f"env '{self.spec.name}', slot {slot}, task {task} ('{self.spec.tasks[task]}'), initial state {state}, "
            f"step {steps}"
        )

    def _name_slots(self, error: Exception, slots: IntArray) -> None:
        """Add a note with the slots and their episodes to an error of the simulator."""
        if (slot := self._sims.current_slot) is not None:
            error.add_note(self._where(slot))
        else:
            ids = dict(zip(slots.tolist(), self._reset_id[slots].tolist(), strict=True))
            error.add_note(f"env '{self.spec.name}', slots and their reset ids {ids}")

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

    def _check_actions(self, slots: Sequence[int], actions: FloatArray) -> None:
        good = actions.ndim == 3 and actions.shape[0] == len(slots) and actions.shape[2] == self.spec.action.dim
        if not good or actions.shape[1] == 0:
            raise EnvError(
                f"env '{self.spec.name}', slots {list(slots)} on tasks {[self._task(s) for s in slots]}: actions have "
                f"shape {tuple(actions.shape)}, expected ({len(slots)}, K >= 1, {self.spec.action.dim}). "
                "Check model.action_dim and the policy's action head."
            )
        if not np.isfinite(actions).all():
            row, k, dim = (int(i) for i in np.argwhere(~np.isfinite(actions))[0])
            raise EnvError(
                f"{self._where(slots[row])}: action {k} of the chunk is {actions[row, k, dim]} in dimension {dim}, "
                "expected finite numbers. Likely cause: the policy's weights or action statistics are not finite."
            )

    def _require_begun(self, slots: IntArray) -> None:
        if (idle := slots[self._phase[slots] == _EMPTY]).size:
            raise EnvError(
                f"env '{self.spec.name}', slot {idle[0]}: there is no episode; call reset for this slot first."
            )

    def _require_running(self, slots: IntArray) -> None:
        self._require_begun(slots)
        if (over := slots[self._phase[slots] == _OVER]).size:
            raise EnvError(f"{self._where(int(over[0]))}: the episode has ended. Reset the slot before step_chunk.")

    def _diverged(self, slot: int, reward: float) -> EnvError:
        return EnvError(
            f"{self._where(slot)}: the simulator returned reward {reward}, expected a finite number. "
            "Likely cause: the physics diverged, or the environment's reward is wrong. The episode cannot be used."
        )
