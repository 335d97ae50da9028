"""Every policy, head and precision on a device other than the first: build, sample, log-probabilities and SFT.

Runs with deterministic algorithms, so that operations without a fixed order raise; text policies, whose generation
then differs, also run without.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakegpu import _ON, FakeGpu
from jobs import write_oft
from settings import model_of

from embodyrl.config.shared import Precision, SamplingSettings
from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.settings import LoraSettings
from embodyrl.types import ActionKind, ActionSpec, BenchmarkSpec, CameraSpec, EnvSpec, Observation

pytestmark = pytest.mark.filterwarnings("error:CUDA reports that you have")  # fork_rng over all devices
TASKS = ("pick up the milk", "open the middle drawer of the cabinet")
OFT: dict[str, dict[str, Any]] = {
    "official": {"image_pipeline": "official", "num_images_in_input": 1, "use_proprio": False},
    "values": {"num_images_in_input": 2, "use_proprio": True, "value_dim": 8, "gradient_checkpointing": True},
    "lora": {"num_images_in_input": 1, "use_proprio": True, "value_dim": 1, "lora": LoraSettings(r=4, lora_alpha=4)},
    "eval": {"use_proprio": False, "trainable": False},
    "l1": {"action_head": "l1", "use_proprio": True},
    "diffusion": {
        "action_head": "diffusion",
        "num_diffusion_steps_inference": 2,
        "num_images_in_input": 2,
        "trainable": False,
    },
    "openvla": {"num_action_chunks": 1, "value_dim": 1},
}


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with FakeGpu() as device:
        yield device
    # A cache of transformers begins with an empty tensor, copied from the host.
    waits = [p for p in device.sync_places if "not pinned" in p and "causal_lm.cache" not in p]
    assert not waits, "copies that wait for the device"


@pytest.fixture(autouse=True)
def deterministic(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.use_deterministic_algorithms(getattr(request, "param", True))
    yield
    torch.use_deterministic_algorithms(False)


def build(name: str, model: dict[str, Any], env: EnvSpec, **request: Any) -> Any:
    settings = {"temperature": 1.6, "device": "cuda:3", "seed": 0, "fresh_heads": True} | request
    cfg = model_of(model_type=name, **model)
    policy = POLICIES.get(name).build(cfg, PolicyRequest(env=env, **settings))
    _ON[-1].sync_places.clear()  # those of building it
    return policy


def learn(loss: torch.Tensor, policy: Any) -> None:
    loss.backward()
    assert all(p.grad is not None for p in policy.module.parameters() if p.requires_grad), "parameters without gradient"
    policy.module.zero_grad()


@pytest.mark.parametrize(
    ("case", "precision"), [*((case, Precision.bf16) for case in OFT), ("official", Precision.fp32)]
)
def test_openvla_oft_tensors_stay_on_the_selected_gpu(
    case: str, precision: Precision, gpu: FakeGpu, tmp_path: Path
) -> None:
    policy = use_oft(case, precision, gpu, tmp_path / "model")
    if case in ("values", "lora"):
        policy.save(tmp_path / "saved")
        policy.load_weights(tmp_path / "saved")
        assert {p.device for p in policy.module.parameters()} == {torch.device("cuda:3")}
        gpu.sync_places.clear()


def use_oft(case: str, precision: Precision, gpu: FakeGpu, folder: Path) -> Any:
    """Build, act, values, score, imitate; images are always preprocessed in float32."""
    words = dict(OFT[case])
    write_oft(folder, layers=2, tiny=True)
    asked = {key: words.pop(key) for key in ("value_dim", "trainable", "gradient_checkpointing") if key in words}
    env = EnvSpec(
        name="e",
        action=ActionSpec(dim=7),
        tasks=TASKS,
        states_per_task=(1, 1),
        cameras=CameraSpec(names=("a", "b"), size=(64, 64), rotation_deg=180 if case == "official" else 0),
        benchmark=BenchmarkSpec(unnorm_key="libero_10"),
        state_dim=8,
    )
    model = {"path": str(folder), "precision": precision, "is_lora": case == "lora", **words}
    policy = build("openvla" if case == "openvla" else "openvla_oft", model, env, **asked)
    cameras, length = policy.spec.inputs.num_images, policy.spec.tokens_per_chunk

    def observe(count: int) -> Observation:
        images = np.zeros((count, cameras, 64, 64, 3), np.uint8)
        said = tuple(TASKS[i % 2] for i in range(count))
        return Observation(images=images, state=np.zeros((count, 8), np.float32), instructions=said)

    assert {p.device for p in policy.module.parameters()} == {torch.device("cuda:3")}
    policy.act(observe(5), noise=np.zeros((5, length), np.float32))
    policy.act(observe(1), noise=None)
    if asked.get("value_dim"):
        policy.values(observe(3))
    if not asked.get("trainable", True):
        return policy
    if "action_head" not in words:
        scores = policy.score(observe(3), np.full((3, length), policy._config.action_vocab_start + 5))
        learn(scores.logprob.sum() + scores.entropy.sum() + scores.value.sum(), policy)
    policy.imitate(observe(2), np.zeros((2, policy.spec.num_action_chunks, 7), np.float32)).loss.sum().backward()
    halved = [place for place, _, dtype in gpu.by_place if "openvla_oft.inputs" in place and dtype == torch.bfloat16]
    assert not halved, f"pixels were prepared in bfloat16, so training sees others than acting: {halved}"
    return policy


@pytest.mark.parametrize("pixels", [False, True], ids=["mlp", "cnn"])
@pytest.mark.parametrize("sizes", [(), (3, 2)], ids=["numbers", "categories"])
def test_actor_critic_tensors_stay_on_the_selected_gpu(sizes: tuple[int, ...], pixels: bool, gpu: FakeGpu) -> None:
    space = ActionSpec(dim=2, kind=ActionKind.box, low=(-1.0, -1.0), high=(1.0, 1.0))
    if sizes:
        space = ActionSpec(dim=2, kind=ActionKind.multi_discrete, sizes=sizes)
    env = EnvSpec(
        name="e",
        action=space,
        tasks=TASKS[:1],
        states_per_task=(1,),
        cameras=CameraSpec(names=("a",) if pixels else (), size=(64, 64) if pixels else (0, 0)),
        state_dim=5,
    )
    model = {"precision": Precision.fp32, "num_action_chunks": 2}
    policy = build("cnn" if pixels else "mlp", model, env, value_dim=1)
    images = np.zeros((3, 1, 64, 64, 3) if pixels else (3, 0, 0, 0, 3), np.uint8)
    seen = Observation(images=images, state=np.zeros((3, 5), np.float32), instructions=TASKS[:1] * 3)
    out = policy.act(seen, noise=np.zeros((3, 4), np.float32))
    policy.act(seen, noise=None)
    policy.values(seen)
    scores = policy.score(seen, out.tokens)
    learn(scores.logprob.sum() + scores.entropy.sum() + scores.value.sum(), policy)
    policy.imitate(seen, out.actions).loss.sum().backward()


@pytest.mark.parametrize(
    ("lora", "precision", "deterministic"),
    [(False, Precision.bf16, True), (False, Precision.bf16, False), (True, Precision.fp32, True)],
    indirect=["deterministic"],
)
def test_causal_lm_tensors_stay_on_the_selected_gpu(lora: bool, precision: Precision, gpu: FakeGpu) -> None:
    env = EnvSpec(
        name="t",
        action=ActionSpec(dim=1),
        tasks=("a",),
        states_per_task=(1,),
        cameras=CameraSpec(names=(), size=(0, 0)),
    )
    sampling = SamplingSettings(top_k=5, top_p=0.9, repetition_penalty=1.1)
    model = {"precision": precision, "num_action_chunks": 4, "is_lora": lora, "lora": {"r": 4, "lora_alpha": 4}}
    gpu.scalar = 0  # the check of the cache finds no gap
    policy = build("causal_lm_tiny", model, env, value_dim=4, sampling=sampling, gradient_checkpointing=not lora)
    asked = Observation(
        images=np.zeros((3, 0), np.uint8), state=np.zeros((3, 0), np.float32), instructions=("1+2=", "a=", "1+2=")
    )
    gpu.scalar = 0  # no reply has ended
    policy.act(asked, noise=np.zeros((3, 4), np.float32))
    policy.act(asked, noise=None)
    policy.values(asked)
    gpu.scalar = 4  # tokens of the longest reply
    scores = policy.score(asked, np.full((3, 4), 7))
    learn(scores.logprob.sum() + scores.entropy.sum() + scores.value.sum(), policy)
    policy.imitate(asked, np.full((3, 4, 1), 7.0, np.float32)).loss.sum().backward()
