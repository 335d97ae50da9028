"""Residual policies, DSRL and filtered behaviour cloning on a frozen policy in a LeRobot process.

`SMALL_LEROBOT` has the functions of LeRobot that the process calls, and a policy with and without noise; with
EMBODYRL_TEST_LEROBOT the training also runs on ACT and Diffusion policies of LeRobot itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from settings import model_of
from test_lerobot_process import LEROBOT, made_by_lerobot, real_lerobot

from embodyrl.commands.evaluate import evaluate
from embodyrl.commands.export import export
from embodyrl.commands.train import train
from embodyrl.errors import CheckpointError, ConfigError, EmbodyError
from embodyrl.plan.config import load_config, load_saved_config
from embodyrl.policies.lerobot.process import FACTORY
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import ActionSpec, CameraSpec, EnvSpec, Observation

pytestmark = pytest.mark.integration
SMALL_LEROBOT = {
    "configs/policies.py": """
import json, types
class PreTrainedConfig:
    @staticmethod
    def from_pretrained(path):
        return types.SimpleNamespace(**json.load(open(path + "/config.json")))
""",
    "policies/factory.py": """
import torch
from collections import deque
class Policy:
    @classmethod
    def from_pretrained(cls, path, config):
        self = cls()
        self.config = config
        return self
    def eval(self):
        return self
    def reset(self):
        self.queue = deque()
    def select_action(self, batch, noise=None):
        if not self.queue:
            k, a = self.config.n_action_steps, self.config.output_features["action"]["shape"][0]
            whole = batch["observation.state"].sum(1)[:, None, None].expand(-1, k, a) * torch.arange(1, a + 1) / 50
            if noise is not None:
                assert noise.shape == (len(whole), 6, 3)
                whole = whole + noise[:, :k, :a]
            if self.config.noise:
                whole = whole + torch.randn(whole.shape) / 10
            self.queue.extend(whole.unbind(1))
        return self.queue.popleft()
class Fixed(Policy):
    def select_action(self, batch):
        return super().select_action(batch)
class Ignoring(Policy):
    def select_action(self, batch, noise=None):
        return super().select_action(batch)
def get_policy_class(kind):
    return {"fixed": Fixed, "ignoring": Ignoring}.get(kind, Policy)
def scaled(batch):
    return batch | {"observation.state": batch["observation.state"] / 2}
def make_pre_post_processors(config, path, preprocessor_overrides):
    return scaled, lambda action: 2 * action
""",
    "utils/import_utils.py": "def register_third_party_plugins(): pass",
    "utils/random_utils.py": "from torch import manual_seed as set_seed",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Return an interpreter that imports the small LeRobot."""
    root = tmp_path_factory.mktemp("small")
    for name, source in SMALL_LEROBOT.items():
        path = root / "lerobot" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    script = root / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def write_policy(
    folder: Path, *, noise: bool, state: int = 4, action: int = 2, cameras: int = 0, kind: str = "small"
) -> Path:
    folder.mkdir()
    images = {f"observation.images.{i}": {"type": "VISUAL", "shape": [3, 32, 32]} for i in range(cameras)}
    inputs = images | {"observation.state": {"type": "STATE", "shape": [state]}}
    outputs = {"action": {"type": "ACTION", "shape": [action]}}
    config = {"type": kind, "n_action_steps": 4, "chunk_size": 6, "max_action_dim": 3, "noise": noise}
    (folder / "config.json").write_text(json.dumps(config | {"input_features": inputs, "output_features": outputs}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def table(cameras: int = 1) -> EnvSpec:
    return EnvSpec(
        name="table",
        action=ActionSpec(dim=2, low=(-1.0, 0.0), high=(1.0, 10.0)),
        tasks=("go",),
        states_per_task=(4,),
        cameras=CameraSpec(names=tuple(map(str, range(cameras))), size=(32, 32)),
        state_dim=4,
    )


def build(python, folder, *, trainable=False, seed=0, **keys):
    cfg = model_of("lerobot", path=str(folder), python=python, num_action_chunks=4, **keys)
    request = PolicyRequest(env=table(), device="cpu", seed=seed, trainable=trainable)
    return FACTORY.build(cfg, request)


def observe(count: int, seed: int = 0) -> Observation:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, 1, 32, 32, 3), np.uint8)
    return Observation(
        images=images, state=rng.normal(size=(count, 4)).astype(np.float32), instructions=("go",) * count
    )


