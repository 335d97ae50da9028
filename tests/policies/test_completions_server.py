"""Replies by a server in the completions protocol, in a process of its own: a small one, and vLLM's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gates import learn
from processes import MARK
from text_runs import ASKING
from toy_runs import rows

from embodyrl.config.shared import SamplingSettings
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.plan.config import load_config
from embodyrl.plan.texts import sampling_problems
from embodyrl.policies import POLICIES
from embodyrl.policies.causal_lm.settings import TextLoraSettings
from embodyrl.policies.protocol import PolicyRequest, weights_changed
from embodyrl.types import Observation

ASKED = Observation(
    images=np.zeros((3, 0, 0, 0, 3), np.uint8), state=np.zeros((3, 0), np.float32), instructions=("1+2=", "abc", "1+2=")
)


def build(path: Path | None, url: str | None = None, *, lora: bool = False, **more: Any) -> Any:
    factory = POLICIES.get("causal_lm_tiny")
    cfg = factory.settings(
        model_type="causal_lm_tiny",
        num_action_chunks=5,
        precision="fp32",
        path=None if path is None else str(path),
        is_lora=lora,
        lora=TextLoraSettings(r=4, lora_alpha=8),
    )
    backend = "hf" if url is None else "server"
    return factory.build(
        cfg,
        PolicyRequest(
            env=ASKING,
            device="cpu",
            seed=0,
            url=url,
            backend=backend,
            served_model=None if url is None else "tiny",
            **more,
        ),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("served")
    build(None).save(found)
    return found


def vllm_command(folder: Path, port: int) -> list[str]:
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    adapters = ["--enable-lora", "--max-lora-rank", "32"]
    sizes = ["--max-model-len", "128", "--dtype", "float32", "--enforce-eager", "--served-model-name", "tiny"]
    start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    return [*start, *adapters, *sizes]


def wait_for(url: str, process: subprocess.Popen[str], deadline_s: float = 600.0) -> None:
    end = time.monotonic() + deadline_s
    while True:
        try:
            urllib.request.urlopen(f"{url}/models", timeout=5).close()
            return
        except OSError:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < end, f"no answer within {deadline_s} s"
            time.sleep(1.0)


@pytest.fixture(
    scope="module", params=["small", pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def url(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    file = Path(__file__).parents[1] / "completions_server.py"
    # Without the mark: it outlives the single tests.
    env = {key: value for key, value in os.environ.items() if key != MARK}
    env |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    small = request.param == "small"
    command = [sys.executable, str(file), str(folder)] if small else vllm_command(folder, port)
    with subprocess.Popen(command, stdout=subprocess.PIPE if small else None, text=True, env=env) as process:
        if small:
            assert process.stdout is not None
            port = int(process.stdout.readline())
        try:
            url = f"http://127.0.0.1:{port}/v1"
            wait_for(url, process)
            yield url
        finally:
            process.terminate()


@pytest.mark.integration
def test_a_server_writes_what_the_module_would_and_follows_its_adapters(folder: Path, url: str) -> None:
    policy, own = build(folder, url, lora=True), build(folder, lora=True)
    for change in (0.0, 0.02):
        with torch.no_grad():
            for parameter in policy.module.parameters():
                if parameter.requires_grad:
                    parameter += change * torch.randn_like(parameter)
        own.module.load_state_dict(policy.module.state_dict())
        weights_changed(policy.module)
        said, expected = policy.act(ASKED, noise=None), own.act(ASKED, noise=None)
        assert said.tokens.tolist() == expected.tokens.tolist()
        assert said.logprob == pytest.approx(expected.logprob, abs=1e-4)
    drawn = policy.act(ASKED, noise=np.linspace(0.1, 0.9, 15, dtype=np.float32).reshape(3, 5))
    scored = own.score(ASKED, drawn.tokens).logprob.detach().numpy()
    assert drawn.logprob == pytest.approx(scored, abs=1e-4)
    assert drawn.tokens[0].tolist() != drawn.tokens[2].tolist(), "every reply has a seed of its own"


@pytest.mark.integration
def test_log_probabilities_are_those_at_the_temperature(folder: Path, url: str) -> None:
    policy, own = build(folder, url, temperature=0.5), build(folder, temperature=0.5)
    drawn = policy.act(ASKED, noise=np.full((3, 5), 0.3, np.float32))
    assert drawn.logprob == pytest.approx(own.score(ASKED, drawn.tokens).logprob.detach().numpy(), abs=1e-4)


@pytest.mark.integration
def test_parameters_decide_what_is_drawn_and_when_it_ends(folder: Path, url: str) -> None:
    draws = np.linspace(0.1, 0.9, 15, dtype=np.float32).reshape(3, 5)
    plain = build(folder, url).act(ASKED, noise=draws)
    stop = int(plain.tokens[1, 1])
    sampling = SamplingSettings(top_k=3, stop_token_ids=[stop], min_new_tokens=2)
    out = build(folder, url, sampling=sampling).act(ASKED, noise=draws)
    own = build(folder, sampling=sampling)
    assert out.logprob == pytest.approx(own.score(ASKED, out.tokens).logprob.detach().numpy(), abs=1e-4)
    assert ((out.tokens >= 0).sum(1) >= 2).all()
    for row in out.tokens:
        said = row[row >= 0]
        assert not np.isin(said[:-1], own.ends.numpy()).any(), "what ends a reply is its last token"
    greedy = {"stop_token_ids": [int(build(folder).act(ASKED, noise=None).tokens[0, 2])]}
    both = [build(folder, place, sampling=SamplingSettings(**greedy)).act(ASKED, noise=None) for place in (url, None)]
    assert both[0].tokens.tolist() == both[1].tokens.tolist()


@pytest.mark.integration
def test_other_weights_and_a_server_that_is_not_there_are_named(folder: Path, url: str) -> None:
    other = build(folder, url)
    with torch.no_grad():
        next(other.module.parameters()).mul_(1.5)
    with pytest.raises(EmbodyError, match="is not the actor's"):
        other.act(ASKED, noise=None)
    with pytest.raises(EmbodyError, match="did not answer models"):
        build(folder, "http://127.0.0.1:9/v1").act(ASKED, noise=None)


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_adapters_are_trained_on_replies_of_a_server(tmp_path: Path, folder: Path, url: str) -> None:
    words = ("model=causal_lm", f"model.path={folder}", "model.is_lora=true", "model.precision=fp32")
    server = ("rollout.backend=server", f"rollout.url={url}", "rollout.served_model=tiny", "launcher=inline")
    few = ("runner.max_steps=2", "env.train.total_num_envs=16", "eval.episodes=4", "env.eval.total_num_envs=4")
    sizes = ("actor.global_batch_size=16", "actor.micro_batch_size=16")
    result = learn(tmp_path, "copy", *words, *server, *few, *sizes)
    gaps = [row["actor/logprob_gap"] for row in rows(result.run) if "actor/logprob_gap" in row]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4


def test_what_a_server_cannot_do_is_refused() -> None:
    words = ["env=text/copy", "model=causal_lm_tiny", "rollout.backend=server"]
    with pytest.raises(ConfigError, match=r"rollout\.url is not set"):
        load_config("train", words)
    cfg = load_config("train", [*words, "rollout.url=http://127.0.0.1:9/v1"])
    policy = POLICIES.get("causal_lm_tiny").spec(cfg.model, ASKING, 0)
    assert "only low-rank adapters" in " ".join(sampling_problems(cfg, policy))
    lora = cfg.updated({"model.is_lora": True})
    assert sampling_problems(lora, policy) == []
    assert len(sampling_problems(lora.updated({"runner.deterministic": True}), policy)) == 1
