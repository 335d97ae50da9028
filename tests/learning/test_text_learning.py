"""A randomly initialized language model of half a million weights learns text tasks end to end."""

import random
from pathlib import Path

import pytest
from gates import gain, learn
from text_runs import ASKING
from toy_runs import rows

from embodyrl.commands.sft import sft
from embodyrl.commands.train import train
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config, load_saved_config
from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.text.conversation import TextRow
from embodyrl.text.messages import Message
from embodyrl.text.sandbox import calculate

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def imitate(folder: Path, data: str, steps: int) -> Path:
    words = [f"data.path={data}", "model=causal_lm_tiny", "runner.logger.backends=[jsonl]", "runner.save_interval=-1"]
    words += [f"runner.output_dir={folder}", f"runner.max_steps={steps}", "runner.val_check_interval=-1"]
    words += ["actor.optim.schedule=constant", "actor.global_batch_size=64", "actor.micro_batch_size=64"]
    cfg = load_config("sft", words)
    check_components(cfg)
    return sft(cfg).run


@pytest.mark.slow
def test_length_task_is_learned_from_scratch(tmp_path: Path):
    before, after = gain(learn(tmp_path, "length"))
    assert before < 0.1
    assert after >= 0.9


def test_negated_reward_does_not_improve_the_policy(tmp_path: Path):
    canary = ("reward.weights={exact: -0.5, overlap: -0.5}", "runner.max_steps=8", "launcher=inline")
    assert gain(learn(tmp_path, "length", *canary))[1] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_vision_model_learns_colors_from_scratch(tmp_path: Path, seed: int):
    before, after = gain(learn(tmp_path, "colour", "model=vision_lm_tiny", f"seed={seed}"))
    assert before < 0.1
    assert after >= 0.9


@pytest.mark.slow
def test_shuffled_images_do_not_improve_the_policy(tmp_path: Path):
    """Without information in the image, at most one of eight names is right."""
    words = ("model=vision_lm_tiny", "data.kwargs={shuffled: true}")
    assert gain(learn(tmp_path, "colour", *words))[1] < 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["algorithm=grpo"],
        # Advantages are not divided by their spread, so the bonus for entropy weighs more.
        ["algorithm=rloo", "algorithm.entropy_bonus=0.03"],
        # Gradients are smaller: means over tokens before those over replies.
        ["algorithm=gspo", "actor.optim.adam_eps=1e-8"],
        # At 1e-3 rounding, and so the processor, decides whether it learns.
        ["algorithm=reinforce_pp", "actor.optim.lr=5e-4"],
    ],
    ids=["grpo", "rloo", "gspo", "reinforce_pp"],
)
def test_copy_task_is_learned_from_scratch(tmp_path: Path, words: list[str]):
    assert gain(learn(tmp_path, "copy", *words))[1] >= 0.95


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_text_distillation_reaches_the_teacher(tmp_path: Path):
    """On-policy distillation: only the KL to the teacher, token by token, on the student's replies.

    The student has seen little of the teacher's data, so its learning rate is small: 1e-3 is too large.
    """
    begun, teacher = (imitate(tmp_path / str(n), "embodyrl.text.tasks:copy", n) for n in (40, 300))
    nothing = ("reward.weights={exact: 0.0, overlap: 0.0}", "algorithm.entropy_bonus=0")
    words = (f"algorithm.reference_path={teacher}", "algorithm.kl_beta=1", "algorithm.kl_penalty_type=k2", *nothing)
    start = (f"ckpt={begun}", "runner.max_steps=60", "actor.optim.lr=2e-4", "launcher=inline")
    before, after = gain(learn(tmp_path / "student", "copy", *words, *start))
    taught = gain(learn(tmp_path / "check", "copy", f"ckpt={teacher}", "runner.max_steps=1", "actor.optim.lr=0"))[0]
    assert before <= taught - 0.1
    assert after >= taught - 0.03 >= 0.8


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_ppo_with_a_separate_critic_learns(tmp_path: Path):
    """PPO with values of a second model, which starts from the policy's random weights."""
    factory = POLICIES.get("causal_lm_tiny")
    model = factory.settings(model_type="causal_lm_tiny", num_action_chunks=7, precision="fp32")
    (tmp_path / "critic").mkdir()
    factory.build(model, PolicyRequest(env=ASKING, device="cpu", seed=0)).save(tmp_path / "critic")
    critic = (f"critic.path={tmp_path}/critic", "actor.optim.value_lr=1e-3", "launcher=inline")
    # At a constant rate it has 90 % after 33 steps, and leaves that again.
    steps = ("runner.max_steps=40", "actor.optim.schedule=cosine", "algorithm.update_epoch=1")
    result = learn(tmp_path, "length", "algorithm=ppo", "algorithm.reward_type=action_level", *steps, *critic)
    before, after = gain(result)
    assert before < 0.1
    assert after >= 0.8
    last = rows(result.run)[-1]
    assert last["train/value_mean"] == pytest.approx(last["train/value_target_mean"], abs=0.2)