def part(obs: Observation, rows: slice) -> Observation:
    return Observation(images=obs.images[rows], state=obs.state[rows], instructions=obs.instructions[rows])


def noise_for(policy, count):
    drawn = np.random.default_rng(1).integers(0, 2**24, (count, policy.spec.tokens_per_chunk))
    return (drawn / 2**24).astype(np.float32)


def test_lerobot_residual_starts_at_zero_and_learns_bounded_corrections(python, tmp_path):
    folder, obs = write_policy(tmp_path / "base", noise=False, cameras=1), observe(3)
    base = build(python, folder).act(obs, noise=None).actions
    policy = build(python, folder, trainable=True, likelihood="residual", residual_scale=0.5)
    assert np.abs(policy.act(obs, noise=None).actions - base).max() < 1e-5
    trained = {name for name, weight in policy.module.named_parameters() if weight.requires_grad}
    assert {name.partition(".")[0] for name in trained} == {"residual_actor"}
    torch.nn.init.normal_(policy.module.residual_actor.layers[-1].weight, std=3.0)
    out = policy.act(obs, noise=noise_for(policy, 3))
    moved = np.abs(out.actions - base).max((0, 1))
    assert 0.3 < moved[0] <= 0.5 + 1e-4, "half of the distance from 0 to 1"
    assert 1.5 < moved[1] <= 2.5 + 1e-4, "half of the distance from 5 to 10"
    with torch.no_grad():
        assert np.abs(policy.score(obs, out.tokens).logprob.numpy() - out.logprob).max() < 1e-4
    assert policy.features(obs).shape == (3, 4 + 3 * 64 + 4 * 2)
    assert np.abs(policy.features(obs)[:, :4].numpy() - obs.state / 2).max() < 1e-6, "of LeRobot's preprocessor"
    assert FACTORY.costs(policy._cfg, table(), 0).num_trained == sum(p.numel() for p in policy.module.parameters())


def test_features_of_a_noisy_policy_depend_only_on_the_observation(python, tmp_path):
    folder, obs = write_policy(tmp_path / "base", noise=True, cameras=1), observe(4)
    one, other = (build(python, folder, likelihood="residual", seed=seed) for seed in (0, 7))
    whole = one.features(obs)
    assert torch.equal(whole, one.features(obs))
    assert torch.equal(whole[2:], other.features(part(obs, slice(2, None))))
    assert not torch.equal(whole[:1, -8:], whole[1:2, -8:])


def test_lerobot_residual_is_saved_with_the_files_of_its_base(python, tmp_path):
    folder, out, obs = write_policy(tmp_path / "base", noise=True, cameras=1), tmp_path / "out", observe(3)
    policy = build(python, folder, likelihood="residual", residual_scale=0.3)
    torch.nn.init.normal_(policy.module.residual_actor.layers[-1].weight)
    out.mkdir()
    policy.save(out)
    assert {p.name for p in folder.iterdir()} | {"embodyrl_heads.safetensors", "steering.json"} == {
        p.name for p in out.iterdir()
    }
    again = build(python, out, likelihood="residual", residual_scale=0.3, seed=9)
    assert np.array_equal(again.act(obs, noise=None).actions, policy.act(obs, noise=None).actions)
    with pytest.raises(CheckpointError, match=r"bound is 0\.3"):
        build(python, out, likelihood="residual")
    other = write_policy(tmp_path / "other", noise=True, cameras=1, action=3)
    with pytest.raises(CheckpointError, match="is not the config of"):
        FACTORY.compare(policy._cfg, table(), other)
    with pytest.raises(ConfigError, match="actions of 3 numbers, env 'table' takes 2"):
        build(python, other)


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("noise", [False, True])
def test_dsrl_selects_the_initial_noise_of_a_lerobot_policy(python, tmp_path, noise, repeated):
    folder, obs = write_policy(tmp_path / "base", noise=noise, cameras=1), observe(3)
    keys = {"likelihood": "dsrl", "noise_bound": 0.5, "noise_repeated": repeated}
    policy = build(python, folder, trainable=True, **keys)
    torch.nn.init.normal_(policy.module.noise_actor.layers[-1].weight, std=3.0)
    features = policy.features(obs)
    assert features.shape == (3, 4 + 3 * 64)
    with torch.no_grad():
        rows = policy.module.noise_actor.greedy(features).tanh().view(3, -1, 3).expand(-1, 6, -1)
    chosen = 0.5 * rows.numpy()
    assert 0.3 < np.abs(chosen).max() <= 0.5
    assert bool(np.ptp(chosen, axis=1).any()) is not repeated
    base = obs.state.sum(1)[:, None, None] / 2 * np.arange(1, 3) / 50
    actions = policy.act(obs, noise=None).actions
    drawn = actions / 2 - base - chosen[:, :4, :2]
    assert np.abs(drawn).max() > 0.01 if noise else np.abs(drawn).max() < 1e-5
    alone = policy.act(part(obs, slice(2, None)), noise=None).actions
    np.testing.assert_allclose(alone, actions[2:], atol=1e-5)
    out = policy.act(obs, noise=noise_for(policy, 3))
    with torch.no_grad():
        assert np.abs(policy.score(obs, out.tokens).logprob.numpy() - out.logprob).max() < 1e-4
    assert FACTORY.costs(policy._cfg, table(), 0).num_trained == sum(p.numel() for p in policy.module.parameters())


