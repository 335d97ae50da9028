import json
import shutil
from pathlib import Path

import pytest
from llama_tokenizer import write_tokenizer
from safetensors.torch import load_file
from settings import model_of

from embodyrl.config.shared import Precision
from embodyrl.policies.openvla_oft import FACTORY, OPENVLA
from embodyrl.policies.openvla_oft.policy import OpenVlaOftPolicy
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import ActionSpec, BenchmarkSpec, CameraSpec, EnvSpec

GOLDEN = Path(__file__).parents[2] / "golden" / "openvla_oft"
TASKS = ("pick up the black bowl", "put the")


@pytest.fixture(scope="session")
def golden():
    """Load one golden file by name."""
    return lambda name: load_file(GOLDEN / "expected" / f"{name}.safetensors")


@pytest.fixture(scope="session")
def golden_dir():
    return GOLDEN


@pytest.fixture
def checkpoint(tmp_path):
    """A complete public-layout copy of the golden checkpoint, tokenizer included; the test may damage it."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / "tiny_oft", folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def env_spec():
    return EnvSpec(
        name="libero",
        action=ActionSpec(dim=7),
        tasks=TASKS,
        states_per_task=(1, 1),
        cameras=CameraSpec(names=("agentview",), size=(64, 64), rotation_deg=180),
        benchmark=BenchmarkSpec(unnorm_key="libero_10"),
    )


@pytest.fixture(scope="session")
def make_policy(env_spec):
    """Build a policy from a folder; keywords go to the model config or to the request."""

    def make(
        folder,
        *,
        value_dim=0,
        temperature=1.6,
        trainable=True,
        seed=0,
        env=env_spec,
        factory=FACTORY,
        recompute=False,
        fresh_heads=False,
        **config,
    ):
        config.setdefault("precision", Precision.fp32)
        cfg = model_of("openvla" if factory is OPENVLA else "openvla_oft", path=str(folder), **config)
        request = PolicyRequest(
            env=env,
            value_dim=value_dim,
            temperature=temperature,
            device="cpu",
            seed=seed,
            trainable=trainable,
            gradient_checkpointing=recompute,
            fresh_heads=fresh_heads,
        )
        assert factory.validate(cfg) == []
        policy = factory.build(cfg, request)
        assert isinstance(policy, OpenVlaOftPolicy)
        policy.costs = factory.costs(cfg, env, value_dim)
        return policy

    return make


@pytest.fixture(scope="session")
def edit_json():
    """Change top-level fields of a JSON file, or remove them (None)."""

    def edit(path, **fields):
        data = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))

    return edit
