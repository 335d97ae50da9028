"""Gymnasium environments as simulators: one instance per slot, or one vector environment for all slots."""

import copy
import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium.error import Error as GymnasiumError
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from embodyrl.envs.gym.api import begin_episode, flag, flags, line, number, require_step
from embodyrl.envs.gym.create import GL_FIX, AnyEnv
from embodyrl.envs.gym.probe import Probe, slot_info
from embodyrl.envs.gym.said import instruction_of, succeeded, success_key
from embodyrl.envs.gym.settings import GymSettings
from embodyrl.envs.gym.spaces import ObservationWriter, copied, flat_actions, native_actions
from embodyrl.envs.simulators import PerSlot, SimStep, SimSteps, Simulators
from embodyrl.errors import EnvError
from embodyrl.types import BoolArray, ByteArray, EnvSpec, FloatArray, IntArray, ObservationOut

log = logging.getLogger(__name__)


class _Slots(Simulators):
    """Base class of GymSims and VectorSims: stores the last observations, renders, and returns instructions."""

    def __init__(self, cfg: GymSettings, spec: EnvSpec, found: Probe) -> None:
        super().__init__(spec)
        self._cfg = cfg
        self._success_keys = success_key(cfg)
        self._instructions: dict[int, str | None] = {}
        self._native = native_actions(spec.name, found.action_space)
        self._writer = ObservationWriter(spec.name, found.observation_space)
        self._observations: dict[int, Any] = {}

    def render(self, slot: int) -> ByteArray:
        """Render the environment, or return its own image observation.

        Raises:
            EnvError: the environment has neither a render mode nor an image observation.
        """
        try:
            frame = self._frame(slot)
        except GymnasiumError as error:
            raise EnvError(f"env '{self.spec.name}' cannot render: {error}; or set video=none.") from error
        except Exception as error:
            if not re.search(r"OpenGL|gl\w*Context|GLFW|DISPLAY|EGL|OSMesa", f"{type(error)} {error}"):
                raise
            raise EnvError(f"env '{self.spec.name}' cannot render on this machine: {line(error)}. {GL_FIX}") from error
        if frame is None and not self.spec.cameras.names:
            raise EnvError(
                f"env '{self.spec.name}' has no image to record: no render mode 'rgb_array' or None from render(), and "
                "no image observation. Add one, or set video=none."
            )
        return self._writer.image(self._observations[slot]) if frame is None else one_frame(frame)

    def instruction(self, slot: int) -> str | None:
        """Return the instruction of the slot's episode; None: the instruction of the task in the spec applies."""
        return self._instructions.get(slot)

    def _read_instruction(self, slot: int, info: Mapping[str, Any], env: Any = None) -> None:
        if not self.spec.text.prompt_bytes:
            return
        text = instruction_of(self._cfg, self._writer.texts, self._observations[slot], info, env)
        if text is not None and len(text.encode("utf-8", errors="replace")) > self.spec.text.prompt_bytes:
            raise EnvError(
                f"env '{self.spec.name}': the instruction {text!r:.60} is longer than "
                f"{self.spec.text.prompt_bytes} bytes, the limit of its space or the length in the first episode. "
                "Fix: use a longer Text space, or set env.instruction."
            )
        self._instructions[slot] = text

    @abstractmethod
    def _frame(self, slot: int) -> Any:
        """Render one frame; None without a render mode."""