def test_dsrl_is_refused_for_a_lerobot_policy_without_initial_noise(python, tmp_path):
    folder = write_policy(tmp_path / "base", noise=False, kind="fixed")
    assert build(python, folder, likelihood="residual").act(observe(1), noise=None).actions.shape == (1, 4, 2)
    with pytest.raises(EmbodyError, match=r"'fixed' has no argument noise.*model\.likelihood=residual"):
        build(python, folder, likelihood="dsrl")
    folder = write_policy(tmp_path / "other", noise=True, kind="ignoring")
    with pytest.raises(EmbodyError, match=r"ignores its argument `noise`; set model\.likelihood=residual"):
        build(python, folder, likelihood="dsrl").act(observe(2), noise=None)


@pytest.mark.parametrize("repeated", [False, True])
def test_residual_imitates_actions_within_its_bound(python, tmp_path, repeated):
    folder, obs = write_policy(tmp_path / "base", noise=False), observe(3)
    keys = {"likelihood": "residual", "residual_scale": 0.5, "residual_repeated": repeated}
    policy = build(python, folder, trainable=True, **keys)
    proposed = policy.act(obs, noise=None).actions
    half = np.asarray([1.0, 5.0], np.float32)
    correction = np.asarray([0.25, -0.1], np.float32)
    first = policy.imitate(obs, proposed + half * correction)
    assert first.error is not None
    np.testing.assert_allclose(first.error.numpy(), 0.175, atol=1e-4)
    mean = policy.module.residual_actor.greedy(policy.features(obs)).detach()
    unit = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, 1.0), [torch.distributions.transforms.TanhTransform()]
    )
    density = unit.log_prob(torch.tensor(correction / 0.5).expand_as(mean)).flatten(1).mean(1)
    np.testing.assert_allclose(first.loss.detach().numpy(), -density.numpy(), atol=1e-3)
    optimizer = torch.optim.Adam(policy.module.parameters(), 3e-2)
    for _ in range(40):
        optimizer.zero_grad()
        policy.imitate(obs, proposed + half * correction).loss.sum().backward()
        optimizer.step()
    moved = (policy.act(obs, noise=None).actions - proposed) / half
    np.testing.assert_allclose(moved, np.broadcast_to(correction, moved.shape), atol=0.1)
    beyond = policy.imitate(obs, proposed + 10 * half)
    assert torch.isfinite(beyond.loss).all()
    with pytest.raises(ConfigError, match="outputs noise"):
        build(python, folder, likelihood="dsrl").imitate(obs, proposed)


