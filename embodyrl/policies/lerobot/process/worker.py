"""LeRobot policy server: a script for a Python environment with LeRobot; embodyrl need not be installed there."""

import sys
from multiprocessing.connection import Connection
from typing import Any


class Server:
    """Server that runs a LeRobot policy with its preprocessor and postprocessor."""

    def __init__(self, path: str, device: str, seed: int) -> None:
        """Load the policy in the same way as LeRobot's evaluation."""
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
        overrides = {"device_processor": {"device": device}}
        self._preprocessor, self._postprocessor = make_pre_post_processors(
            config, path, preprocessor_overrides=overrides
        )
        self._executed = getattr(config, "n_action_steps", 1)

    def reply(self, steps: list[dict[str, Any]], tasks: list[str], actions: int) -> dict[str, Any]:
        """Return {"chunk": actions [B, K, A]}, float32; `steps` are the observed steps, oldest first."""
        batches = [self._build_batch(step, tasks) for step in steps]
        torch = self._torch
        with torch.inference_mode():
            self._policy.reset()
            # `select_action` stores the observation, and computes a new chunk only after the last chunk has been
            # executed. Therefore a whole number of chunks is executed before the newest observation.
            earlier = len(batches) - 1
            calls = -(-earlier // self._executed) * self._executed
            for call in range(calls):
                self._policy.select_action(dict(batches[max(0, call - calls + earlier)]))
            chunk = [self._postprocessor(self._policy.select_action(dict(batches[-1]))) for _ in range(actions)]
        return {"chunk": torch.stack(chunk, 1).float().cpu().numpy()}

    def _build_batch(self, features: dict[str, Any], tasks: list[str]) -> Any:
        """Preprocess observations; images [B, H, W, 3] are converted to [B, 3, H, W] with values in 0..1."""
        batch: dict[str, Any] = {"task": tasks}
        for name, value in features.items():
            tensor = self._torch.from_numpy(value)
            batch[name] = tensor.permute(0, 3, 1, 2).contiguous().float() / 255 if tensor.ndim == 4 else tensor.float()
        return self._preprocessor(batch)


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
                reply = server.reply(**request)
        except ImportError as error:
            reply = {"missing": str(error)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        pipe.send(reply)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
