"""The Python API in user programs: environments, policies, training loops, text and scripts."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import embodyrl
import embodyrl.gymnasium
from embodyrl.envs.reward import RewardStep
from embodyrl.errors import ConfigError, EnvError, MissingDependencyError
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.episodes import eval_episodes

ROOT = Path(__file__).parents[2]
CHECKPOINT = "assets/openvla_oft_tabletop"
SMALL = (
    *("env.train.total_num_envs=4", "algorithm.group_size=4", "algorithm.rollout_epoch=1"),
    *("runner.max_steps=1", "runner.val_check_interval=-1", "actor.global_batch_size=16"),
    *("actor.micro_batch_size=16", "launcher=inline", "runner.logger.backends=[jsonl]", "runner.experiment_name=run"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    cfg = embodyrl.compose("train", *SMALL, f"runner.output_dir={folder}")
    result = embodyrl.train(cfg)
    assert len(repr(result)) < 200
    return result.run


def example(name: str):
    """Import a file of examples/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_public_names_are_listed_and_callable() -> None:
    assert {"train", "evaluate", "make_env", "load_policy", "GRPO"} <= set(dir(embodyrl))
    assert all(callable(getattr(embodyrl, name)) for name in embodyrl.__all__)


def test_delays_are_rejected_for_single_actions() -> None:
    with pytest.raises(ConfigError, match="one action per step, without delay"):
        embodyrl.make_env("tabletop", "env.control.latency_steps=2")


def test_make_env_passes_the_gymnasium_env_checker() -> None:
    check_env(embodyrl.make_env("tabletop"), skip_render_check=True)
    assert {"embodyrl/Libero10-v0", "embodyrl/LiberoObject-v0", "embodyrl/Metaworld-v0"} <= {*gymnasium.registry}
    made = gymnasium.make("embodyrl/Tabletop-v0")
    seen, info = made.reset(seed=3, options={"task": 1})
    assert (seen["instruction"], info["task"]) == ("touch the green block", 1)
    assert np.array_equal(made.reset(seed=3, options={"task": 1})[0]["images"], seen["images"]), "the seed decides"
    with pytest.raises(TypeError, match="taks"):
        gymnasium.make("embodyrl/Tabletop-v0", taks=1)
    with pytest.raises(ConfigError, match="use render_mode="):
        gymnasium.make("embodyrl/Tabletop-v0", render_mode="human")
    several = gymnasium.make_vec("embodyrl/Tabletop-v0", num_envs=2, vectorization_mode="sync", task=2)
    assert {*several.reset(seed=0)[0]["instruction"]} == {"touch the blue block"}
    vector = embodyrl.make_env("tabletop", num_envs=2)
    assert vector.reset(seed=0)[0]["images"].shape == (2, 2, 112, 112, 3)
    assert vector.step(vector.action_space.sample())[1].shape == (2,)


