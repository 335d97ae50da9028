"""Objectives in addition to SFT: losses against references, training and use of the results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_runs import ASKING
from toy_runs import TOY_OFT, toy_config

from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import Record, build_record_layout, encode_instruction, encode_reply
from embodyrl.channels.messages import ImitateRequest
from embodyrl.commands.sft import SftResult, sft
from embodyrl.commands.sft_setup import load_inputs
from embodyrl.data.reader import Demonstrations
from embodyrl.data.settings import Objective, ObjectiveSettings
from embodyrl.envs.learned_reward import LearnedReward
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.learners.imitation import ImitationLearner, compute_preference_loss
from embodyrl.learners.settings import ActorSettings, OptimSettings
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config
from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.text.conversation import join_pair
from embodyrl.text.messages import Message, join_messages
from embodyrl.text.rewards.services import RewardModel
from embodyrl.types import ActionSpec, CameraSpec, EnvSpec, Observation, ObservationOut
from embodyrl.workers.lifecycle import PolicyHostInit
from embodyrl.workers.policy_host import PolicyHost

PAIRS = [("12+3=", "15", "5"), ("7:", "7", "70x"), ("abc|", "cba", "abc"), ("9-4=", "5", "13")]


def tiny(**keys: Any) -> Any:
    return POLICIES.get("causal_lm_tiny").settings(
        model_type="causal_lm_tiny", num_action_chunks=1, precision="fp32", **keys
    )


def write_pairs(arena: Arena, *before: Message) -> tuple[Any, ...]:
    record_refs = tuple(arena.allocate() for _ in PAIRS)
    for record_ref, (prompt, better, worse) in zip(record_refs, PAIRS, strict=True):
        with arena.write(record_ref) as record:
            asked = join_messages([*before, Message(role="user", content=prompt)])
            arena[Record.instruction][record] = encode_instruction(asked, arena[Record.instruction].shape[1])
            arena[Record.reply][record] = encode_reply(join_pair(better, worse), arena[Record.reply].shape[1])
    return record_refs


@pytest.mark.parametrize(
    ("micro", "budget", "forwards"),
    [(4, None, 1), (1, None, 4), (1, 40, 2), (1, 30, 4), (4, 1, 4)],
    ids=["whole", "one by one", "two by tokens", "padded to the longer answer", "longer than the budget"],
)
def test_dpo_matches_trl(tmp_path: Path, micro: int, budget: int | None, forwards: int) -> None:
    """Loss and gradient for the same weights, reference and pairs equal those of trl 1.16's DPOTrainer."""
    factory = POLICIES.get("causal_lm_tiny")
    other = factory.build(tiny(), PolicyRequest(env=ASKING, device="cpu", seed=4))
    (tmp_path / "reference").mkdir()
    other.save(tmp_path / "reference")
    arena = Arena.create(build_record_layout(ASKING, factory.spec(tiny(), ASKING, 0)), len(PAIRS))
    objective = ObjectiveSettings(name=Objective.dpo, beta=0.3, reference_path=str(tmp_path / "reference"))
    host = PolicyHost(
        PolicyHostInit(
            model=tiny(),
            objective=objective,
            actor=ActorSettings(
                micro_batch_size=micro,
                max_tokens_per_mbs=budget,
                global_batch_size=4,
                optim=OptimSettings(lr=0.0, clip_grad=1e9),
            ),
            seed=3,
            request=PolicyRequest(env=ASKING, device="cpu", seed=3),
            arena=arena.handle,
            total_steps=1,
            threads=1,
            acts=False,
            trains=True,
        )
    )
    counted: list[int] = []
    host.policy.module.register_forward_hook(lambda *_: counted.append(1))
    *_, done = host.handle(ImitateRequest(step=0, record_refs=write_pairs(arena)))
    host.close()
    arena.close()
    assert len(counted) == forwards
    assert done.metrics["loss"] == pytest.approx(0.7067953944, abs=1e-6)
    assert done.metrics["grad_norm"] == pytest.approx(2.7978238, rel=1e-5)


