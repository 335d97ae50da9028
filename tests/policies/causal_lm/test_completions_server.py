"""Replies from a server with the completions API in a separate process: a small one and vLLM."""

from __future__ import annotations

import json
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
from embodyrl.monitor.history import read_episodes
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.plan.generation import generation_problems
from embodyrl.policies import POLICIES
from embodyrl.policies.causal_lm.server import ServedReference
from embodyrl.policies.causal_lm.settings import TextLoraSettings
from embodyrl.policies.protocol import PolicyRequest, mark_weights_changed
from embodyrl.types import Observation

KL = "algorithm.kl_beta=1"
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


def vllm_command(folder: Path, port: int, *, adapted: bool) -> list[str]:
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    adapters = ["--enable-lora", "--max-lora-rank", "32"] if adapted else []
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


BOTH = ["small", pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]


@pytest.fixture(scope="module")
def small_url(folder: Path) -> Iterator[str]:
    yield from serve(folder, small=True, adapted=True)


@pytest.fixture(scope="module", params=BOTH)
def url(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "small":
        yield request.getfixturevalue("small_url")
    else:
        yield from serve(folder, small=False, adapted=True)


@pytest.fixture(scope="module", params=BOTH)
def teacher_url(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Return a server without adapters; with adapters vLLM 0.32 on a CPU fails at log-probabilities of prompts."""
    if request.param == "small":
        yield request.getfixturevalue("small_url")
    else:
        yield from serve(folder, small=False, adapted=False)


def serve(folder: Path, *, small: bool, adapted: bool) -> Iterator[str]:
    file = Path(__file__).parents[2] / "completions_server.py"
    # Without the mark: it outlives the single tests.
    env = {key: value for key, value in os.environ.items() if key != MARK}
    env |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [sys.executable, str(file), str(folder)] if small else vllm_command(folder, port, adapted=adapted)
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
def test_server_replies_match_the_module_after_adapter_updates(folder: Path, url: str) -> None:
    policy, own = build(folder, url, lora=True), build(folder, lora=True)
    for change in (0.0, 0.02):
        with torch.no_grad():
            for parameter in policy.module.parameters():
                if parameter.requires_grad:
                    parameter += change * torch.randn_like(parameter)
        own.module.load_state_dict(policy.module.state_dict())
        mark_weights_changed(policy.module)
        said, expected = policy.act(ASKED, noise=None), own.act(ASKED, noise=None)
        assert said.tokens.tolist() == expected.tokens.tolist()
        assert said.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert len([*Path(policy._engine._folder.name).iterdir()]) == 1, "earlier versions are deleted"
    drawn = policy.act(ASKED, noise=np.linspace(0.1, 0.9, 15, dtype=np.float32).reshape(3, 5))
    scored = own.score(ASKED, drawn.tokens).logprob.detach().numpy()
    assert drawn.logprob == pytest.approx(scored, abs=1e-4)
    assert drawn.tokens[0].tolist() != drawn.tokens[2].tolist(), "every reply has a seed of its own"


@pytest.mark.integration
def test_log_probabilities_include_the_temperature(folder: Path, url: str) -> None:
    policy, own = build(folder, url, temperature=0.5), build(folder, temperature=0.5)
    drawn = policy.act(ASKED, noise=np.full((3, 5), 0.3, np.float32))
    assert drawn.logprob == pytest.approx(own.score(ASKED, drawn.tokens).logprob.detach().numpy(), abs=1e-4)


@pytest.mark.integration
def test_sampling_parameters_are_sent_to_the_server(folder: Path, url: str) -> None:
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
        assert not np.isin(said[:-1], own.end_tokens.numpy()).any(), "what ends a reply is its last token"
    greedy = {"stop_token_ids": [int(build(folder).act(ASKED, noise=None).tokens[0, 2])]}
    both = [build(folder, place, sampling=SamplingSettings(**greedy)).act(ASKED, noise=None) for place in (url, None)]
    assert both[0].tokens.tolist() == both[1].tokens.tolist()


@pytest.mark.integration
def test_server_top_tokens_match_the_module(folder: Path, url: str) -> None:
    draws = np.linspace(0.1, 0.9, 15, dtype=np.float32).reshape(3, 5)
    out = build(folder, url, temperature=0.5, top=2).act(ASKED, noise=draws)
    own = build(folder, temperature=1.0, top=2)
    for tokens, told in zip(out.tokens, map(json.loads, out.top), strict=True):
        said = tokens[tokens >= 0]
        assert len(told) == len(said)
        assert [step[0][0] for step in told] == [own.tokenizer.decode(int(token)) for token in said]
        assert all(step[0][1] <= step[1][1] and step[1][1] >= step[2][1] for step in told)
    greedy = [build(folder, place, top=2).act(ASKED, noise=None).top for place in (url, None)]
    for theirs, ours in zip(*(map(json.loads, one) for one in greedy), strict=True):
        assert [[name for name, _ in step] for step in theirs] == [[name for name, _ in step] for step in ours]
        assert np.array([[p for _, p in step] for step in theirs]) == pytest.approx(
            np.array([[p for _, p in step] for step in ours]), abs=2e-3
        )
        assert all(step[0] == step[1] for step in ours), "a greedy token is the most probable one"


@pytest.mark.integration
def test_served_teacher_matches_a_local_teacher(folder: Path, teacher_url: str) -> None:
    student = build(None, value_dim=5)
    with torch.no_grad():
        for parameter in student.module.parameters():
            parameter.mul_(1.1)
    teacher = student.build_served_reference(teacher_url, "tiny")
    said = student.act(ASKED, noise=np.linspace(0.1, 0.9, 15, dtype=np.float32).reshape(3, 5)).tokens
    said[1, 2:] = -1
    theirs, ours = teacher.score(ASKED, said).logprob, build(folder).score(ASKED, said).logprob
    assert theirs.numpy() == pytest.approx(ours.detach().numpy(), abs=1e-4)
    assert (theirs[1, 2:] == 0).all()
    assert abs(theirs - student.score(ASKED, said).logprob).max() > 0.01, "it is not the student itself"
    with pytest.raises(EmbodyError, match="did not answer completions"):
        ServedReference(teacher_url, "tiny", student.reader, 10**6)
    with pytest.raises(EmbodyError, match="not the model other"):
        student.build_served_reference(teacher_url, "other")


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_distillation_from_a_server_matches_a_local_teacher(tmp_path: Path, folder: Path, teacher_url: str) -> None:
    few = ("runner.max_steps=2", "env.train.total_num_envs=16", "eval.episodes=4", "env.eval.total_num_envs=4")
    few = (*few, "actor.global_batch_size=16", "actor.micro_batch_size=16", "launcher=inline", "model.precision=fp32")
    kl = (KL, "algorithm.kl_penalty_type=k2", "algorithm.reward_scale=0", "seed=5")
    taught = []
    for name, value in (("url", teacher_url), ("path", folder)):
        result = learn(tmp_path, "copy", *few, *kl, f"algorithm.reference_{name}={value}", name=name)
        taught.append([row["actor/ref_kl"] for row in rows(result.run) if "actor/ref_kl" in row])
    assert len(taught[0]) == 2
    assert taught[0][0] > 0
    assert taught[0] == pytest.approx(taught[1], rel=1e-3)


@pytest.mark.integration
def test_wrong_weights_and_missing_server_are_errors(folder: Path, url: str) -> None:
    # Whether the actor finds the server's token more probable than the server, or less.
    for factor in (1.5, 0.5):
        other = build(folder, url)
        with torch.no_grad():
            other.module.lm.lm_head.weight.mul_(factor)
        with pytest.raises(EmbodyError, match="differs from the actor"):
            other.act(ASKED, noise=None)
    with pytest.raises(EmbodyError, match="did not answer models"):
        build(folder, "http://127.0.0.1:9/v1").act(ASKED, noise=None)


def served(url: str) -> set[str]:
    """Return the names of the models and adapters of a server."""
    with urllib.request.urlopen(f"{url}/models", timeout=60) as answer:
        return {entry["id"] for entry in json.load(answer)["data"]}


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_adapters_are_trained_on_replies_of_a_server(tmp_path: Path, folder: Path, url: str) -> None:
    words = ("model=causal_lm", f"model.path={folder}", "model.is_lora=true", "model.precision=fp32")
    server = ("rollout.backend=server", f"rollout.url={url}", "rollout.served_model=tiny", "launcher=inline")
    few = (
        "runner.max_steps=2",
        "env.train.total_num_envs=16",
        "eval.episodes=4",
        "env.eval.total_num_envs=4",
        "rollout.logprobs=2",
    )
    sizes = ("actor.global_batch_size=16", "actor.micro_batch_size=16")
    before = served(url)
    result = learn(tmp_path, "copy", *words, *server, *few, *sizes)
    assert len(served(url) - before) == 1, "only the newest of three adapters is still there"
    gaps = [row["actor/logprob_gap"] for row in rows(result.run) if "actor/logprob_gap" in row]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
    evaluated = sorted(Path(result.run).rglob("episodes.jsonl"))
    for row in read_episodes(evaluated[-1]):
        said = [token for (token, _), *_ in row.logprobs if not token.startswith("<")]  # specials are no part of it
        assert "".join(said) == row.conversation[-1][1]
        assert all(len(step) == 3 for step in row.logprobs)
        assert len(row.warnings) == min(5, len(row.logprobs))


def test_unsupported_server_options_are_rejected() -> None:
    words = ["env=text/copy", "model=causal_lm_tiny", "rollout.backend=server"]
    with pytest.raises(ConfigError, match=r"needs a URL, for example rollout\.url"):
        load_config("train", words)
    cfg = load_config("train", [*words, "rollout.url=http://127.0.0.1:9/v1"])
    policy = POLICIES.get("causal_lm_tiny").spec(cfg.model, ASKING, 0)
    assert "only low-rank adapters" in " ".join(generation_problems(cfg, policy))
    lora = cfg.updated({"model.is_lora": True})
    assert generation_problems(lora, policy) == []
    assert len(generation_problems(lora.updated({"runner.deterministic": True}), policy)) == 1
    teacher = load_config("train", [*words[:2], "algorithm.reference_url=http://127.0.0.1:9/v1", KL])
    assert generation_problems(teacher, policy) == []
    warm = teacher.updated({"algorithm.sampling_params.temperature": 0.5})
    assert any("probabilities of a reply at temperature 1" in problem for problem in generation_problems(warm, policy))
    with pytest.raises(ConfigError, match="remove reference_path"):
        load_config("train", [*words[:2], "algorithm.reference_url=http://x:9/v1", "algorithm.reference_path=x", KL])
    with pytest.raises(ConfigError, match=r"algorithm\.reference_url: for text policies only"):
        build_run_plan(load_config("train", ["algorithm.reference_url=http://x:9/v1", KL]), training=True)
    warm = load_config("train", [*words[:2], "rollout.backend=vllm", "rollout.logprobs=2"]).updated(
        {"algorithm.sampling_params.temperature": 0.5}
    )
    assert any("at algorithm.sampling_params.temperature" in problem for problem in generation_problems(warm, policy))