@pytest.mark.slow
def test_copy_task_is_learned_with_two_epochs_of_two_batches(tmp_path: Path):
    words = ("algorithm.update_epoch=2", "actor.global_batch_size=128", "actor.micro_batch_size=128")
    assert gain(learn(tmp_path, "copy", *words, "actor.optim.lr=5e-4"))[1] >= 0.95


@pytest.mark.slow
def test_copy_task_is_learned_with_vllm_rollouts(tmp_path: Path):
    pytest.importorskip("vllm")
    result = learn(tmp_path, "copy", "rollout.backend=vllm")
    assert gain(result)[1] >= 0.95
    assert max(row.get("actor/logprob_gap", 0.0) for row in rows(result.run)) < 1e-3


@pytest.mark.slow
def test_separate_vllm_process_gets_new_weights(tmp_path: Path):
    pytest.importorskip("vllm")
    apart = ("rollout.backend=vllm", "rollout.mode=disaggregated", "runner.max_steps=3", "eval.episodes=8")
    result = learn(tmp_path, "length", *apart, "env.train.total_num_envs=64")
    gaps = [row["actor/logprob_gap"] for row in rows(result.run) if "actor/logprob_gap" in row]
    assert len(gaps) == 3
    assert max(gaps) < 1e-3


@pytest.mark.slow
def test_copy_task_is_learned_with_staleness_one(tmp_path: Path):
    result = learn(tmp_path, "copy", "algorithm.max_staleness=1", "runner.max_steps=200")
    assert gain(result)[1] >= 0.95
    stale = [row.get("rollout/staleness/1", 0.0) for row in rows(result.run)]
    assert max(stale) > 0.5


def calls_and_guesses(calls: float = 0.3, size: int = 6000) -> list[TextRow]:
    """Sums with mostly guessed answers, so greedy replies never call the tool; tool answers are in the input."""
    rng, found = random.Random(1), []
    for _ in range(size // 2):
        sum_ = f"{rng.randrange(10)}{rng.choice('+-*')}{rng.randrange(10)}"
        asked = Message(role="user", content=f"{sum_}=")
        call = f"?{sum_}" if rng.random() < calls else str(rng.randrange(100, 200))
        heard = Message(role="tool", content=calculate(sum_))
        found.append(TextRow(messages=(asked,), reference=call))
        answered = (asked, Message(role="assistant", content=f"?{sum_}"), heard)
        found.append(TextRow(messages=answered, reference=heard.content))
    return found


@pytest.mark.slow
def test_calculator_calls_are_learned_from_outcome_rewards(tmp_path: Path):
    start = imitate(tmp_path, "test_text_learning:calls_and_guesses", 150)
    words = (f"ckpt={start}", "runner.max_steps=25", "actor.optim.lr=3e-4", "reward.weights={exact: 1.0, overlap: 0.0}")
    result = learn(tmp_path, "calculator", *words, "data.kwargs={digits: 1}", name="rl")
    before, after = gain(result)
    assert before <= 0.3
    assert after >= 0.85
    turns = [row["train/episode_len"] for row in rows(result.run) if "train/episode_len" in row]
    assert turns[-1] > turns[0] + 1, "a call is longer than a guess"


@pytest.mark.slow
def test_reverse_task_is_learned_by_sft_then_resumed_rl(tmp_path: Path):
    start = imitate(tmp_path, "embodyrl.text.tasks:reverse", 66)
    sparse = ("reward.weights={exact: 1.0, overlap: 0.0}", f"ckpt={start}", "runner.max_steps=40")
    calm = ("algorithm.sampling_params.temperature=0.4", "actor.optim.schedule=constant", "actor.optim.lr=3e-4")
    before, _ = gain(learn(tmp_path, "reverse", *sparse, *calm, name="rl"))
    assert before <= 0.45
    again = load_saved_config(tmp_path / "rl", ["trust=true", "runner.max_steps=100", "ckpt=null"])
    resumed = train(again, resume=tmp_path / "rl")
    assert resumed.last_eval is not None
    assert resumed.last_eval.overall.success_once >= 0.8


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_text_game_is_learned_from_scratch(tmp_path: Path):
    """Frozen lake: the policy first learns to name an action, then the path; the reward is at the goal only."""
    words = ("env.words=embodyrl.envs.text.game:number", "env.max_turns=12", "runner.max_steps=30")
    result = learn(tmp_path, "gym", *words, "algorithm.sampling_params.max_new_tokens=1")
    before, after = gain(result)
    assert before < 0.1
    assert after >= 0.9
