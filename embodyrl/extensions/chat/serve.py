"""Language model server of the command `embodyrl serve`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from embodyrl.commands.facts import precision_facts
from embodyrl.commands.run_folder import first_weights, weight_facts
from embodyrl.errors import ConfigError
from embodyrl.extensions.serving.serve import Serving, exposure
from embodyrl.extensions.text.plan import ANY_TEXT
from embodyrl.files import available_cores
from embodyrl.plan.schema import Config
from embodyrl.policies import POLICIES
from embodyrl.policies.causal_lm.settings import CausalLMSettings
from embodyrl.policies.protocol import PolicyRequest

_OF_ROBOTS = ("protocol", "image_names", "state_name", "prompt_name")


def chat_server(cfg: Config) -> Serving | None:
    """Return the server of a language model; None if the policy is not a language model.

    Raises:
        ConfigError: keys for robot policies are set, or the weights do not fit.
    """
    if not isinstance(cfg.model, CausalLMSettings):
        return None
    typed = [f"serve.{key}" for key in _OF_ROBOTS if cfg.typed(f"serve.{key}")]
    if typed:
        raise ConfigError(
            f"{', '.join(typed)} can only be set for robot policies; language models use OpenAI's API. "
            "Remove this setting."
        )
    weights = first_weights(cfg, ANY_TEXT)
    facts = [
        ("policy", f"{cfg.model.model_type} · {cfg.model.precision_name}"),
        *precision_facts(cfg),
        *weight_facts(cfg, weights),
        ("model", f"{served_name(cfg)} (the name in requests)"),
        ("protocol", "OpenAI chat completions: /v1/chat/completions, /v1/models"),
        *exposure(cfg.serve),
    ]

    def run(say: Callable[[str], None], ready: Callable[[str], None]) -> None:
        import torch

        from embodyrl.extensions.chat.replies import Served
        from embodyrl.extensions.chat.server import ChatServer
        from embodyrl.policies.causal_lm.policy import CausalLMPolicy
        from embodyrl.policies.tensors import best_device, seed_everything

        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(available_cores())
        seed_everything(cfg.seed, deterministic=False)
        request = PolicyRequest(env=ANY_TEXT, device=best_device(), seed=cfg.seed, trainable=False)
        policy = POLICIES.get(cfg.model.model_type).build(cfg.model, request)
        assert isinstance(policy, CausalLMPolicy), "its settings are those of a language model"
        if weights is not None:
            policy.load_weights(weights)
        served = Served(policy=policy, name=served_name(cfg), created=int(time.time()))
        ChatServer(served, cfg.serve, say).run(ready)

    return Serving(protocol="openai", facts=facts, run=run)


def served_name(cfg: Config) -> str:
    """Return the model name that clients send: the name of the run and checkpoint, or of the model folder."""
    if cfg.ckpt is None:
        return (cfg.model.weights or cfg.model.model_type).rstrip("/").replace(":", "/").rpartition("/")[2]
    path = Path(cfg.ckpt)
    return f"{path.parent.parent.name}-{path.name}" if path.parent.name == "checkpoints" else path.name
