"""The memory plan is close to measured use and rejects runs that cannot fit."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_host import H100, of_size, stub_nvidia_smi
from processes import workers_of
from settings import model_of
from text_runs import ASKING, text_config
from toy_runs import TOY_COLLECT, TOY_OFT, running_crew, toy_config
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from embodyrl import devices
from embodyrl.checkpoint.tensors import load_tensors, save_tensors
from embodyrl.commands import COMMANDS
from embodyrl.commands.banner import require_disk
from embodyrl.commands.collect import build_collection_plan
from embodyrl.commands.episode_storage import record_every_step
from embodyrl.config.paths import assets_dir
from embodyrl.config.shared import Precision
from embodyrl.data.layout import Card, build_info
from embodyrl.data.writer import DatasetWriter
from embodyrl.errors import ConfigError
from embodyrl.plan import memory
from embodyrl.plan import memory_limits as limits
from embodyrl.plan.build import build_run_plan, plan_devices
from embodyrl.plan.config import load_config
from embodyrl.plan.episodes import train_episodes
from embodyrl.plan.memory import plan_memory
from embodyrl.plan.memory_limits import require_devices, require_memory, resource_banner_lines
from embodyrl.plan.memory_plan import GIB, MemoryPlan
from embodyrl.policies import POLICIES
from embodyrl.policies.causal_lm.sizes import CHUNK_LOGITS, TextSizes
from embodyrl.policies.protocol import PolicyRequest, estimate_policy_costs
from embodyrl.scheduler.event_loop import Actors
from embodyrl.scheduler.rollout import Rollout
from embodyrl.scheduler.start import suggest_fewer_records
from embodyrl.types import PolicyCosts

SOUP = ("model.path=assets/openvla_oft_tiny_soup", "model.unnorm_key=libero_object_no_noops", "model.is_lora=true")
LARGE = ("env.train.total_num_envs=16", "actor.global_batch_size=32", "actor.micro_batch_size=32")


def peak(pid: int) -> int:
    """Return the peak resident memory of a process in bytes, without the arena."""
    status = Path(f"/proc/{pid}/status").read_text()
    high, shared = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) * 1024 for name in ("VmHWM", "RssShmem"))
    return high - shared


@pytest.mark.integration
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "words",
    [TOY_OFT, (*TOY_OFT, *LARGE), (*TOY_OFT, *SOUP, "actor.gradient_checkpointing=true")],
    ids=["default", "large batch", "adapters, recomputed"],
)
def test_memory_estimate_is_close_to_the_measured_peak(tmp_path, words):
    planned, measured = planned_and_measured(
        tmp_path, toy_config(tmp_path, "launcher=local", "env.kwargs.echo=true", *words)
    )
    assert planned == pytest.approx(measured, rel=0.15)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_memory_estimate_includes_the_activations_of_a_small_flow_policy(tmp_path):
    words = ("env=tabletop", "model=flow_small", "algorithm.rollout_epoch=1", "launcher=local")
    planned, measured = planned_and_measured(tmp_path, load_config("train", [*words, f"runner.output_dir={tmp_path}"]))
    assert planned == pytest.approx(measured, rel=0.1)


@pytest.mark.sim
@pytest.mark.timeout(400)
def test_memory_estimate_of_a_libero_worker_is_close_to_the_measured_peak(tmp_path):
    words = ["env=libero_object", "env.render_profile=lean", "env.train.task_ids=[0]", "env.train.total_num_envs=2"]
    words += ["env.train.max_episode_steps=8", "algorithm.group_size=2", "runner.val_check_interval=-1"]
    words += ["model=flow_small", "launcher=local", "launcher.env_workers=1", f"runner.output_dir={tmp_path}"]
    cfg = load_config("train", words)
    with running_crew(tmp_path, cfg=cfg):
        pass  # the first start on a machine reduces meshes, which takes 270 MiB more
    planned, measured = planned_and_measured(tmp_path, cfg, updates=False, worker="env_0")
    assert planned == pytest.approx(measured, rel=0.1)


@pytest.mark.integration
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("lora", "reply"), [(False, 24), (True, 6)], ids=["full", "lora, prompts shared"])
def test_memory_estimate_of_a_language_model_is_close_to_the_measured_peak(tmp_path, lora, reply):
    """Activations are a third of the peak or more; without reuse of freed blocks they take twice their size."""
    words = (*language_model(tmp_path, reply), f"model.is_lora={lora}", "env.train.total_num_envs=64")
    words += ("actor.micro_batch_size=64", "actor.global_batch_size=64", "algorithm.entropy_bonus=1e-3")
    planned, measured = planned_and_measured(tmp_path, text_config(tmp_path, *words))
    # Equal runs differ by up to 26 %: 0.94 to 1.09 GiB for "full" (planned 1.17), 0.67 to 0.87 GiB for "lora" (0.78).
    assert 0.9 < planned / measured < 1.3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_memory_estimate_includes_the_key_value_cache_of_a_rollout(tmp_path):
    words = (*language_model(tmp_path, 48), "model.is_lora=true", "env.train.total_num_envs=192")
    words += ("actor.micro_batch_size=1", "actor.global_batch_size=192", "launcher.env_workers=1")
    words += ("rollout.pipeline_stage_num=1",)
    planned, measured = planned_and_measured(tmp_path, text_config(tmp_path, *words), updates=False)
    assert planned == pytest.approx(measured, rel=0.1)


def language_model(tmp_path, reply):
    """Save a language model with random weights; return overrides for it and for replies of `reply` tokens."""
    folder = tmp_path / "model"
    AutoTokenizer.from_pretrained(assets_dir() / "causal_lm_tiny").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=512, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    lengths = (f"algorithm.sampling_params.{key}_new_tokens={reply}" for key in ("max", "min"))
    words = ("launcher=local", "model=causal_lm", f"model.path={folder}", "model.precision=fp32")
    return *words, "algorithm.group_size=8", *lengths


def planned_and_measured(folder, cfg, *, updates=True, worker="policy"):
    """Return the planned peak of a worker, and that of one rollout with its update, in bytes."""
    with running_crew(folder, cfg=cfg) as stage:
        run_plan, workers = stage.run_plan, stage.workers
        actors = Actors(workers.scheduler, workers.arena, run_plan.algorithm, run_plan)
        plan = train_episodes(run_plan.cfg, run_plan.env, 0, counts_chunk_steps=False)
        rollout = workers.scheduler.collect(Rollout(plan))
        if updates:
            actors.update(0, rollout, run_plan.algorithm.prepare(rollout.episodes, actors.score(rollout)))
        workers.scheduler.release(rollout)
        planned = plan_memory(run_plan)
        expected = planned.policy if worker == "policy" else planned.env_worker
        return expected, peak(workers_of(os.getpid())[worker])


def test_sharding_divides_weights_and_moments(tmp_path):
    one = plan_memory(build_run_plan(toy_config(tmp_path), training=True))
    four = build_run_plan(toy_config(tmp_path, "launcher=local", "actor.fsdp.size=4"), training=True)
    assert plan_memory(four).weights == one.weights // 4
    assert plan_memory(four).optimizer == one.optimizer // 4
    assert plan_memory(four).gathered == one.weights, "whole while acting"
    replicas = build_run_plan(
        toy_config(tmp_path, "launcher=local", "actor.fsdp.size=4", "actor.fsdp.shard_size=2"), training=True
    )
    assert plan_memory(replicas).optimizer == one.optimizer // 2


def test_rollout_processes_hold_full_weights(tmp_path):
    words = (*TOY_OFT, "launcher=local", "actor.fsdp.size=2", "rollout.mode=disaggregated", "rollout.num_workers=3")
    run_plan = build_run_plan(toy_config(tmp_path, *words, "model.precision=bf16"), training=True)
    plan = plan_memory(run_plan)
    assert plan.gathered == 0
    assert plan.inference - plan.process == 4 * run_plan.policy_costs.num_parameters, "float32 until it is halved"
    assert "for each rollout process" in plan.lines(2, 1)[1][1]
    with pytest.raises(ConfigError, match="of memory"):
        require_memory(run_plan, replace(plan, inference=10_000 * GIB))


def test_out_of_memory_plan_is_rejected_with_suggested_keys(tmp_path):
    run_plan = build_run_plan(toy_config(tmp_path), training=True)
    plan = plan_memory(run_plan)
    require_memory(run_plan, plan)
    with pytest.raises(ConfigError, match=r"needs about .*free.*actor.micro_batch_size"):
        require_memory(run_plan, replace(plan, optimizer=10_000 * GIB))
    with pytest.raises(ConfigError, match=r"env workers.*env.train.total_num_envs"):
        require_memory(run_plan, replace(plan, env_worker=10_000 * GIB))


def test_evaluation_is_planned_and_unused_settings_are_suggested(tmp_path, monkeypatch):
    plan = build_run_plan(
        load_config("eval", ["env=tabletop", "model=flow_small", "launcher.env_workers=2"]), training=False
    )
    ((_, first), _) = resource_banner_lines(plan)
    assert "weights" in first
    assert "optimizer" not in first
    monkeypatch.setattr(limits, "available_bytes", lambda: 2**20)
    with pytest.raises(ConfigError, match=r"Try launcher.env_workers below \d+, env.eval.total_num_envs") as raised:
        resource_banner_lines(plan)
    assert not any(key in str(raised.value) for key in ("micro_batch", "is_lora", "checkpointing", "actor ranks"))
    words = ["actor.micro_batch_size=1", "actor.gradient_checkpointing=true", "launcher.env_workers=1"]
    learner = build_run_plan(toy_config(tmp_path, *words), training=True)
    with pytest.raises(ConfigError, match="free") as raised:
        resource_banner_lines(learner)
    assert not any(key in str(raised.value) for key in ("micro_batch", "checkpointing=", "env_workers below"))


def test_memory_plan_includes_separate_critic_and_teacher(tmp_path):
    """Fails if both are assumed to have the size of the policy, or are ignored."""
    cfg = model_of(model_type="causal_lm_tiny", precision=Precision.fp32, num_action_chunks=4)
    policy = POLICIES.get(cfg.model_type).build(cfg, PolicyRequest(env=ASKING, device="cpu", seed=0))
    for name, more in (("critic", 1_000), ("teacher", 10_000_000)):
        (tmp_path / name).mkdir()
        policy.save(tmp_path / name)
        save_tensors(tmp_path / name / "more.safetensors", {"more": torch.zeros(more)})
    own = sum(tensor.numel() for tensor in load_tensors(tmp_path / "critic" / "model.safetensors").values())

    def plan(*words):
        return plan_memory(build_run_plan(text_config(tmp_path, *words), training=True))

    ppo = ("algorithm=ppo", "algorithm.reward_type=action_level", "actor.fsdp.size=1")
    alone, apart = plan(*ppo), plan(*ppo, f"critic.path={tmp_path}/critic")
    assert apart.weights - alone.weights == apart.gradients - alone.gradients == 4 * (own + 1_000)
    assert apart.optimizer - alone.optimizer == 8 * (own + 1_000)
    assert apart.activations > alone.activations
    kl = ("algorithm.kl_beta=0.1", "model.precision=fp32")
    assert plan(*kl).reference == 4 * estimate_policy_costs(cfg, ASKING, 0).num_parameters
    assert plan(*kl, f"algorithm.reference_path={tmp_path}/teacher").reference == 4 * (own + 10_000_000)


def text_sizes(*, uses_bf16: bool = False, adapters: bool = True) -> TextSizes:
    sizes = {"vocabulary": 1000, "width": 8, "hidden": 16, "layers": 2, "kv_width": 8}
    return TextSizes(**sizes, tied=True, supports_sharing=True, uses_bf16=uses_bf16, adapters=adapters)


def test_log_probs_of_short_replies_need_less_than_a_chunk_of_logits():
    """Three float32 copies of the logits of all replies, at most those of a chunk; and the gradients of the matrix."""
    size = text_sizes()
    reply, chunk = size.logit_bytes(10)
    assert (reply, chunk) == (120_000, 12 * CHUNK_LOGITS)
    adapters = PolicyCosts(logit_bytes=(reply, chunk), output_gradient_bytes=size.output_gradient_bytes)
    assert adapters.estimate_logprob_bytes(4) == (480_000, 480_000)
    assert adapters.estimate_logprob_bytes(1e9) == (chunk, chunk)
    whole = PolicyCosts(
        logit_bytes=(reply, chunk),
        output_gradient_bytes=text_sizes(uses_bf16=True, adapters=False).output_gradient_bytes,
    )
    assert whole.estimate_logprob_bytes(0) == (64_000, 96_000), "the gradients are added after the logits"
    assert whole.estimate_logprob_bytes(4) == (512_000, 528_000)


def test_longest_sample_of_a_dialogue_contains_all_replies_and_tool_answers(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "12345", "answer": "1"}) + "\n")
    own = (f"data.path={rows}", "data.val_share=0", "algorithm.sampling_params.max_new_tokens=7")
    plans = [
        build_run_plan(text_config(tmp_path, *own, *words), training=True).policy_costs.sample_tokens
        for words in ((), ("env.tools=[calculator]", "env.max_turns=3"))
    ]
    bars = 2
    assert plans == [5 + 7, 5 + 3 * 7 + 2 * (bars + 72 // 4)], "the calculator's answers are short"


def test_equal_prompts_are_stored_once_if_that_halves_the_tokens():
    size = text_sizes()
    assert size.bytes_per_token == 512
    assert text_sizes(adapters=False).bytes_per_token == 576, "inputs of trained norms"
    reply, prompt = size.shared_bytes(20, 4)
    assert (reply, prompt) == (2 * (4 * 448 + 24 * 64), 2 * 20 * (512 + 64)), "keys and values of the prompt repeat"
    whole = 2 * 24 * 512
    costs = PolicyCosts(
        activation_bytes=whole, shared_bytes=(reply, prompt), sample_tokens=24, reply_tokens=4, num_trained=1
    )
    assert costs.estimate_activation_bytes(8, 1) == 8 * reply + prompt
    assert costs.estimate_activation_bytes(8, 8) == 8 * whole, "all prompts are different"
    assert replace(costs, reply_tokens=16).estimate_activation_bytes(8, 1) == 8 * whole, (
        "most tokens are those of replies"
    )
    assert replace(size, supports_sharing=False).shared_bytes(20, 4) == (0, 0)


def test_only_tensors_below_the_mapped_size_fragment_memory(tmp_path, monkeypatch):
    costs = PolicyCosts(activation_bytes=1000, sample_tokens=10, tensor_fractions=((1024, 0.25), (4096, 0.75)))
    assert costs.estimate_fragmented_bytes(100, 100) == 80_000, "all tensors are smaller than 4 MiB"
    assert costs.estimate_fragmented_bytes(200, 200) == 40_000, "only the narrow tensors"
    assert costs.estimate_fragmented_bytes(500, 500) == 0
    words = (*language_model(tmp_path, 24), "env.train.total_num_envs=64", "actor.micro_batch_size=64")
    cfg = text_config(tmp_path, *words, "actor.global_batch_size=64")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    on_cpu = plan_memory(build_run_plan(cfg, training=True)).activations
    monkeypatch.setattr(memory, "visible_gpus", lambda: ("0",))
    assert on_cpu > plan_memory(build_run_plan(cfg, training=True)).activations > 2**28, "CUDA reuses freed blocks"


def test_replay_buffer_counts_as_host_memory(tmp_path, monkeypatch):
    words = ["env=gym", "env.id=Pendulum-v1", "model=mlp", "algorithm=sac", f"runner.output_dir={tmp_path}"]
    run_plan = build_run_plan(load_config("train", words), training=True)
    on_cpu = plan_memory(run_plan)
    assert on_cpu.replay > 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    on_gpu = plan_memory(run_plan)
    assert on_gpu.replay == 0, "of the GPU"
    assert on_gpu.host(1) >= on_cpu.replay


def test_filtered_bc_plan_includes_buffer_and_weight_average(tmp_path):
    base = ["env=gym", "env.id=Pendulum-v1", "model=mlp", f"runner.output_dir={tmp_path}", "algorithm=filtered_bc"]

    def plan(*more):
        run_plan = build_run_plan(load_config("train", [*base, *more]), training=True)
        return run_plan, plan_memory(run_plan)

    (run_plan, all_seen), (_, few) = plan("algorithm.replay_size=1000000"), plan("algorithm.replay_size=100")
    each = 4 * (run_plan.env.state_dim + run_plan.env.action.dim)
    seen = run_plan.max_samples * run_plan.total_steps
    words = max(map(len, run_plan.env.tasks))
    assert each * seen <= all_seen.replay <= (each + words + 64) * seen
    assert few.replay == 100 * all_seen.replay // seen
    _, averaged = plan("algorithm.replay_size=100", "algorithm.average=0.99")
    trained = few.optimizer // 2
    assert averaged.weights - few.weights == averaged.checkpoint - few.checkpoint == trained


def test_memory_plan_includes_loading_demonstrations(tmp_path):
    words = ["env=gym", "env.id=Pendulum-v1", "model=mlp", f"runner.output_dir={tmp_path}", "algorithm=rlpd"]

    def plan(frames):
        card = Card(env=alone.env, fps=20, video=False, collected={})
        DatasetWriter(tmp_path / "demos", card).close()
        info = build_info(card, episodes=1, frames=frames, tasks=1)
        (tmp_path / "demos" / "meta" / "info.json").write_text(json.dumps(info))
        cfg = load_config("train", [*words, f"algorithm.demonstrations=[{tmp_path}/demos]"])
        return plan_memory(build_run_plan(cfg, training=True))

    alone = build_run_plan(load_config("train", words), training=True)
    without, some, many = plan_memory(alone), plan(1000), plan(2000)
    each = 4 * (alone.env.state_dim + alone.env.action.dim)
    assert some.replay - without.replay >= 1000 * each
    assert many.replay - without.replay == 2 * (some.replay - without.replay)
    assert many.building - without.building == 2 * (many.replay - without.replay), "frames, and chunks of one each"


def test_hanging_nvidia_smi_gives_unknown_gpu_memory(tmp_path, monkeypatch):
    stub_nvidia_smi(tmp_path, monkeypatch, H100, more="exec sleep 60")
    monkeypatch.setattr(devices, "_QUERY_TIMEOUT_S", 0.1)
    assert devices.Gpus().free == 0


def test_vllm_sleeps_if_its_cache_does_not_fit_with_training(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    words = ["env=text/copy", "model=causal_lm_tiny", "rollout.backend=vllm", "launcher=local"]

    def plan(mib, *more):
        stub_nvidia_smi(tmp_path, monkeypatch, *of_size(mib))
        drawn = build_run_plan(load_config("train", [*words, *more, f"runner.output_dir={tmp_path}"]), training=True)
        return plan_memory(drawn), drawn.memory.engine_memory_fraction

    on = "rollout.vllm.enable_sleep_mode=true"
    (large, beside), (asked, alone) = plan(80_000), plan(80_000, on)
    assert (large.sleeps, asked.sleeps) == (False, True)
    given_up = large.gradients + large.activations
    assert asked.policy == large.policy - min(given_up, large.engine)
    assert alone >= beside
    fits = large.policy // 2**20 + 1
    assert plan(fits)[0].sleeps
    assert not plan(fits, "rollout.vllm.enable_sleep_mode=false")[0].sleeps
    assert "vLLM sleeps while weights are trained" in asked.lines(1, 1)[0][1]


def test_vllm_memory_fraction_excludes_memory_of_other_processes(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    words = ["env=text/copy", "model=causal_lm_tiny", "rollout.backend=vllm", "launcher=local"]

    def share(free):
        stub_nvidia_smi(tmp_path, monkeypatch, (*H100[:2], str(free), "80000", *H100[4:]))
        drawn = build_run_plan(load_config("train", [*words, f"runner.output_dir={tmp_path}"]), training=True)
        return drawn.memory.engine_memory_fraction

    assert share(80_000) - share(40_000) == pytest.approx(0.5, abs=0.011)


def test_memory_plan_includes_simulators_on_a_shared_gpu(tmp_path, monkeypatch):
    stub_nvidia_smi(tmp_path, monkeypatch, *of_size(10 * 1024, 10 * 1024))
    words = ("launcher=local", "launcher.env_workers=2", "actor.fsdp.size=1")

    def plan(visible):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        drawn = build_run_plan(toy_config(tmp_path, *words, f"env.kwargs.gpu_bytes=[{2 * GIB},{GIB}]"), training=True)
        needed = plan_memory(drawn)
        assert needed.env_gpu == 4 * GIB, "two environments each"
        return drawn, replace(needed, gradients=3 * GIB)

    require_memory(*plan("0,1"))
    with pytest.raises(ConfigError, match=r"all processes on its GPU need 11\.\d.*launcher.env_workers"):
        require_memory(*plan("0"))
    assert "4.00 on a GPU for each of 2 env workers" in plan("0")[1].lines(1, 2)[1][1]


@pytest.mark.parametrize("part", ["weights", "reference", "replay", "optimizer", "process"])
def test_permanent_memory_is_added_to_every_phase(part):
    for on_gpu in (True, False):
        for busy in ({"gradients": 3}, {"gathered": 3}):
            assert MemoryPlan(**{**busy, part: 7}, on_gpu=on_gpu).policy == 10


def test_memory_peak_is_the_maximum_over_phases():
    acting, training = {"gathered": 5, "inference_batch": 3}, {"gradients": 4, "activations": 2, "in_use": 1}
    plan = MemoryPlan(**acting, **training, on_gpu=True)
    assert plan.policy == 8
    assert replace(plan, in_use=9).policy == 15
    assert replace(plan, on_gpu=False).policy == 5 + 7, "what was gathered stays in pieces"
    assert replace(plan, on_gpu=False, inference_batch=9).policy == 5 + 9
    assert replace(plan, keeps_inference_memory=True).policy == 8 + 7
    assert (replace(plan, engine=2).policy, replace(plan, engine=2, sleeps=True).policy) == (10, 10)
    assert (replace(plan, engine=1, in_use=9).policy, replace(plan, engine=1, in_use=9, sleeps=True).policy) == (16, 15)
    assert replace(plan, building=100, process=1).policy == 101
    assert replace(plan, saving=5, offloaded=2).host(3) == 11


def test_host_memory_includes_arena_rollout_and_task_data(tmp_path, monkeypatch):
    words = ("launcher=local", "rollout.mode=disaggregated", "rollout.num_workers=3", "actor.fsdp.size=1")
    run_plan = build_run_plan(toy_config(tmp_path, *words), training=True)
    plan = plan_memory(run_plan)
    with pytest.raises(ConfigError, match=r"0\.1 for the driver, 10000\.\d shared"):
        require_memory(run_plan, replace(plan, arena=10_000 * GIB))
    cached = ("env.kwargs.task_bytes=1", "env.kwargs.tasks=3", f"env.kwargs.host_bytes=[0,{GIB}]")
    tasks = plan_memory(build_run_plan(toy_config(tmp_path, *words, *cached), training=True))
    assert tasks.env_worker == plan.env_worker + 3 * GIB
    words += ("launcher.env_workers=2", f"env.kwargs.host_bytes=[{GIB},{2 * GIB}]")
    envs = plan_memory(build_run_plan(toy_config(tmp_path, *words), training=True))
    assert envs.env_worker == plan.env_worker + 5 * GIB, "fixed, and two environments per process"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    stub_nvidia_smi(tmp_path, monkeypatch, *of_size(80_000, 40_000))
    on_gpus = build_run_plan(toy_config(tmp_path, *words), training=True)
    # A policy process on a GPU takes its share of the host, too, whether it trains or acts.
    rest = replace(plan_memory(on_gpus), saving=0, offloaded=0, env_worker=0, driver=0, arena=0)
    monkeypatch.setattr(limits, "available_bytes", lambda: 4 * memory.PROCESS)
    require_memory(on_gpus, rest)
    monkeypatch.setattr(limits, "available_bytes", lambda: 4 * memory.PROCESS - 1)
    with pytest.raises(ConfigError, match="of memory"):
        require_memory(on_gpus, rest)


def test_replay_buffer_size_includes_next_observations(tmp_path):
    words = ["env=gym", "env.id=Pendulum-v1", "model=mlp", "algorithm=sac", f"runner.output_dir={tmp_path}"]

    def plan(*more):
        run_plan = build_run_plan(load_config("train", [*words, *more]), training=True)
        return 2 * run_plan.max_samples * run_plan.total_steps, plan_memory(run_plan)

    seen, whole = plan("algorithm.replay_size=100000000")
    assert plan(f"algorithm.replay_size={seen // 4}")[1].replay == pytest.approx(whole.replay / 4)
    assert plan(f"algorithm.replay_size={2 * seen}")[1].replay == whole.replay
    _, unsaved = plan("algorithm.replay_size=100000000", "algorithm.save_replay=false")
    assert whole.checkpoint - unsaved.checkpoint == whole.replay == unsaved.replay


def test_planned_micro_batches_are_per_rank_and_respect_the_token_budget(tmp_path):
    def count(*words):
        return memory._get_micro_batches(build_run_plan(text_config(tmp_path, "launcher=local", *words), training=True))

    words = ("env.train.total_num_envs=16", "actor.global_batch_size=16", "actor.micro_batch_size=2")
    assert (count(*words), count(*words, "actor.fsdp.size=2")) == (8, 4)
    tokens = build_run_plan(text_config(tmp_path), training=True).policy_costs.sample_tokens
    assert count(*words, f"actor.max_tokens_per_mbs={4 * tokens + 1}") == 4


def test_token_budget_does_not_change_the_memory_of_robot_policies(tmp_path):
    words = ["env=tabletop", "model=openvla_oft_tiny", f"runner.output_dir={tmp_path}"]
    plans = [
        build_run_plan(load_config("train", [*words, *more]), training=True)
        for more in ([], ["actor.max_tokens_per_mbs=4096"])
    ]
    assert plans[0].memory == plans[1].memory
    assert memory._get_micro_batches(plans[0]) == memory._get_micro_batches(plans[1])


def test_reference_on_a_server_needs_no_local_memory(tmp_path):
    kl = ("algorithm.kl_beta=0.1", "algorithm.reference_url=http://host/v1")
    assert plan_memory(build_run_plan(text_config(tmp_path, *kl[:1]), training=True)).reference > 0
    assert plan_memory(build_run_plan(text_config(tmp_path, *kl), training=True)).reference == 0


def test_checkpoint_size_includes_frozen_weights(tmp_path):
    words = [
        "env=tabletop",
        "model=flow_small",
        "model.likelihood=dsrl",
        "algorithm=sac",
        "algorithm.save_replay=false",
    ]
    run_plan = build_run_plan(load_config("train", [*words, f"runner.output_dir={tmp_path}"]), training=True)
    costs, each = run_plan.policy_costs, 2 if run_plan.cfg.model.uses_bf16 else 4
    assert plan_memory(run_plan).checkpoint == 12 * costs.num_trained + each * costs.num_parameters


@pytest.mark.parametrize(
    "model",
    [
        ("model=flow_small", "model.likelihood=dsrl"),
        ("model=pi05_tiny", "model.likelihood=residual"),
        ("model=openvla_oft_tiny", "model.likelihood=residual"),
    ],
)
def test_off_policy_updates_store_no_activations_of_a_frozen_model(model, tmp_path):
    words = ["env=tabletop", *model, "algorithm=sac", f"runner.output_dir={tmp_path}"]
    assert plan_memory(build_run_plan(load_config("train", words), training=True)).activations == 0


@pytest.mark.parametrize("command", ["train", "eval", "collect", "sft"])
@pytest.mark.parametrize(
    ("visible", "ranks", "reason"),
    [
        ("0,1", 2, None),
        ("GPU-1", 1, None),
        ("0,3", 1, r"CUDA_VISIBLE_DEVICES=0,3: this host has no GPU 3"),
        ("GPU-7", 1, r"this host has no GPU GPU-7"),
        ("0", 2, r"actor.fsdp.size=2: each process needs its own GPU, but only 1 are visible. Set actor.fsdp.size=1"),
        ("", 2, None),
    ],
)
def test_runs_with_missing_gpus_are_rejected(command, visible, ranks, reason, tmp_path, monkeypatch):
    stub_nvidia_smi(tmp_path, monkeypatch, *of_size(80_000, 80_000))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cfg = command_config(tmp_path, command, "launcher=local", f"actor.fsdp.size={ranks}")
    if reason is None:
        require_devices(cfg, plan_devices(cfg, training=command in ("train", "sft")), devices.Gpus())
        return
    with pytest.raises(ConfigError, match=reason):
        COMMANDS.get(command)(cfg)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "eval", "collect"])
def test_run_that_does_not_fit_in_memory_creates_no_folder(command, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "available_bytes", lambda: 2**20)
    with pytest.raises(ConfigError, match=r"The run does not fit on this machine\. .*needs about"):
        COMMANDS.get(command)(command_config(tmp_path, command))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["eval", "collect"])
def test_memory_of_a_run_with_one_record_per_step_includes_these_records(command, tmp_path):
    words = ["runner.keep_episodes=all"] if command == "eval" else ["env.train.total_num_envs=4"]
    cfg = command_config(tmp_path, command, *words)
    if command == "eval":
        run_plan = record_every_step(build_run_plan(cfg, training=False))
    else:
        run_plan = build_collection_plan(cfg)
    assert run_plan.memory == plan_memory(run_plan)
    assert run_plan.memory.arena == run_plan.layout.offsets(run_plan.num_envs * (8 + 2))[1]


def command_config(folder, command, *words):
    """Return the config of a small run of a command, whose run folder is <folder>/run."""
    if command in ("train", "eval"):
        return toy_config(folder, *words, command=command)
    base = [*TOY_COLLECT, f"collect.out={folder}/demos"] if command == "collect" else [f"data.path={folder}/demos"]
    run = [f"runner.output_dir={folder}", "runner.experiment_name=run", "launcher=inline"]
    return load_config(command, [*base, *run, *words])


def test_arena_size_error_suggests_only_settings_that_can_be_lowered(tmp_path):
    def fix(command, *words):
        return suggest_fewer_records(
            build_run_plan(toy_config(tmp_path, *words, command=command), training=command == "train")
        )

    assert fix("train", "algorithm.rollout_epoch=2") == (
        "Lower env.train.total_num_envs or algorithm.rollout_epoch or the camera resolution."
    )
    assert fix("train", "env.train.total_num_envs=2") == "Lower the camera resolution."
    assert fix("eval") == "Lower env.eval.total_num_envs or the camera resolution."
    assert fix("eval", "env.eval.total_num_envs=1") == "Lower the camera resolution."


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("checkpoint.keep=3", "runner.save_interval=1"), "Free disk space, set checkpoint.keep=1, or change"),
        (("checkpoint.keep=1", "runner.save_interval=1"), "Free disk space, set runner.save_interval=-1, or change"),
        (("checkpoint.keep=3", "runner.save_interval=-1"), "Free disk space, or change"),
    ],
)
def test_disk_space_error_suggests_no_value_that_the_run_already_has(words, fix, tmp_path):
    with pytest.raises(ConfigError, match=fix):
        require_disk(toy_config(tmp_path, *words), 2**60, total_steps=5)
