"""Startup of the WebSocket server of `embodyrl serve` for a robot policy."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from embodyrl.commands.banner import precision_banner_lines
from embodyrl.commands.run_folder import resolve_initial_weights, weight_banner_lines
from embodyrl.envs import ENVS
from embodyrl.envs.protocol import EnvContext
from embodyrl.errors import ConfigError
from embodyrl.files import available_cores
from embodyrl.plan.build import mismatches
from embodyrl.plan.schema import Config
from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.remote.wire_formats import get_field_names, import_optional
from embodyrl.types import EnvSpec, PolicySpec


def serve(cfg: Config, *, log: Callable[[str], None], ready: Callable[[str], None]) -> None:
    """Serve a policy until a signal arrives.

    Args:
        cfg: policy and address.
        log: function that prints lines.
        ready: called with the address once clients can connect.

    Raises:
        Interrupted: always, after the signal.
        EmbodyError: the weights are damaged, the components are incompatible, or the address is in use.
    """
    env, spec = build_specs(cfg)
    for package in ("websockets", "msgpack"):
        import_optional(package)
    weights = resolve_initial_weights(cfg, env)
    for name, text in _get_banner_lines(cfg, env, spec, weights):
        log(f"  {name:<10} {text}")
    import torch

    from embodyrl.policies.tensors import get_best_device, seed_everything
    from embodyrl.serving.server import ObservationHandler, PolicyServer

    torch.set_num_threads(available_cores())
    seed_everything(cfg.seed, deterministic=False)
    fresh_heads = weights is not None  # which contain the heads
    request = PolicyRequest(env=env, device=get_best_device(), seed=cfg.seed, trainable=False, fresh_heads=fresh_heads)
    policy = POLICIES.get(cfg.model.model_type).build(cfg.model, request)
    if weights is not None:
        policy.load_weights(weights)
    server = PolicyServer(ObservationHandler(policy, env, get_field_names(cfg.serve)), cfg.serve, log)
    asyncio.run(server.run(ready))


def build_specs(cfg: Config) -> tuple[EnvSpec, PolicySpec]:
    """Return the specs of environment and policy, without loading the simulator or weights.

    Raises:
        ConfigError: incompatible components, or a policy that cannot be served.
    """
    if cfg.reads_rows:
        raise ConfigError(
            f"env.env_type={cfg.env.env_type}: `embodyrl serve` serves only robot policies. Choose a simulator, or "
            "serve the language model with another program, for example vLLM."
        )
    env = ENVS.get(cfg.env.env_type).spec(cfg.env, EnvContext(chunk=cfg.model.num_action_chunks))
    spec = POLICIES.get(cfg.model.model_type).spec(cfg.model, env, 0)
    # The client provides the cameras: the policy reads the first cameras of its environment.
    if num_images := spec.inputs.num_images:
        env = replace(env, cameras=replace(env.cameras, names=env.cameras.names[:num_images]))
    problems = mismatches(env, spec)
    if spec.scripted:
        problems.append(f"model '{spec.name}' cannot be served: it reads the simulator state of an environment.")
    names = get_field_names(cfg.serve)
    if len(names.images) < spec.inputs.num_images and not names.by_position:
        problems.append(
            f"serve.image_names: model '{spec.name}' reads {spec.inputs.num_images} images, but messages contain "
            f"{len(names.images)} ({', '.join(names.images)}). Set serve.image_names to a list of "
            f"{spec.inputs.num_images} keys."
        )
    if problems:
        raise ConfigError(problems)
    return env, spec


def server_banner_lines(cfg: Config) -> list[tuple[str, str]]:
    """Return the lines of the start banner of a server, as pairs of name and text."""
    env, spec = build_specs(cfg)
    return _get_banner_lines(cfg, env, spec, resolve_initial_weights(cfg, env))


def _get_banner_lines(cfg: Config, env: EnvSpec, spec: PolicySpec, weights: Path | None) -> list[tuple[str, str]]:
    names = get_field_names(cfg.serve)
    parts = [*names.images[: spec.inputs.num_images], *names.state[: 1 if spec.inputs.state else 0], names.prompt[0]]
    lines = [
        ("policy", f"{spec.name} · {cfg.model.precision_name} · chunk {spec.num_action_chunks} x {spec.action_dim}"),
        *precision_banner_lines(cfg),
        ("env", f"{env.name}: actions have its units and gripper convention; images must be upright"),
        ("reads", ", ".join(parts) + (f" (state: {env.state_dim} numbers)" if spec.inputs.state else "")),
        ("protocol", cfg.serve.protocol),
    ]
    if cfg.serve.host not in ("127.0.0.1", "localhost", "::1"):
        lines.append(
            ("warning", f"serve.host={cfg.serve.host}: every computer that can reach this port can use the policy")
        )
    return [*lines, *weight_banner_lines(cfg, weights)]
