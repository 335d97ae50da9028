"""Episode semantics over single-step simulators: one place that decides when an episode ends and what it earns."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from embodyrl.envs.protocol import AfterStep, told
from embodyrl.envs.reward import RewardStep, StepReward, StepRewardSettings
from embodyrl.envs.simulators import ArraySimulators, BatchedSimulators, SimStep, SlotSimulators
from embodyrl.errors import EnvError
from embodyrl.types import ChunkResult, EnvSpec, EpisodeStart, FloatArray, ObservationOut

Choice = Callable[[int, int, int], FloatArray]
"""(row, k, slot) -> action [A]"""
Place = tuple[int, int]
"""Row and k of an action in the arrays of a chunk."""


@dataclass(slots=True)
class _Progress:
    """Where the episode of one slot stands."""

    start: EpisodeStart
    steps: int = 0
    last_reward: float = 0.0
    over: bool = False
    judged: bool = True
    """No step's reward is unknown so far."""


class SimEnv(ABC):
    """What environments over simulators share: checks of starts, empty results, the user's reward, messages."""

    _sims: SlotSimulators | ArraySimulators

    def __init__(
        self, spec: EnvSpec, *, use_rel_reward: bool, reward_coef: float, reward: StepRewardSettings | None = None
    ) -> None:
        self._own = StepReward(reward) if reward is not None and reward.path is not None else None
        spec = replace(spec, reward_factor=reward_coef)
        self.spec = self._own.declare(spec) if self._own else spec
        self._relative, self._coef = use_rel_reward, reward_coef

    def render(self, slot: int) -> np.ndarray:
        """Return an upright RGB frame [H, W, 3] uint8 of the slot."""
        return self._sims.render(slot)

    def close(self) -> None:
        """Free the simulators; idempotent."""
        self._sims.close()

    def _check_starts(self, starts: Sequence[EpisodeStart]) -> None:
        for start in starts:
            if not 0 <= start.reset_id < self.spec.num_reset_ids:
                raise EnvError(
                    f"env '{self.spec.name}': reset id {start.reset_id} is outside 0..{self.spec.num_reset_ids - 1}."
                )
            if start.max_episode_steps < 1:
                raise EnvError(f"env '{self.spec.name}': max_episode_steps is {start.max_episode_steps}; at least 1.")

    def _look(self, slot: int) -> ObservationOut:
        """What a slot shows, in memory of its own."""
        shape = (len(self.spec.cameras), *self.spec.image_size, 3)
        seen = ObservationOut(images=np.zeros(shape, np.uint8), state=np.zeros(self.spec.state_dim, np.float32))
        self._observe_into(slot, seen)
        return seen

    @abstractmethod
    def _observe_into(self, slot: int, out: ObservationOut) -> None:
        """Let the simulator write what a slot shows."""

    def _own_reward(
        self,
        own: StepReward,
        result: ChunkResult,
        at: Place,
        slot: int,
        action: FloatArray,
        rewards: tuple[float, float],
    ) -> tuple[float, str | None]:
        """Ask the user's function about the step just noted; returns what it earned, and why it failed.

        Args:
            own: the function.
            result: of the chunk; takes the parts of the reward.
            at: the step's place in it.
            slot: whose step it was.
            action: [A] as executed.
            rewards: the simulator's own, and what is earned without the function.
        """
        reset_id, steps = self._stand(slot)
        step = RewardStep(
            slot=slot,
            step=steps,
            reset_id=reset_id,
            task_id=self._task(slot),
            instruction=told(self.spec, reset_id),
            action=action,
            reward=rewards[0],
            success=bool(result.success[at]),
            terminated=bool(result.terminated[at]),
            truncated=bool(result.truncated[at]),
            look=lambda: self._look(slot),
            ask=lambda: self._sims.info(slot),
        )
        parts, why = own.parts(step, rewards[1])
        assert result.components is not None
        result.components[at[0]] += parts
        return own.total(parts), why

    @abstractmethod
    def _stand(self, slot: int) -> tuple[int, int]:
        """Reset id of the slot's episode, and its steps so far.

        Raises:
            EnvError: it has none.
        """

    def instruction(self, slot: int) -> str:
        """Language instruction of the slot's current episode."""
        return told(self.spec, self._stand(slot)[0])

    def _task(self, slot: int) -> int:
        return self.spec.task_of(self._stand(slot)[0])[0]

    def _where(self, slot: int) -> str:
        """Where something happened, for messages."""
        reset_id, steps = self._stand(slot)
        task, state = self.spec.task_of(reset_id)
        return (
            f"env '{self.spec.name}', slot {slot}, task {task} ('{self.spec.tasks[task]}'), initial state {state}, "
            f"step {steps}"
        )

    def _without_episode(self, slot: int) -> EnvError:
        return EnvError(f"env '{self.spec.name}', slot {slot}: no episode; call reset for this slot first.")

    def _over(self, slot: int) -> EnvError:
        where = self._where(slot)
        return EnvError(f"{where}: the episode is over; step_chunk expects a running one. Reset the slot first.")

    def _diverged(self, slot: int, reward: float) -> EnvError:
        return EnvError(
            f"{self._where(slot)}: the simulator returned reward {reward}, expected a finite number. "
            "Likely the physics diverged or the environment's reward is wrong; the episode cannot be used."
        )

    def _check_actions(self, slots: Sequence[int], actions: FloatArray) -> None:
        good = actions.ndim == 3 and actions.shape[0] == len(slots) and actions.shape[2] == self.spec.action_dim
        if not good or actions.shape[1] == 0:
            raise EnvError(
                f"env '{self.spec.name}', slots {list(slots)} on tasks {[self._task(s) for s in slots]}: actions have "
                f"shape {tuple(actions.shape)}, expected ({len(slots)}, K >= 1, {self.spec.action_dim}). "
                "Check model.action_dim and the policy's action head."
            )
        if not np.isfinite(actions).all():
            row, k, dim = (int(i) for i in np.argwhere(~np.isfinite(actions))[0])
            raise EnvError(
                f"{self._where(slots[row])}: action {k} of the chunk is {actions[row, k, dim]} in dimension {dim}, "
                "expected finite numbers. Likely the policy's weights or its action statistics are not finite."
            )