class GymSims(_Slots, PerSlot):
    """Slots of one Gymnasium environment, one instance each."""

    def __init__(self, cfg: GymSettings, spec: EnvSpec, found: Probe, create: Callable[..., Any]) -> None:
        super().__init__(cfg, spec, found)
        self._flat = flat_actions(spec.name, found.action_space)
        self._create = create
        self._envs: dict[int, AnyEnv] = {}
        self._infos: dict[int, dict[str, Any]] = {}

    def reset_slot(self, slot: int, reset_id: int, seed: int) -> None:
        """Reset the environment with the reset id as seed, which determines the initial state and all randomness."""
        if slot not in self._envs:
            self._envs[slot] = self._create()
        env = self._envs[slot]
        self._observations[slot], self._infos[slot] = begin_episode(self.spec.name, env, reset_id)
        self._read_instruction(slot, self._infos[slot], env)
        reached = succeeded(self._infos[slot], self._success_keys)
        self.note_start(slot, solved=bool(flag(self.spec.name, "success in info", reached)))

    def step_slot(self, slot: int, action: FloatArray) -> SimStep:
        """Execute one action [A]; read success from `info`."""
        result = require_step(self.spec.name, self._envs[slot].step(self._native(action)))
        self._observations[slot], reward, terminated, truncated, info = result
        self._infos[slot] = info
        name = self.spec.name
        return SimStep(
            reward=number(name, reward),
            terminated=flag(name, "terminated", terminated),
            success=flag(name, "success in info", succeeded(info, self._success_keys)),
            truncated=flag(name, "truncated", truncated),
        )

    def observe_slot(self, slot: int, out: ObservationOut) -> None:
        """Write the last observation into the views."""
        self._writer.write(self._observations[slot], out)

    def expert(self, slot: int) -> FloatArray:
        """Return the action of the environment's own `expert_action()`."""
        return self._flat(self._envs[slot].get_wrapper_attr("expert_action")())

    def info(self, slot: int) -> dict[str, Any]:
        """Return the environment's `info` of the last step."""
        return self._infos[slot]

    def close(self) -> None:
        """Free the environments; idempotent. A failure is logged: the results are complete."""
        while self._envs:
            try:
                self._envs.popitem()[1].close()
            except Exception as error:
                log.warning("close() of env '%s' failed: %s", self.spec.name, line(error))

    def _frame(self, slot: int) -> Any:
        env = self._envs[slot]
        return env.render() if env.render_mode == "rgb_array" else None


def one_frame(frame: Any) -> ByteArray:
    """Return a rendered image [H, W, 3]; images of several cameras are placed side by side."""
    if isinstance(frame, Mapping):
        frame = list(frame.values())
    if isinstance(frame, (list, tuple)):
        same = [one for one in frame if np.shape(one) == np.shape(frame[0])]
        return one_frame(np.stack(same) if same else np.zeros((1, 1, 1, 3), np.uint8))
    array = np.asarray(frame)
    if array.ndim == 4:
        array = np.concatenate([*array], axis=1)
    if array.ndim == 2 or array.shape[-1] == 1:
        array = np.repeat(array.reshape(*array.shape[:2], 1), 3, axis=2)
    if array.ndim != 3 or array.shape[-1] not in (3, 4):
        raise EnvError(f"render returned an image of shape {array.shape}, expected [H, W, 3].")
    if array.dtype.kind in "fb":  # numbers in 0..1, as in Matplotlib
        array = np.rint(np.clip(array * (255.0 if array.max(initial=0) <= 1 else 1.0), 0, 255))
    return array[..., :3].astype(np.uint8, copy=False)


