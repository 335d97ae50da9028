"""LIBERO as slot simulators."""

from __future__ import annotations

from embodyrl.envs.chunked import SimStep
from embodyrl.envs.libero import install
from embodyrl.envs.libero.expert import Demonstrator
from embodyrl.envs.libero.pool import SimPool
from embodyrl.envs.libero.simulator import TaskSimulator
from embodyrl.errors import EnvError
from embodyrl.types import ByteArray, EnvSpec, FloatArray, ObservationOut

PEOPLE_CAMERA = "agentview"


class LiberoSims:
    """Slots of one LIBERO suite; implements `SlotSimulators`."""

    task_limit: int | None

    def __init__(self, spec: EnvSpec, *, max_models: int, lean: bool = False, fast: bool = False) -> None:
        self.spec = spec
        self._kinds = {"lean": lean, "fast": fast}
        self.task_limit = max_models
        self._tasks = install.suite_tasks(spec.name)
        self._demonstrators: dict[int, Demonstrator] = {}
        self.pool = SimPool(self._build, max_models=max_models)

    def reset(self, slot: int, reset_id: int, seed: int) -> None:
        """Set initial state `reset_id` and let the objects settle.

        Raises:
            EnvError: the benchmark's files do not fit together.
        """
        task, index = self.spec.task_of(reset_id)
        states = install.suite_init_states(self.spec.name, task)
        if index >= len(states):
            raise EnvError(
                f"env '{self.spec.name}', task {task}: the installed LIBERO has {len(states)} initial states, "
                f"{self.spec.states_per_task[task]} expected. Cure: {install.INSTALL}"
            )
        self._demonstrators[slot] = Demonstrator(seed)
        self.pool.begin(slot, task).reset(states[index], seed)

    def step(self, slot: int, action: FloatArray) -> SimStep:
        """Execute one action [7]: position and rotation deltas in -1..1 (0.05 m, 0.5 rad), gripper -1 opens."""
        return self.pool.use(slot).step(action)

    def expert(self, slot: int) -> FloatArray:
        """Return the demonstrator's next action [7]; to be executed before the next one is asked for."""
        return self._demonstrators[slot].act(self.pool.use(slot).scene)

    def observe(self, slot: int, out: ObservationOut) -> None:
        """Render the cameras of the spec, and read proprioception [8], into the views."""
        self.pool.use(slot).observe(self.spec.cameras, out.images, out.state)

    def render(self, slot: int) -> ByteArray:
        """Return an upright frame of the front camera."""
        return self.pool.use(slot).frame(PEOPLE_CAMERA, *self.spec.image_size)

    def close(self) -> None:
        self.pool.close()

    def _build(self, task: int) -> TaskSimulator:
        entry = self._tasks[task]
        path = install.libero_path("bddl_files") / entry.problem_folder / entry.bddl_file
        return TaskSimulator(path, **self._kinds)
