"""Seeds for environments that sample initial states with numpy's global generator."""

from typing import Any

import gymnasium
import numpy as np


class SeedsNumpy(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that seeds numpy's global generator during `reset` and restores the generator's state afterwards."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; the seed determines the initial state."""
        state_before = np.random.get_state()
        try:
            np.random.seed(seed)
            return self.env.reset(seed=seed, options=options)
        finally:
            np.random.set_state(state_before)
