"""Policy server of LeRobot: a script for a Python environment that has LeRobot, but not necessarily embodyrl."""

import inspect
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np


def encoded(message: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each array by its type, shape and bytes, which any version of numpy can read."""
    return {
        name: ("array", value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value
        for name, value in message.items()
    }


def decoded(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the tuples of `encoded` back to writable arrays."""
    return {
        name: np.frombuffer(bytearray(value[3]), value[1]).reshape(value[2])
        if isinstance(value, tuple) and value[:1] == ("array",)
        else value
        for name, value in message.items()
    }


class Server:
    """Runs a LeRobot policy with its preprocessor and postprocessor, for requests of the client."""

    def __init__(self, path: str, device: str, seed: int, steered: bool) -> None:
        """Load the policy as in LeRobot's evaluation; `steered`: requests contain the initial noise."""
        import torch
        from lerobot.configs.policies import PreTrainedConfig  # pyright: ignore[reportMissingImports]
        from lerobot.policies.factory import get_policy_class, make_pre_post_processors  # pyright: ignore[reportMissingImports]
        from lerobot.utils.import_utils import register_third_party_plugins  # pyright: ignore[reportMissingImports]
        from lerobot.utils.random_utils import set_seed  # pyright: ignore[reportMissingImports]

        self._torch = torch
        register_third_party_plugins()
        set_seed(seed)
        config = PreTrainedConfig.from_pretrained(path)
        config.device = device
        self._policy = get_policy_class(config.type).from_pretrained(path, config=config).eval()
        if steered and "noise" not in inspect.signature(self._policy.select_action).parameters:
            raise ValueError(
                f"policy '{config.type}' has no argument noise in select_action; set model.likelihood=residual"
            )
        overrides = {"device_processor": {"device": device}}
        self._before, self._after = make_pre_post_processors(config, path, preprocessor_overrides=overrides)
        self._executed = getattr(config, "n_action_steps", 1)
        self._random, self._steered, self._device = False, False, device

    def reply(
        self,
        steps: list[dict[str, Any]],
        tasks: list[str],
        actions: int,
        states: list[str],
        seeds: list[int] | None,
        noise: Any,
    ) -> dict[str, np.ndarray]:
        """Return actions `chunk` [B, K, A] and preprocessed states `state` [B, S].

        `steps` are the observed steps, oldest first. With seeds, the noise of an observation depends only on its seed:
        if the policy samples noise, each observation is a separate batch. `noise`: the initial noise [B, H, N], or
        None.
        """
        found = [decoded(step) for step in steps]
        start = decoded({"noise": noise})["noise"]
        if start is not None and actions and not self._steered:
            self._require_effect(found, tasks, actions, states, start)
        if seeds is None or not self._random:
            before = self._generators()
            whole = self._one(found, tasks, actions, states, start)
            self._random = any(map(self._differs, before, self._generators()))
            if seeds is None or not self._random:
                return whole
        rows = []
        for row, seed in enumerate(seeds):
            self._torch.manual_seed(seed)
            part = [{name: value[row : row + 1] for name, value in step.items()} for step in found]
            own = None if start is None else start[row : row + 1]
            rows.append(self._one(part, tasks[row : row + 1], actions, states, own))
        return {name: np.concatenate([part[name] for part in rows]) for name in rows[0]}

    def _require_effect(
        self, found: list[dict[str, Any]], tasks: list[str], actions: int, states: list[str], noise: Any
    ) -> None:
        """Check that the noise changes the actions, because some policies ignore the argument `noise`."""
        first, chunks = [{name: value[:1] for name, value in step.items()} for step in found], []
        for shift in (0, 1):
            self._torch.manual_seed(0)
            chunks.append(self._one(first, tasks[:1], actions, states, noise[:1] + np.float32(shift))["chunk"])
        if np.array_equal(*chunks):
            raise ValueError("select_action ignores its argument `noise`; set model.likelihood=residual")
        self._steered = True

    def _generators(self) -> list[Any]:
        cuda = self._torch.cuda
        return [self._torch.get_rng_state(), *(cuda.get_rng_state_all() if cuda.is_available() else ())]

    def _differs(self, one: Any, other: Any) -> bool:
        return not self._torch.equal(one, other)

    def _one(
        self, steps: list[dict[str, Any]], tasks: list[str], actions: int, states: list[str], noise: Any
    ) -> dict[str, np.ndarray]:
        batches = [self._batch(step, tasks) for step in steps]
        pairs = [(batch.get(name), step[name]) for batch, step in zip(batches, steps, strict=True) for name in states]
        seen = [value.float().cpu().numpy() if hasattr(value, "cpu") else raw for value, raw in pairs]
        flat = [row.reshape(len(tasks), -1) for row in seen]
        state = np.concatenate([*flat, np.zeros((len(tasks), 0), np.float32)], 1)
        chunk = self._chunk(batches, actions, noise) if actions else np.zeros((len(tasks), 0, 0), np.float32)
        return {"chunk": chunk, "state": state}

    def _chunk(self, batches: list[Any], actions: int, noise: Any) -> np.ndarray:
        torch = self._torch
        start = {} if noise is None else {"noise": torch.from_numpy(noise).to(self._device)}
        with torch.inference_mode():
            self._policy.reset()
            # A policy observes in `select_action`, and computes a chunk when the last one is executed. Therefore a
            # whole number of chunks is executed before the newest observation.
            earlier = len(batches) - 1
            calls = -(-earlier // self._executed) * self._executed
            for call in range(calls):
                self._policy.select_action(dict(batches[max(0, call - calls + earlier)]), **start)
            chunk = [self._after(self._policy.select_action(dict(batches[-1]), **start)) for _ in range(actions)]
        return torch.stack(chunk, 1).float().cpu().numpy()

    def _batch(self, features: dict[str, Any], tasks: list[str]) -> Any:
        """Preprocess observations; images [B, H, W, 3] are converted to [B, 3, H, W] with values in 0..1."""
        seen: dict[str, Any] = {"task": tasks}
        for name, value in features.items():
            tensor = self._torch.from_numpy(value)
            seen[name] = tensor.permute(0, 3, 1, 2).contiguous().float() / 255 if tensor.ndim == 4 else tensor.float()
        return self._before(seen)


def serve(pipe: Any) -> None:
    """Load the policy of the first message, then return a chunk for each message until the pipe closes."""
    server = None
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            if server is None:
                server, reply = Server(**request), {}
            else:
                reply = encoded(server.reply(**request))
        except ImportError as error:
            reply = {"missing": str(error)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        pipe.send(reply)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
