"""vLLM receives new weights after fused optimizer steps, which do not change the version counters of parameters.

vLLM sleeps during updates if configured.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakegpu import FakeGpu
from jobs import GIB, Job, run
from settings import model_of

from embodyrl.config.shared import Precision
from embodyrl.devices import Gpus
from embodyrl.learners.settings import ActorSettings
from embodyrl.learners.training import Optimization
from embodyrl.policies import POLICIES
from embodyrl.policies.causal_lm.engine import VllmEngine
from embodyrl.policies.causal_lm.policy import CausalLMPolicy
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import ActionSpec, CameraSpec, EnvSpec, Observation

pytestmark = pytest.mark.filterwarnings("error:CUDA reports that you have")  # fork_rng over all devices


ALL = {"weights", "kv_cache"}


class Llm:
    """The part of vLLM's interface that embodyrl calls; sleep level 2 keeps no memory."""

    def __init__(self, **settings: Any) -> None:
        self.reloads: list[int] = []
        self.seeds: set[int | None] = set()
        self.sleeps = settings.get("enable_sleep_mode", False)
        self.awake, self.loaded, self.naps = set(ALL), True, 0

    def sleep(self, level: int) -> None:
        assert self.sleeps, "the engine was not built for it"
        assert level == 2, "weights in the host's memory are of no use"
        assert self.awake == ALL
        self.awake, self.loaded, self.naps = set(), False, self.naps + 1

    def wake_up(self, tags: list[str]) -> None:
        assert not self.awake & {*tags}
        self.awake |= {*tags}

    def collective_rpc(self, name: str, kwargs: dict[str, Any]) -> None:
        assert name == "reload_weights"
        assert "weights" in self.awake, "weights are written where no memory is"
        assert self.loaded or "kv_cache" not in self.awake, "copies of weights and the cache are there at once"
        self.reloads.append(len(list(kwargs["weights_iterator"])))
        self.loaded = True

    def reset_prefix_cache(self) -> None: ...

    def generate(self, asked: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        assert self.awake == ALL
        assert self.loaded
        self.seeds |= {getattr(one, "seed", None) for one in params}
        said = SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=4.0)}])
        return [SimpleNamespace(outputs=[said]) for _ in asked]


ENV = EnvSpec(
    name="t", action=ActionSpec(dim=1), tasks=("a",), states_per_task=(1,), cameras=CameraSpec(names=(), size=(0, 0))
)


def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the replacement of vLLM."""
    vllm = ModuleType("vllm")
    vllm.__spec__ = ModuleSpec("vllm", None)  # else it is not installed
    vllm.LLM, vllm.SamplingParams = Llm, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def engine_of(**arguments: Any) -> VllmEngine:
    """Return an engine without saved weights, because fake weights cannot be saved."""
    request = PolicyRequest(env=ENV, device="cuda:3", seed=0, engine_memory_fraction=0.5, engine=arguments)
    return VllmEngine(write_config, request, dtype="bfloat16")


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "asleep"])
def test_vllm_reloads_weights_after_every_update(monkeypatch: pytest.MonkeyPatch, sleeps: bool) -> None:
    stub(monkeypatch)
    cfg = model_of(model_type="causal_lm_tiny", precision=Precision.bf16, num_action_chunks=4)
    request = PolicyRequest(env=ENV, temperature=1.0, device="cuda:3", seed=0, backend="vllm")
    asked = Observation(
        images=np.zeros((2, 0), np.uint8), state=np.zeros((2, 0), np.float32), instructions=("1=", "2=")
    )
    with FakeGpu(scalar=4.0):  # the longest reply, and the log-probability that the engine is checked against
        policy: Any = POLICIES.get("causal_lm_tiny").build(cfg, request)
        policy.free_engine_memory()  # before anybody acted there is nothing to give up
        engine = policy._engine = engine_of(enable_sleep_mode=sleeps)
        optimization = Optimization(policy.module, ActorSettings().optim, 10)
        assert optimization.optimizer.defaults["fused"]
        policy.act(asked, noise=np.zeros((2, 4), np.float32))
        for update in range(3):
            assert len(engine._llm.reloads) == update
            for _ in range(2):  # a reference that scores, then the update
                policy.free_engine_memory()
            policy.score(asked, np.full((2, 4), 7)).logprob.sum().backward()
            optimization.step(0)
            optimization.zero_grad()
            for _ in range(2):
                policy.act(asked, noise=np.zeros((2, 4), np.float32))
        policy.free_engine_memory()  # an update that left the weights as they are
        policy.act(asked, noise=None)
    assert engine._llm.seeds == {None}, "vLLM draws replies that have seeds one after the other"
    assert engine._llm.reloads == [len(list(policy.module.lm.parameters()))] * (4 if sleeps else 3)
    assert engine._llm.naps == (4 if sleeps else 0)


def test_vllm_sleeps_during_weight_updates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub(monkeypatch)
    started: list[VllmEngine] = []

    def start(policy: Any) -> VllmEngine:
        started.append(engine_of(**policy._request.engine))
        return started[-1]

    monkeypatch.setattr(CausalLMPolicy, "_start_engine", start)
    words = ("actor.fsdp.size=1", "rollout.backend=vllm", "algorithm.kl_beta=0.01")
    monkeypatch.setattr(Gpus, "free", 7 * GIB)  # so small that the plan chooses it
    run(Job(name="asleep", model="0.5b", layers=1, words=words, act=2, train=2), tmp_path)
    (engine,) = started
    assert engine._llm.naps == 1
    assert not engine._llm.awake, "both updates ran beside an engine that had its memory"