class VectorSims(_Slots):
    """Slots of one vector environment in lock-step.

    Episodes start with `reset_mask`. After an automatic reset, the final observation is restored for the ended episode.
    """

    def __init__(
        self, cfg: GymSettings, spec: EnvSpec, found: Probe, create: Callable[[int], Any], num_slots: int
    ) -> None:
        super().__init__(cfg, spec, found)
        self._vector = create(num_slots)
        self._mode = (self._vector.metadata or {}).get("autoreset_mode")
        self._space = found.action_space
        self._batch_info: dict[str, Any] = {}
        self._over: set[int] = set()
        """Slots whose episodes ended in the last step."""
        self._actions = [self._native(np.zeros(spec.action.dim, np.float32))] * num_slots
        # All slots: slots without an episode are stepped with the others.
        self._keep(self._vector.reset(seed=[0] * num_slots)[0], range(num_slots))

    def reset(self, slots: IntArray, reset_ids: IntArray, seeds: IntArray) -> None:
        """Reset the environments of the given slots, with the reset ids as seeds."""
        starts = dict(zip(slots.tolist(), reset_ids.tolist(), strict=True))
        self._over -= starts.keys()
        seen, infos = self._restart(starts)
        self._keep(seen, starts)
        reached = self._successes(infos)
        for slot in starts:
            self._read_instruction(slot, slot_info(infos, slot, len(self._actions)))
            self.note_start(slot, solved=bool(reached[slot]))

    def step(self, slots: IntArray, actions: FloatArray) -> SimSteps:
        """Step the whole batch; slots without an action repeat their last action."""
        acting = slots.tolist()
        for slot, action in zip(acting, actions, strict=True):
            self._actions[slot] = self._native(action)
        if self._over and self._mode not in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
            # The batch rejects steps after the end of an episode. Reset here, not earlier: the final observation is
            # read first.
            self._restart(dict.fromkeys(self._over, 0))
        # A vector environment takes one batch of its action space, which need not be an array.
        batch = concatenate(self._space, self._actions, create_empty_array(self._space, len(self._actions)))
        result = require_step(self.spec.name, self._vector.step(batch))
        seen, reward, terminated, truncated, infos = result
        name, count = self.spec.name, len(self._actions)
        terminated, truncated = flags(name, "terminated", terminated, count), flags(name, "truncated", truncated, count)
        self._over = {*np.flatnonzero(terminated | truncated).tolist()}
        success = self._successes(infos)
        self._batch_info = infos
        self._keep(seen, acting)
        if self._over and self._mode is AutoresetMode.SAME_STEP:
            success = self._look_back(infos, [slot for slot in self._over if slot in acting], success)
        return SimSteps(
            reward=np.asarray(reward, np.float64)[slots],
            terminated=terminated[slots],
            success=success[slots],
            truncated=truncated[slots],
        )

    def observe(self, slots: IntArray, images: ByteArray, state: FloatArray, rows: IntArray) -> None:
        """Write the slots' last observations."""
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            self._writer.write(self._observations[slot], ObservationOut(images=images[row], state=state[row]))

    def _look_back(self, infos: dict[str, Any], over: list[int], success: Any) -> Any:
        """Restore the final observations of slots `over`; return `success` [N] with their final success."""
        ends, said = infos.get("final_obs"), infos.get("final_info", {})
        if ends is None:
            raise EnvError(
                f"env '{self.spec.name}' resets in the step in which an episode ends, without info['final_obs'], so "
                f"the final observation is lost. Fix: autoreset_mode=AutoresetMode.DISABLED or NEXT_STEP."
            )
        success = success.copy()
        for slot in over:
            self._observations[slot] = copied(self._vector.single_observation_space, _pick(ends, slot))
            success[slot] = self._successes(said)[slot]
        return success

    def _successes(self, infos: Mapping[str, Any]) -> BoolArray:
        """Return a mask [N] of the environments whose `info` reports success."""
        found = succeeded(infos, self._success_keys)
        if isinstance(found, np.ndarray) and found.dtype == object:  # None: not set for this environment
            found = np.asarray([False if one is None else one for one in found])
        return flags(self.spec.name, "success in info", found, len(self._actions))

    def info(self, slot: int) -> dict[str, Any]:
        """Return the slot's part of the batch's `info`, for keys that are set for the slot."""
        said = self._batch_info
        if slot in self._over and self._mode is AutoresetMode.SAME_STEP:
            said = said.get("final_info", {})  # the rest belongs to the episode that the batch has started
        return slot_info(said, slot, len(self._actions))

    def close(self) -> None:
        """Free the batch; idempotent."""
        if not self._vector.closed:
            self._vector.close()

    def _frame(self, slot: int) -> Any:
        return self._vector.render()[slot] if self._vector.render_mode == "rgb_array" else None

    def _restart(self, seeds: Mapping[int, int]) -> tuple[Any, dict[str, Any]]:
        """Reset the environments of the given slots; return observation and info of the whole batch."""
        mask = np.zeros(len(self._actions), np.bool_)
        mask[list(seeds)] = True
        chosen = [seeds.get(slot, 0) for slot in range(len(mask))]
        return self._vector.reset(seed=chosen, options={"reset_mask": mask})

    def _keep(self, batch: Any, slots: Iterable[int]) -> None:
        """Store copies of the given slots' observations."""
        items = list(iterate(self._vector.observation_space, batch))
        self._observations.update({slot: copy.deepcopy(items[slot]) for slot in slots})


def _pick(batch: Any, slot: int) -> Any:
    """Return one environment's element of a batched value, also in nested dictionaries."""
    return {name: _pick(part, slot) for name, part in batch.items()} if isinstance(batch, dict) else batch[slot]
