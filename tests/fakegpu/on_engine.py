"""New weights reach vLLM where the optimizer is fused, which leaves the parameters' own counters as they are."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakegpu import FakeGpu
from settings import model_of

from embodyrl.config.shared import Precision, SamplingSettings
from embodyrl.policies import POLICIES
from embodyrl.policies.causal_lm.engine import VllmEngine
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import EnvSpec, Observation
from embodyrl.workers.settings import ActorSettings
from embodyrl.workers.training import Optimization

pytestmark = pytest.mark.filterwarnings("error:CUDA reports that you have")  # fork_rng over all devices


class Llm:
    """vLLM's own interface, as far as we call it."""

    def __init__(self, **settings: Any) -> None:
        self.reloads: list[int] = []
        self.seeds: set[int | None] = set()

    def collective_rpc(self, name: str, kwargs: dict[str, Any]) -> None:
        assert name == "reload_weights"
        self.reloads.append(len(list(kwargs["weights_iterator"])))

    def reset_prefix_cache(self) -> None: ...

    def generate(self, asked: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        self.seeds |= {getattr(one, "seed", None) for one in params}
        said = SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=4.0)}])
        return [SimpleNamespace(outputs=[said]) for _ in asked]


def test_every_update_is_reloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = Llm, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    env = EnvSpec(name="t", action_dim=1, tasks=("a",), states_per_task=(1,), cameras=(), image_size=(0, 0))
    cfg = model_of(model_type="causal_lm_tiny", precision=Precision.bf16, num_action_chunks=4)
    request = PolicyRequest(env=env, temperature=1.0, device="cuda:3", seed=0, backend="vllm")
    asked = Observation(
        images=np.zeros((2, 0), np.uint8), state=np.zeros((2, 0), np.float32), instructions=("1=", "2=")
    )
    with FakeGpu(scalar=4.0):  # the longest reply, and the log-probability that the engine is checked against
        policy: Any = POLICIES.get("causal_lm_tiny").build(cfg, request)
        engine = VllmEngine(
            lambda _: None,
            dtype="bfloat16",
            temperature=1.0,
            sampling=SamplingSettings(),
            seed=0,
            gpu_share=0.5,
            arguments={},
        )
        policy._engine = engine  # fake weights cannot be saved for vLLM to read
        optimization = Optimization(policy.module, ActorSettings().optim, 10)
        assert optimization.optimizer.defaults["fused"]
        policy.act(asked, noise=np.zeros((2, 4), np.float32))
        for update in range(3):
            assert len(engine._llm.reloads) == update
            policy.score(asked, np.full((2, 4), 7)).logprob.sum().backward()
            optimization.step(0)
            optimization.zero_grad()
            for _ in range(2):
                policy.act(asked, noise=np.zeros((2, 4), np.float32))
    assert engine._llm.seeds == {None}, "vLLM draws replies that have seeds one after the other"
    assert engine._llm.reloads == [len(list(policy.module.lm.parameters()))] * 3