def test_reward_model_ignores_system_messages(tmp_path: Path) -> None:
    """Rewards use the user's messages and the reply. Fails if training uses other messages."""
    settings = tiny()
    request = PolicyRequest(env=ASKING, device="cpu", seed=3, value_dim=1)
    spec = POLICIES.get("causal_lm_tiny").spec(settings, ASKING, 1)
    arena = Arena.create(build_record_layout(ASKING, spec), 2 * len(PAIRS))
    host = PolicyHost(
        PolicyHostInit(
            model=settings,
            objective=ObjectiveSettings(name=Objective.preference),
            actor=ActorSettings(micro_batch_size=4, global_batch_size=4),
            seed=3,
            request=request,
            arena=arena.handle,
            total_steps=1,
            threads=1,
            acts=False,
            trains=True,
        )
    )
    with torch.no_grad():
        host.policy.module.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    told: list[float] = []
    for before in ((), (Message(role="system", content="10"),)):
        asked = ImitateRequest(step=0, record_refs=write_pairs(arena, *before), train=False)
        *_, done = host.handle(asked)
        told.append(done.metrics["loss"])
    host.close()
    arena.close()
    assert abs(told[0] - len(PAIRS) * np.log(2)) > 0.01, "the values differ"
    assert told[0] == told[1]


def judging(folder: Path, objective: ObjectiveSettings) -> tuple[PolicyHost, Arena]:
    """Build the toy policy with eight records."""
    run_plan = build_run_plan(toy_config(folder, *TOY_OFT), training=True)
    arena = Arena.create(run_plan.layout, 8)
    host = PolicyHost(
        PolicyHostInit(
            model=run_plan.cfg.model,
            objective=objective,
            actor=ActorSettings(micro_batch_size=2, global_batch_size=4),
            seed=3,
            request=PolicyRequest(env=run_plan.env, device="cpu", seed=3),
            arena=arena.handle,
            total_steps=1,
            threads=1,
            acts=False,
            trains=True,
        )
    )
    return host, arena


def test_episode_dpo_uses_the_reference(tmp_path: Path) -> None:
    """The initial policy is its own reference: for any actions the loss is ln 2."""
    host, arena = judging(tmp_path, ObjectiveSettings(name=Objective.dpo, beta=0.5))
    record_refs = arena.allocate_all(8)
    with arena.write_all(record_refs) as records:
        shape = arena[Record.action][records].shape
        arena[Record.action][records] = np.random.default_rng(0).uniform(-0.5, 0.5, shape)
    *_, done = host.handle(ImitateRequest(step=0, record_refs=record_refs))
    host.close()
    arena.close()
    assert done.metrics["loss"] == pytest.approx(np.log(2.0), abs=1e-5)


def test_label_smoothing_follows_the_settings(tmp_path: Path) -> None:
    """Two pairs, one of them swapped; only the loss is smoothed."""
    host, arena = judging(tmp_path, ObjectiveSettings(name=Objective.dpo, label_smoothing=0.2))
    assert isinstance(host._learner, ImitationLearner)
    found = host._learner._compare_scores(torch.tensor([2.0, 0.0, -1.0, 1.0]).double())
    host.close()
    arena.close()
    gap = torch.tensor([3.0, -1.0]).double()
    expected = -0.8 * torch.nn.functional.logsigmoid(gap) - 0.2 * torch.nn.functional.logsigmoid(-gap)
    torch.testing.assert_close(found.loss, expected)
    assert found.accuracy.tolist() == [1.0, 0.0]


def test_label_smoothing_mixes_both_labels() -> None:
    better, worse = torch.tensor([0.3, -200.0, 90.0]).double(), torch.tensor([1.0, 200.0, -300.0]).double()

    def plain(gap: torch.Tensor) -> torch.Tensor:
        return -torch.nn.functional.logsigmoid(gap)

    expected = 0.8 * plain(better - worse) + 0.2 * plain(worse - better)
    assert torch.allclose(compute_preference_loss(better, worse, smoothing=0.2), expected, rtol=1e-12)