@pytest.mark.parametrize(
    ("name", "options", "said"), [("text/copy", {}, "GRPO"), ("tabletop", {"task": 99}, "0 to 20")]
)
def test_make_env_errors_describe_the_problem(name: str, options: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        embodyrl.make_env(name).reset(options=options)


def test_vector_environment_needs_an_environment() -> None:
    with pytest.raises(ConfigError, match="num_envs=0: a vector environment has at least 1 environment"):
        embodyrl.make_env("tabletop", num_envs=0)


def read_missing_key(step: RewardStep) -> float:
    return step.info["missing"]


def test_failing_reward_function_is_an_error() -> None:
    env = embodyrl.make_env("tabletop", f"reward.path={__name__}:read_missing_key")
    env.reset(seed=0)
    with pytest.raises(EnvError, match=r"reward\.path.*step 1: KeyError: 'missing' \(test_own_loop\.py, line \d+\)"):
        env.step(np.zeros(7))


@pytest.mark.parametrize(
    ("name", "module", "overrides"),
    [
        ("metaworld", "metaworld", ()),
        ("functional", "jax", ("env.id=gymnax:CartPole-v1",)),
        ("pusht", "gym_pusht", ()),
        ("aloha_insertion", "dm_control", ()),
        ("fetch_reach", "gymnasium_robotics", ()),
    ],
)
def test_make_env_reports_a_missing_package(name: str, module: str, overrides: tuple[str, ...]) -> None:
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    with pytest.raises(MissingDependencyError, match="Fix: pip install"):
        embodyrl.make_env(name, *overrides)


@pytest.mark.integration
def test_loaded_run_acts_in_its_environment(run: Path) -> None:
    policy = embodyrl.load_policy(run, device="cpu")
    env = policy.make_env()
    successes = 0
    for seed in range(6):
        seen, info = env.reset(seed=seed)
        done = False
        while not done:
            for action in policy.act(seen):
                seen, _, terminated, truncated, info = env.step(action)
                if done := terminated or truncated:
                    break
        successes += info["success"]
    assert successes >= 1, "the shipped checkpoint touches the right block in 42 % of all tables"
    batch = {"images": np.stack([seen["images"]] * 2), "state": np.stack([seen["state"]] * 2)}
    both = policy.act(batch | {"instruction": ("touch the red block", "touch the blue block")})
    alone = policy.act(seen, instruction="touch the blue block")
    np.testing.assert_allclose(both[1], alone, atol=1e-5)
    assert set(np.unique(both[..., 6])) <= {-1.0, 1.0}, "the simulator's gripper; the policy's is between 0 and 1"
    with pytest.raises(ConfigError, match=r"policy\.make_env"):
        policy.act(embodyrl.make_env("tabletop").reset(seed=0)[0])


def test_incomplete_observation_is_an_error() -> None:
    policy = embodyrl.load_policy(CHECKPOINT, device="cpu")
    seen = policy.make_env().reset(seed=0)[0]
    mine = {"image": seen["images"], **{name: part for name, part in seen.items() if name != "images"}}
    with pytest.raises(ConfigError, match=r"received only image, .*expected images"):
        policy.act(mine)
    with pytest.raises(ConfigError, match="float64, expected images"):
        policy.act(seen | {"images": seen["images"] / 255})
    more = np.concatenate([seen["images"], np.zeros_like(seen["images"][:1])])
    assert np.array_equal(policy.act(seen | {"images": more}), policy.act(seen)), "a camera of the reward is ignored"
    with pytest.raises(ConfigError, match=r"received state \(\) float64, expected state"):
        policy.act(seen | {"state": 0.5})
    batch = {"images": seen["images"][None].repeat(2, 0), "state": seen["state"][None], "instruction": ["a", "b"]}
    with pytest.raises(ConfigError, match=r"different numbers of rows: .*'state': 1, 'instruction': 2"):
        policy.act(batch)
    with pytest.raises(ConfigError, match="has several tasks"):
        policy.act({name: part for name, part in seen.items() if name != "instruction"})


def test_single_task_policy_needs_no_instruction(tmp_path: Path) -> None:
    names = ("env=gym", "env.id=pixel_env:PixelEnv", "model=cnn", "algorithm=ppo", "algorithm.group_size=1")
    few = ("env.train.max_episode_steps=4", "env.train.max_steps_per_rollout_epoch=16")
    run = embodyrl.train(embodyrl.compose("train", *SMALL, *names, *few, f"runner.output_dir={tmp_path}")).run
    policy = embodyrl.load_policy(run, "trust=true", device="cpu")
    seen = policy.make_env().reset(seed=0)[0]
    plain = {"images": seen["images"]}
    np.testing.assert_array_equal(policy.act(plain), policy.act(seen))
    assert policy.act({"images": np.stack([seen["images"]] * 3)}).shape == (3, *policy.act(seen).shape)


def test_loaded_policy_uses_its_sampling_settings() -> None:
    """The policy samples at the temperature of its training. Fails if the temperature is always 1."""
    words = ("eval.sampling_params.do_sample=true", "algorithm.sampling_params.temperature=2.0")
    warm = embodyrl.load_policy(CHECKPOINT, *words, device="cpu")
    seen = warm.observe([warm.make_env().reset(seed=0)[0]])
    noise = np.random.default_rng(0).random((1, warm.policy.spec.tokens_per_chunk), np.float32)
    drawn, wanted = warm.decide(seen, noise=noise), warm.policy.act(seen, noise=noise, temperature=2.0)
    np.testing.assert_array_equal(drawn.tokens, wanted.tokens)
    np.testing.assert_allclose(warm.policy.score(seen, drawn.tokens).logprob.detach(), wanted.logprob, atol=1e-5)
    assert not np.allclose(wanted.logprob, warm.policy.act(seen, noise=noise, temperature=1.0).logprob, atol=0.1)


@pytest.mark.integration
def test_custom_training_loop_example_updates_the_policy() -> None:
    loop = example("custom_loop")
    loop.GROUPS, loop.GROUP_SIZE = 2, 4
    policy = embodyrl.load_policy(CHECKPOINT, "env.eval.task_ids=[0]", trainable=True, device="cpu")
    parameters = list(policy.policy.module.parameters())
    before = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    success = loop.grpo_step(policy, policy.make_env(), optimizer, np.random.default_rng(1))
    assert 0 < success < 1, "with this seed some episodes of a group succeed"
    assert any(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


@pytest.mark.integration
def test_grpo_class_trains_a_text_policy(tmp_path: Path) -> None:
    rows = [{"prompt": word} for word in ("abc", "bcd", "cde", "def")]
    words = ("env.train.total_num_envs=8", "env.eval.total_num_envs=4", "eval.episodes=2", "algorithm.group_size=4")
    quiet = ("launcher=inline", "runner.logger.backends=[jsonl]", "runner.max_steps=1", f"runner.output_dir={tmp_path}")
    short = ("actor.global_batch_size=8", "actor.micro_batch_size=8", "algorithm.sampling_params.max_new_tokens=4")
    result = embodyrl.GRPO("tiny", example_reward, rows, *words, *quiet, *short).train()
    row = json.loads((result.run / "metrics.jsonl").read_text().splitlines()[-1])
    assert result.step == 1
    assert "train/return" in row
    told = (result.run / "logs" / "events.log").read_text()
    assert "embodyrl eval ckpt=" in told
    assert "embodyrl play" not in told, "there is nothing to watch"


def example_reward(prompt: str, response: str, reference: str) -> float:
    """Return a higher reward for longer replies."""
    return len(response) / 4


def local_reward():
    def reward(prompt: str, response: str, reference: str) -> float:
        return 1.0

    return reward


@pytest.mark.parametrize(
    "reward", [lambda prompt, response, reference: 1.0, functools.partial(example_reward), local_reward()]
)
def test_reward_without_importable_name_is_rejected(reward) -> None:
    with pytest.raises(ConfigError, match="cannot be imported by other processes"):
        embodyrl.GRPO("tiny", reward, [{"prompt": "a"}]).train()


@pytest.mark.integration
def test_second_grpo_training_of_a_script_uses_its_own_reward(tmp_path: Path) -> None:
    script = tmp_path / "two_rewards.py"
    script.write_text(
        "import json, sys, embodyrl\n"
        "for value in ('1.0', '2.0'):\n"
        "    if value == '1.0':\n"
        "        def reward(prompt, response, reference):\n"
        "            return 1.0\n"
        "    else:\n"
        "        def reward(prompt, response, reference):\n"
        "            return 2.0\n"
        "    rows = [{'prompt': word} for word in ('abc', 'bcd')]\n"
        "    words = sys.argv[1:] + [f'runner.experiment_name=run_{value}']\n"
        "    before = list(sys.path)\n"
        "    run = embodyrl.GRPO('tiny', reward, rows, *words).train().run\n"
        "    row = json.loads((run / 'metrics.jsonl').read_text().splitlines()[-1])\n"
        "    print('return', row['train/return'], sys.path == before)\n"
    )
    words = ("env.train.total_num_envs=2", "env.eval.total_num_envs=2", "algorithm.group_size=2")
    quiet = ("launcher=inline", "runner.logger.backends=[jsonl]", "runner.max_steps=1", f"runner.output_dir={tmp_path}")
    short = ("actor.global_batch_size=2", "actor.micro_batch_size=2", "algorithm.sampling_params.max_new_tokens=2")
    command = [sys.executable, str(script), *words, *quiet, *short, "runner.val_check_interval=-1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("return")] == [
        "return 1.0 True",
        "return 2.0 True",
    ]


@pytest.mark.integration
def test_script_without_main_guard_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import embodyrl\n"
        "print('begins')\n"
        "cfg = embodyrl.compose('eval', 'env=tabletop', 'model=random', 'eval.episodes=2', 'launcher.env_workers=1')\n"
        "print(embodyrl.evaluate(cfg))\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "plain.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begins") == 1
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert done.stdout.splitlines()[-1].startswith("EvalResult(")


@pytest.mark.integration
def test_notebook_runs_without_errors(tmp_path: Path) -> None:
    """The code of the notebook as one script, with fewer episodes and one small training step."""
    cells = json.loads((ROOT / "examples" / "first_hour.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    whole = '"runner.val_check_interval=-1"'
    assert '"install", "-q", "embodyrl"' in code[0]
    text = "\n\n".join(code)
    assert (text.count("range(20)"), text.count(whole)) == (2, 1)
    (tmp_path / "notebook.py").write_text(
        text.replace("range(20)", "range(2)").replace(whole, ", ".join(map(repr, SMALL)))
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "FIRST_HOUR_STEPS": "1"}
    done = subprocess.run(
        [sys.executable, "notebook.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "of 20 after 1 steps" in done.stdout


def test_extension_commands_are_functions_of_the_package(tmp_path: Path) -> None:
    words = ("env=tabletop", "collect.episodes=2", "env.train.total_num_envs=2", "launcher=inline")
    cfg = embodyrl.compose("collect", *words, f"collect.out={tmp_path}/demos", f"runner.output_dir={tmp_path}")
    assert embodyrl.collect(cfg).episodes == 2
    with pytest.raises(AttributeError, match="no attribute 'colect'"):
        _ = embodyrl.colect


def test_episode_option_of_reset_selects_an_evaluation_episode() -> None:
    words = ("env=tabletop", "model=random", "env.eval.task_ids=[0,4]", "eval.episodes=5")
    cfg = embodyrl.compose("eval", *words)
    planned = eval_episodes(cfg, (run_plan := build_run_plan(cfg, training=False)).env, run_plan.policy)
    env = embodyrl.make_env("tabletop", *words[2:])
    for episode in planned.episodes:
        info = env.reset(options={"episode": episode.episode_id})[1]
        assert (info["reset_id"], info["task"]) == (episode.reset_id, episode.task_id)
    for wrong in (
        {"episode": -1},
        {"episode": "a"},
        {"episode": 0, "task": 0},
        {"task": 4, "reset_id": 0},
        {"reset_id": "a"},
        {"reset_id": 0.5},
    ):
        with pytest.raises(ConfigError, match="episode"):
            env.reset(options=wrong)


@pytest.mark.parametrize("command", [embodyrl.train, embodyrl.evaluate])
def test_text_instead_of_a_config_is_an_error_that_names_compose(command: Any) -> None:
    with pytest.raises(ConfigError, match=r"needs a config, not 'env=tabletop': embodyrl\.compose\("):
        command("env=tabletop")