class ChunkedEnv(SimEnv):
    """An `Env` over `SlotSimulators`.

    An episode ends *terminated* when the simulator says so (unless the episode ignores terminations), else
    *truncated* when it reaches its `max_episode_steps` or the simulator's own limit; never both. Actions of a chunk
    after the end are not executed: their reward is 0 and `valid` is False.

    The reward of step t is `coef * (R_t - R_{t-1})` with `R_{-1} = 0` if `use_rel_reward`, else `coef * R_t`,
    where R is the simulator's reward; the relative rewards of an episode therefore sum to `coef * R_last`. With a
    `reward` of the user's, `coef` times what that one returns takes its place, or is added to it.
    """

    _sims: SlotSimulators

    def __init__(self, sims: SlotSimulators, num_slots: int, **rewards: Any) -> None:
        """`rewards`: see `SimEnv`."""
        assert num_slots >= 1
        super().__init__(sims.spec, **rewards)
        self.task_limit = sims.task_limit
        self._sims = sims
        self._progress: list[_Progress | None] = [None] * num_slots

    def reset(self, slots: Sequence[int], starts: Sequence[EpisodeStart]) -> None:
        """Begin an episode in each slot.

        Raises:
            EnvError: a start asks for an unknown reset id or for no steps at all.
        """
        assert len(slots) == len(starts)
        self._check_starts(starts)
        for slot in slots:
            # A reset that fails leaves no episode behind that somebody could go on with.
            self._progress[slot] = None
        self._begin(dict(zip(slots, starts, strict=True)))

    def _begin(self, starts: Mapping[int, EpisodeStart]) -> None:
        """Begin an episode in each of these slots, one after the other."""
        for slot, start in starts.items():
            try:
                self._sims.reset(slot, start.reset_id, start.seed)
            except Exception as error:
                task, state = self.spec.task_of(start.reset_id)
                error.add_note(f"env '{self.spec.name}', slot {slot}, reset to task {task}, initial state {state}")
                raise
            self._progress[slot] = _Progress(start)

    def step_chunk(
        self, slots: Sequence[int], actions: FloatArray, *, after_step: AfterStep | None = None
    ) -> ChunkResult:
        """Run a chunk of actions `[n, K, A]` in the given slots; all result arrays are `[n, K]`.

        Raises:
            EnvError: an action has the wrong shape or is not finite (nothing was executed then), a slot has no
                running episode, or the simulator returned a non-finite reward.
        """
        self._check_actions(slots, actions)
        return self._run(slots, actions.shape[1], lambda row, k, slot: actions[row, k], after_step)

    def expert_chunk(
        self,
        slots: Sequence[int],
        num_actions: int,
        *,
        noise: float,
        instead: FloatArray | None = None,
        after_step: AfterStep | None = None,
    ) -> tuple[FloatArray, ChunkResult]:
        """Let the expert act (see `Env.expert_chunk`)."""
        for slot in slots:
            if self._task(slot) not in self.spec.expert_tasks:
                raise EnvError(
                    f"{self._where(slot)}: there is no scripted expert for this task; env '{self.spec.name}' has "
                    f"one for tasks {list(self.spec.expert_tasks)}. Set env.train.task_ids and env.eval.task_ids."
                )
        if instead is not None:
            self._check_actions(slots, instead)
        clean = np.zeros((len(slots), num_actions, self.spec.action_dim), np.float32)
        bounds = (-1.0, 1.0) if self.spec.action_space is None else self.spec.action_space.bounds

        def choose(row: int, k: int, slot: int) -> FloatArray:
            clean[row, k] = self._sims.expert(slot)
            if instead is not None:
                return instead[row, k]
            progress = self._begun(slot)
            action = clean[row, k].copy()
            # Keyed by episode and step: the same wherever, whenever and beside whatever it is played.
            shake = np.random.default_rng([progress.start.seed, progress.steps]).normal(0.0, noise, len(action))
            if self.spec.gripper is not None:
                shake[self.spec.gripper.index] = 0.0
            return np.clip(action + shake, *bounds).astype(np.float32)

        return clean, self._run(slots, num_actions, choose, after_step)

    def _run(self, slots: Sequence[int], num_actions: int, choose: Choice, after_step: AfterStep | None) -> ChunkResult:
        for slot in slots:
            if self._begun(slot).over:
                raise self._over(slot)
        result = ChunkResult.empty(len(slots), num_actions, parts=len(self.spec.components))
        self._fill(result, slots, choose, after_step)
        return result

    def _fill(self, result: ChunkResult, slots: Sequence[int], choose: Choice, after_step: AfterStep | None) -> None:
        """Execute the chunk, slot after slot."""
        for row, slot in enumerate(slots):
            for k in range(result.valid.shape[1]):
                action = choose(row, k, slot)
                try:
                    step = self._sims.step(slot, action)
                except Exception as error:
                    error.add_note(self._where(slot))
                    raise
                over = self._note(result, (row, k), slot, action, step)
                if after_step is not None:
                    after_step(slot, step.success)
                if over:
                    break

    def _note(self, result: ChunkResult, at: Place, slot: int, action: FloatArray, step: SimStep) -> bool:
        """Note what an executed action brought; true: the episode is over."""
        if not math.isfinite(step.reward):
            raise self._diverged(slot, step.reward)
        progress = self._begun(slot)
        progress.steps += 1
        earned = step.reward - (progress.last_reward if self._relative else 0.0)
        # Also where it is not relative: nothing else tells what the simulator said last.
        progress.last_reward = step.reward
        ended = step.terminated and not progress.start.ignore_terminations
        at_limit = step.truncated or progress.steps >= progress.start.max_episode_steps
        progress.over = ended or at_limit
        result.valid[at] = True
        # A goal that is reached in the last allowed step ends the episode, and nothing is bootstrapped then.
        result.success[at], result.terminated[at], result.truncated[at] = step.success, ended, at_limit and not ended
        if self._own is not None:
            earned, why = self._own_reward(self._own, result, at, slot, action, (step.reward, earned))
            if why is not None and progress.judged:  # a failure is said once for each episode
                progress.judged = False
                result.unjudged[slot] = f"{self._where(slot)}: {why}"
        result.reward[at] = self._coef * earned
        return progress.over

    def _observe_into(self, slot: int, out: ObservationOut) -> None:
        self._sims.observe(slot, out)

    def observe(self, slots: Sequence[int], outs: Sequence[ObservationOut]) -> None:
        """Write the current observation of each slot into its views (also of an episode that is over)."""
        for slot, out in zip(slots, outs, strict=True):
            self._begun(slot)
            assert out.images.shape == (len(self.spec.cameras), *self.spec.image_size, 3), out.images.shape
            assert out.state.shape == (self.spec.state_dim,), out.state.shape
            try:
                self._sims.observe(slot, out)
            except Exception as error:
                error.add_note(self._where(slot))
                raise

    def render(self, slot: int) -> np.ndarray:
        """Return an upright RGB frame [H, W, 3] uint8 of the slot."""
        self._begun(slot)
        return super().render(slot)

    def _begun(self, slot: int) -> _Progress:
        progress = self._progress[slot]
        if progress is None:
            raise self._without_episode(slot)
        return progress

    def _stand(self, slot: int) -> tuple[int, int]:
        progress = self._begun(slot)
        return progress.start.reset_id, progress.steps


