"""Simulators for LIBERO tasks, whose environments share loaded task models."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from embodyrl.envs.libero import install
from embodyrl.envs.libero.expert import Expert
from embodyrl.envs.libero.plus import get_variant
from embodyrl.envs.libero.simulator import FRONT_CAMERA, SimState, TaskSimulator
from embodyrl.envs.simulators import SequentialSimulators, SimStep
from embodyrl.errors import EnvError
from embodyrl.types import ByteArray, DoubleArray, EnvSpec, FloatArray, ObservationOut

log = logging.getLogger(__name__)

MAX_SETTLED_STATES = 2048
"""Maximum number of settled initial states in memory, of 10 to 30 KB each; the oldest is dropped first."""


@dataclass(slots=True)
class LoadedModel:
    """Loaded task model, and the environment that uses the model."""

    simulator: TaskSimulator
    occupant: int | None = None
    """Environment whose state the model contains; None: no environment."""


class SimPool:
    """Cache of loaded task models (LRU) that environments share: using an environment copies its state into a model.

    Copying a state takes less than a millisecond; loading a model takes about two seconds.
    """

    def __init__(self, build: Callable[[int], TaskSimulator], *, max_models: int) -> None:
        assert max_models >= 1
        self._build = build
        self._max_models = max_models
        self.loaded: OrderedDict[int, LoadedModel] = OrderedDict()
        """Loaded models by task, least recently used first."""
        self._saved: dict[int, SimState] = {}
        self._task: dict[int, int] = {}
        self._warned = False

    def begin(self, env_index: int, task: int) -> TaskSimulator:
        """Assign a model of `task` to the environment for a new episode; its previous state is dropped."""
        # The previous state is not saved, because its episode has ended.
        self._saved.pop(env_index, None)
        for loaded in self.loaded.values():
            if loaded.occupant == env_index:
                loaded.occupant = None
        self._task[env_index] = task
        return self._occupy(env_index, task).simulator

    def use(self, env_index: int) -> TaskSimulator:
        """Return the environment's model, after loading the state of the environment's episode."""
        loaded = self._occupy(env_index, self._task[env_index])
        state = self._saved.pop(env_index, None)
        if state is not None:
            loaded.simulator.load(state)
        return loaded.simulator

    def close(self) -> None:
        """Free all models; idempotent."""
        while self.loaded:
            self.loaded.popitem()[1].simulator.close()
        self._saved.clear()
        self._task.clear()

    def _occupy(self, env_index: int, task: int) -> LoadedModel:
        # Environments on one task share a model, which contains the state of the last environment that used it.
        loaded = self.loaded.get(task) or self._load(task)
        self.loaded.move_to_end(task)
        if loaded.occupant != env_index:
            self._save_occupant(loaded)
            loaded.occupant = env_index
        return loaded

    def _load(self, task: int) -> LoadedModel:
        while len(self.loaded) >= self._max_models:
            oldest, loaded = self.loaded.popitem(last=False)
            self._warn_if_thrashing(oldest)
            self._save_occupant(loaded)
            # Close before the next model is built, because memory may not suffice for both.
            loaded.simulator.close()
        self.loaded[task] = LoadedModel(self._build(task))
        return self.loaded[task]

    def _save_occupant(self, loaded: LoadedModel) -> None:
        if loaded.occupant is not None:
            self._saved[loaded.occupant] = loaded.simulator.save()
            loaded.occupant = None

    def _warn_if_thrashing(self, evicted: int) -> None:
        if self._warned or evicted not in self._task.values():
            return
        self._warned = True
        log.warning(
            "LIBERO: environments of this worker run %d tasks, but memory suffices for %d model(s), so every switch "
            "reloads a model (about 2 s). Use fewer tasks (env.train.task_ids) or environments, or more memory.",
            len(set(self._task.values())),
            self._max_models,
        )


class LiberoSims(SequentialSimulators):
    """Simulators for the tasks of a LIBERO suite, and of additional suites in evaluations."""

    sequential = True  # environments share models: changing the environment swaps the whole simulator state

    def __init__(
        self,
        spec: EnvSpec,
        *,
        max_models: int,
        nearest: bool = False,
        initial_states: Mapping[int, DoubleArray] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        """Create the simulators.

        Args:
            spec: spec of the environment.
            max_models: maximum number of task models in memory.
            nearest: argument of `Expert`.
            initial_states: states by reset id that replace the initial states of the benchmark.
            options: arguments of `TaskSimulator`.
        """
        super().__init__(spec)
        self._initial_states, self._nearest, self._options = initial_states, nearest, options
        self.task_limit = max_models
        names = dict.fromkeys(spec.get_suite(task) for task in range(len(spec.tasks)))
        self._tasks = [
            (name, number, task) for name in names for number, task in enumerate(install.get_suite_tasks(name))
        ]
        self._experts: dict[int, Expert] = {}
        self._seeds: dict[int, int] = {}
        self._goals: dict[int, tuple[float, float]] = {}
        """By environment: the highest goal fraction of the episode before the last step, and that after the step."""
        self._settled: dict[tuple[int, int, int], tuple[SimState, bool]] = {}
        """Settled states by task, number of the initial state, and seed, and whether their goal is already reached."""
        self.pool = SimPool(self._build, max_models=max_models)

    def reset_env(self, env_index: int, reset_id: int, seed: int) -> None:
        """Reset the environment to the settled initial state `reset_id`.

        A repeated state is loaded from memory, bit for bit, because settling takes as long as several steps.

        Raises:
            EnvError: the initial state in the benchmark's files does not fit the task.
        """
        task, index = self.spec.task_of(reset_id)
        self._seeds[env_index] = seed
        self._goals[env_index] = 0.0, 0.0
        self._experts[env_index] = Expert(seed, nearest=self._nearest)
        # In tasks that are not seeded, no fixture is placed at random, so all seeds give the same state.
        key = task, index, seed if task in self.spec.seeded_tasks else 0
        simulator = self.pool.begin(env_index, task)
        if settled := self._settled.get(key):
            simulator.load(settled[0])
        else:
            state = self._initial_states.get(reset_id)
            solved = self._settle(simulator, task, index, seed) if state is None else simulator.reset(state, seed)
            settled = self._settled[key] = simulator.save(), solved
            if len(self._settled) > MAX_SETTLED_STATES:
                del self._settled[next(iter(self._settled))]
        self.record_solved_start(env_index, solved=settled[1])

    def _settle(self, simulator: TaskSimulator, task: int, index: int, seed: int) -> bool:
        """Start from an initial state and execute the settling steps; return True if the goal is already reached."""
        suite, number, _ = self._tasks[task]
        states = install.load_init_states(suite, number)
        variant, base_index = get_variant(suite, number, index)
        if index < install.STATES_PER_TASK != len(states):
            raise EnvError(
                f"env '{suite}', task {number}: the installed LIBERO has {len(states)} initial states, "
                f"expected {install.STATES_PER_TASK}. Fix: {install.INSTALL}"
            )
        state = states[base_index] if index < install.STATES_PER_TASK else simulator.sample_state(index)
        return simulator.reset(state, seed, variant)

    def step_env(self, env_index: int, action: FloatArray) -> SimStep:
        """Execute one action [7] in -1..1: position and rotation changes, and the gripper (-1: open).

        A change of 1 is 0.05 m or 0.5 rad.
        """
        highest = max(self._goals[env_index])
        self._goals[env_index] = highest, highest
        return self.pool.use(env_index).step(action)

    def info(self, env_index: int) -> dict[str, float]:
        """Return fractions of the task's goals that are reached: now, and by the last step for the first time.

        `new_goals` compares `goals` with the earlier calls in the episode.
        """
        highest, _ = self._goals[env_index]
        goals = self.pool.use(env_index).get_goal_fraction()
        self._goals[env_index] = highest, goals
        return {"goals": goals, "new_goals": max(goals - highest, 0.0)}

    def expert(self, env_index: int) -> FloatArray:
        """Return the expert's next action [7], which must be executed before the next call."""
        return self._experts[env_index].act(self.pool.use(env_index).scene)

    def save(self, env_index: int) -> tuple[SimState, tuple[float, float]]:
        """Return a copy of the state of the environment's episode, and the goal fractions that it has reached."""
        return self.pool.use(env_index).save(), self._goals[env_index]

    def load(self, env_index: int, state: tuple[SimState, tuple[float, float]]) -> None:
        """Restore a saved state of the environment's episode; the expert plans again."""
        simulator_state, self._goals[env_index] = state
        self.pool.use(env_index).load(simulator_state)
        self._experts[env_index] = Expert(self._seeds[env_index], nearest=self._nearest)

    def observe_env(self, env_index: int, out: ObservationOut) -> None:
        """Write the camera images and proprioception [8] into the arrays of `out`."""
        self.pool.use(env_index).observe(self.spec.cameras.names, out.images, out.state)

    def render(self, env_index: int) -> ByteArray:
        """Return upright frames of the front camera and the policy's other cameras, side by side."""
        cameras = [FRONT_CAMERA, *(name for name in self.spec.cameras.names if name != FRONT_CAMERA)]
        simulator = self.pool.use(env_index)
        return np.concatenate([simulator.render_frame(name, *self.spec.cameras.size) for name in cameras], axis=1)

    def close(self) -> None:
        """Free the models; idempotent."""
        self.pool.close()

    def _build(self, task: int) -> TaskSimulator:
        _, _, entry = self._tasks[task]
        path = install.get_libero_path("bddl_files") / entry.problem_folder / entry.bddl_file
        return TaskSimulator(path, **self._options)