SAME = (
    *("env=gym", "env.id=Pendulum-v1", "model=lerobot", "model.num_action_chunks=4"),
    *("launcher=inline", "runner.deterministic=true", "runner.logger.backends=[jsonl]", "video=none"),
    *("env.eval.total_num_envs=2", "env.eval.max_episode_steps=24", "eval.episodes=3"),
)
SHORT = (
    *("env.train.total_num_envs=2", "env.train.max_steps_per_rollout_epoch=24", "actor.global_batch_size=8"),
    *("runner.max_steps=4", "runner.save_interval=2", "runner.val_check_interval=4", "checkpoint.keep=9"),
    *("env.train.continue_episodes=false", "actor.optim.lr=3e-3", "env.train.max_episode_steps=24"),
)
BUFFER = ("algorithm.learning_starts=8", "algorithm.updates_per_sample=0.5")
LEARNERS = {
    "residual": ("algorithm=sac", *BUFFER),
    "dsrl": ("algorithm=sac", *BUFFER),
    "filtered_bc": ("algorithm=filtered_bc", "algorithm.imitate_above=-1000", *BUFFER),
}


def played(folder: Path) -> list[tuple[float, int]]:
    rows = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    return [(row["return"], row["steps"]) for row in sorted(rows, key=lambda row: row["episode"])]


def check_runs(python: str, base: Path, tmp_path: Path, learner: str) -> None:
    """Train, and compare evaluation of the checkpoint, of its export, and of a resumed run."""
    likelihood = "model.likelihood=" + ("dsrl" if learner == "dsrl" else "residual")
    same = (*SAME, likelihood, f"model.python={python}", f"runner.output_dir={tmp_path}")
    start = (*same, *SHORT, *LEARNERS[learner], f"model.path={base}")
    whole = train(load_config("train", [*start, "runner.experiment_name=whole"])).run
    at_first, validated = (played(whole / "eval" / f"step_00000{step}") for step in (0, 4))
    assert at_first != validated, "it learned nothing that changes an action"
    alone = evaluate(load_config("eval", [*same, f"ckpt={whole}", f"model.path={base}"]))
    assert played(alone.folder) == validated
    out = export(whole, 4, tmp_path / "exported", overrides=["trust=true"])
    assert played(evaluate(load_config("eval", [*same, f"model.path={out}"])).folder) == validated
    half = train(load_config("train", [*start, "runner.experiment_name=half"]), on_step=lambda step, _: step == 2).run
    train(load_saved_config(half, ["trust=true"]), resume=half)
    one, other = (load_file(run / "checkpoints/step_000004/policy/embodyrl_heads.safetensors") for run in (whole, half))
    assert {key: value.tobytes() for key, value in one.items()} == {key: v.tobytes() for key, v in other.items()}


@pytest.mark.parametrize("learner", LEARNERS)
def test_frozen_policy_in_a_lerobot_process_trains_resumes_and_exports(python, tmp_path, learner):
    check_runs(python, write_policy(tmp_path / "base", noise=True, state=3, action=1), tmp_path, learner)


PENDULUM = {
    "act": "dict(dim_model=32, n_heads=2, dim_feedforward=32, n_encoder_layers=1, latent_dim=8, chunk_size=8)",
    "diffusion": "dict(down_dims=(16, 32), n_groups=4, horizon=8, n_obs_steps=1, num_train_timesteps=4)",
}


@real_lerobot
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "learner"), [("act", "residual"), ("diffusion", "residual"), ("diffusion", "dsrl"), ("act", "filtered_bc")]
)
def test_frozen_policy_of_real_lerobot_trains_resumes_and_exports(kind, learner, tmp_path):
    assert LEROBOT
    check_runs(LEROBOT, made_by_lerobot(tmp_path / "base", kind, PENDULUM[kind], "environment"), tmp_path, learner)


@real_lerobot
@pytest.mark.timeout(300)
def test_dsrl_on_act_of_lerobot_is_refused(tmp_path):
    base = made_by_lerobot(tmp_path / "base", "act", PENDULUM["act"], "environment")
    overrides = [*SAME, "model.likelihood=dsrl", f"model.python={LEROBOT}", f"model.path={base}", *LEARNERS["dsrl"]]
    with pytest.raises(EmbodyError, match="'act' has no argument noise"):
        train(load_config("train", [*overrides, *SHORT, f"runner.output_dir={tmp_path}"]))