def pairs(size: int = 400) -> list[dict[str, Any]]:
    """Return pairs whose better answer repeats the number, as conversations and plain texts of public data sets."""
    rng = np.random.default_rng(0)
    found = []
    for first, second in rng.integers(10, 100, (size, 2)).tolist():
        good, bad = str(first), str(second if second != first else 100 - first)
        asked = f"{first}:"
        talk = [{"role": "user", "content": asked}, {"role": "assistant", "content": good}]
        found.append({"prompt": asked, "chosen": talk if first % 2 else good, "rejected": bad})
    return found


def supervise(folder: Path, *words: str) -> SftResult:
    places = (f"runner.output_dir={folder}", "runner.experiment_name=sft", "runner.logger.backends=[jsonl]")
    small = ("launcher=inline", "actor.global_batch_size=32", "actor.micro_batch_size=32", "actor.optim.warmup_steps=5")
    cfg = load_config("sft", [*places, *small, "runner.save_interval=-1", *words])
    check_components(cfg)
    return sft(cfg)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["dpo", "preference"])
def test_preference_training_separates_chosen_from_rejected(tmp_path: Path, name: str) -> None:
    words = ("data.path=test_objectives:pairs", "model=causal_lm_tiny", f"objective.name={name}")
    result = supervise(tmp_path, *words, "runner.max_steps=60", "runner.val_check_interval=60", "actor.optim.lr=1e-3")
    assert result.metrics["eval/accuracy"] >= 0.85
    first = json.loads((result.run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["eval/loss"] == pytest.approx(np.log(2), abs=1e-6)
    said = (result.run / "logs" / "events.log").read_text()
    assert "env=... reward.path=" in said if name == "preference" else f"eval ckpt={result.run} " in said
    assert said.count("env=...") == (1 if name == "preference" else 2), "nobody knows what is to be played"
    if name == "preference":
        model = RewardModel(result.checkpoint / "policy")
        model.prepare()
        told = [model("42:", text, "") > model("42:", other, "") for text, other in (("42", "77"), ("42", "13"))]
        assert all(told)
        seen = Observation(
            images=np.zeros((1, 0, 0, 0, 3), np.uint8),
            state=np.zeros((1, 0), np.float32),
            instructions=(
                join_messages([Message(role="user", content="42:"), Message(role="assistant", content="42")]),
            ),
        )
        policy = POLICIES.get("causal_lm_tiny").build(
            tiny(), PolicyRequest(env=ASKING, device="cpu", seed=0, value_dim=1)
        )
        policy.load_weights(result.checkpoint / "policy")
        assert model("42:", "42", "") == pytest.approx(float(policy.values(seen)[0, 0]), abs=1e-4)


@pytest.mark.parametrize(("name", "reads_state", "cameras"), [("cnn", 4, 2), ("cnn", 0, 1), ("mlp", 4, 0)])
def test_numpy_reward_model_matches_the_value_head(tmp_path: Path, name: str, reads_state: int, cameras: int) -> None:
    env = EnvSpec(
        name="e",
        action=ActionSpec(dim=7),
        tasks=("t",),
        states_per_task=(1,),
        cameras=CameraSpec(names=("a", "b")[:cameras], size=(30, 22) if cameras else (0, 0)),
        state_dim=reads_state,
    )
    model = POLICIES.get(name).settings(model_type=name, num_action_chunks=1, precision="fp32")
    policy = POLICIES.get(name).build(model, PolicyRequest(env=env, device="cpu", seed=0, value_dim=1))
    rng = np.random.default_rng(1)
    seen = Observation(
        images=rng.integers(0, 256, (3, cameras, *env.cameras.size, 3), np.uint8),
        state=rng.normal(size=(3, reads_state)).astype(np.float32),
        instructions=("",) * 3,
    )
    policy.update_statistics(seen)  # type: ignore[attr-defined]
    policy.save(tmp_path)
    reward = LearnedReward(tmp_path)
    shown = [ObservationOut(images=seen.images[i], state=seen.state[i]) for i in range(3)]
    expected = 1 / (1 + np.exp(-policy.values(seen)[:, 0]))
    assert [reward.probability(one) for one in shown] == pytest.approx(expected.tolist(), abs=1e-5)


def test_success_objective_learns_success_from_images() -> None:
    """An observation shows the result of the previous action; the success of a step is visible one step later."""
    none = np.zeros((5, 0), np.float32)
    demos = Demonstrations(
        images=np.zeros((5, 0, 0, 0, 3), np.uint8),
        state=none,
        action=none,
        reward=np.zeros(5, np.float32),
        success=np.array([False, True, False, True, True]),
        start=np.array([0, 3]),
        stop=np.array([3, 5]),
        instruction=np.array(["t"] * 5, object),
    )
    assert demos.is_solved.tolist() == [False, False, True, False, True]


def test_episode_pairs_are_compared_chunk_by_chunk() -> None:
    """Lengths 3, 5, 2, 4, states 5, 5, 7, 5: the second succeeds, the last has a higher return than the first."""
    none = np.zeros((14, 0), np.float32)
    reward, success = np.zeros(14, np.float32), np.zeros(14, np.bool_)
    success[7], success[9], reward[12] = True, True, 0.5
    demos = Demonstrations(
        images=np.zeros((14, 0, 0, 0, 3), np.uint8),
        state=none,
        action=none,
        reward=reward,
        success=success,
        start=np.array([0, 3, 8, 10]),
        stop=np.array([3, 8, 10, 14]),
        instruction=np.array(["t"] * 14, object),
        reset_id=np.array([5, 5, 7, 5]),
    )
    pairs = demos.get_ranked_pairs(range(4), 2).tolist()
    assert pairs == [[3, 0], [5, 2], [3, 10], [5, 12], [10, 0], [12, 2]]
    assert demos.get_ranked_pairs([0, 2], 2).shape == (0, 2)
    assert replace(demos, reset_id=np.full(4, -1)).get_ranked_pairs(range(4), 2).shape == (0, 2), (
        "nobody knows where they began"
    )


def test_reward_model_uses_its_own_cameras(tmp_path: Path) -> None:
    view = ["env=tabletop", "env.init_params.camera_names=[front,wrist]"]
    one = build_run_plan(load_config("train", view), training=True)
    assert one.env.cameras.names == ("front",)
    env = replace(one.env, cameras=replace(one.env.cameras, names=("front", "wrist")))
    model = POLICIES.get("cnn").settings(model_type="cnn", num_action_chunks=1, precision="fp32")
    policy = POLICIES.get("cnn").build(model, PolicyRequest(env=env, device="cpu", seed=0, value_dim=1))
    policy.save(tmp_path)
    both = build_run_plan(load_config("train", [*view, f"reward.path={tmp_path}"]), training=True)
    assert both.env.cameras.names == ("front", "wrist")
    swapped = ["env=tabletop", "env.init_params.camera_names=[wrist,front]", f"reward.path={tmp_path}"]
    with pytest.raises(ConfigError, match=r"trained with the cameras front, wrist; .* renders wrist, front"):
        build_run_plan(load_config("train", swapped), training=True)
    other = replace(env, cameras=replace(env.cameras, names=("wrist", "front")))
    with pytest.raises(CheckpointError, match=r"cameras is \['front', 'wrist'\]"):
        POLICIES.get("cnn").build(model, PolicyRequest(env=other, device="cpu", seed=0)).load_weights(tmp_path)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["objective.name=preference", "data.path=/nowhere/demos"], "rows of text"),
        (["objective.name=success", "data.path=test_objectives:pairs"], "episodes"),
    ],
)
def test_unsuitable_data_for_an_objective_is_rejected(words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("sft", words)


def test_unsuitable_reward_model_is_rejected(tmp_path: Path) -> None:
    words = ("data.path=test_objectives:pairs", "model=causal_lm_tiny", "objective.name=preference")
    with pytest.raises(ConfigError, match="cannot be trained as a reward model"):
        load_inputs(load_config("sft", [*words, "model.is_lora=true"]), tmp_path)
