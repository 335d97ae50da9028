"""From an observation on the wire to a chunk in the environment's own actions, one after the other in one thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import numpy as np

from embodyrl.errors import NonFiniteError
from embodyrl.policies.protocol import Policy
from embodyrl.policies.remote.dialects import Names, upright
from embodyrl.types import EnvSpec, FloatArray, Observation
from embodyrl.workers.rollout_worker import convert_gripper


class Answering:
    """A policy that answers for one environment, greedily; images come upright, whatever the simulator's own way."""

    def __init__(self, policy: Policy, env: EnvSpec, names: Names) -> None:
        self._policy, self._env, self._names = policy, env, names

    def __call__(self, message: object) -> FloatArray:
        """Chunk [K, A] for one observation, in the environment's units and with its gripper.

        Raises:
            MessageError: the observation lacks something or does not have the shape the policy was built for.
            NonFiniteError: the policy says something that is no number.
        """
        spec, env = self._policy.spec, self._env
        seen = self._names.read(message, images=spec.num_images, states=env.state_dim if spec.uses_state else 0)
        height, width = seen.images[0].shape[:2] if seen.images else env.image_size
        images = np.zeros((1, len(seen.images), height, width, 3), np.uint8)
        for place, image in enumerate(seen.images):
            images[0, place] = upright(image, env.image_rotation_deg)
        state = np.zeros((1, env.state_dim), np.float32) if seen.state is None else seen.state[None]
        obs = Observation(images=images, state=state, instructions=(seen.prompt,))
        actions = np.array(self._policy.act(obs, noise=None).actions[0])
        if not np.isfinite(actions).all():
            raise NonFiniteError("The policy produced a non-finite action; its weights or statistics are broken.")
        convert_gripper(actions, spec.gripper, env.gripper)
        return actions

    def describe(self) -> dict[str, Any]:
        """What a client is told first."""
        spec, env = self._policy.spec, self._env
        return {
            "policy": spec.name,
            "env": env.name,
            "action_horizon": spec.num_action_chunks,
            "action_dim": spec.action_dim,
            "images": list(self._names.images[: spec.num_images]),
            "state_dim": env.state_dim if spec.uses_state else 0,
        }


class PolicyThread:
    """Carries out one call after the other. A call that never returns does not keep the process from ending."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=self._work, name="policy", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> "Future[Any]":
        """Put a call in the queue."""
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue  # whoever asked has waited too long
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