class LockstepEnv(ChunkedEnv):
    """`ChunkedEnv` for an `EnvSpec` with `lockstep`: the slots whose episodes run are stepped in one call, always."""

    _sims: BatchedSimulators

    def __init__(self, sims: BatchedSimulators, num_slots: int, **rewards: Any) -> None:
        super().__init__(sims, num_slots, **rewards)
        self._last: dict[int, ObservationOut] = {}
        """What slots saw that were truncated inside their chunk: the others have moved the batch on since."""

    def _begin(self, starts: Mapping[int, EpisodeStart]) -> None:
        try:
            self._sims.begin(starts)
        except Exception as error:
            wanted = {slot: start.reset_id for slot, start in starts.items()}
            error.add_note(f"env '{self.spec.name}', slots reset to ids {wanted}")
            raise
        for slot, start in starts.items():
            self._progress[slot] = _Progress(start)
            self._last.pop(slot, None)

    def _fill(self, result: ChunkResult, slots: Sequence[int], choose: Choice, after_step: AfterStep | None) -> None:
        cut: list[int] = []
        for k in range(result.valid.shape[1]):
            running = [(row, slot) for row, slot in enumerate(slots) if not self._begun(slot).over]
            if not running:
                break
            # Before the batch moves on, and the slots that were cut with it: their last observation is the present one.
            self._last |= {slot: self._look(slot) for slot in cut}
            actions = {slot: choose(row, k, slot) for row, slot in running}
            steps = self._sims.advance(actions)
            for row, slot in running:
                self._note(result, (row, k), slot, actions[slot], steps[slot])
                if after_step is not None:
                    after_step(slot, steps[slot].success)
            cut = [slot for row, slot in running if result.truncated[row, k]]
        # Episodes that wait for their first action were moved too; their starts decide everything, so start again.
        waiting = {
            slot: progress.start
            for slot, progress in enumerate(self._progress)
            if progress is not None and slot not in slots and not progress.steps
        }
        if waiting:
            self._begin(waiting)

    def observe(self, slots: Sequence[int], outs: Sequence[ObservationOut]) -> None:
        """Write what each slot shows, or showed when it was truncated."""
        for slot, out in zip(slots, outs, strict=True):
            if (seen := self._last.get(slot)) is not None:
                out.images[...], out.state[...] = seen.images, seen.state
            else:
                super().observe([slot], [out])
