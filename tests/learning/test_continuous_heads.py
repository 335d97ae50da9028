"""RL with the continuous heads of OpenVLA-OFT improves the reward: toy runs and a bandit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from toy_runs import TOY_OFT, resume_toy, rows, train_toy

from embodyrl.policies.lerobot.diffusion.schedule import DenoisingChain
from embodyrl.policies.openvla_oft import FACTORY
from embodyrl.policies.openvla_oft.heads import TRAIN_STEPS, build_ddim_schedule, embed_time
from embodyrl.policies.openvla_oft.settings import ActionHead, OftSettings, get_chunk_record
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.settings import Precision
from embodyrl.policies.vla.records import Stochastic
from embodyrl.types import ActionSpec, BenchmarkSpec, CameraSpec, EnvSpec, GripperConvention, Observation

pytestmark = [pytest.mark.integration]
L1 = ("model.action_head=l1", "model.action_std=0.2")
DIFFUSION = ("model.action_head=diffusion", "model.num_diffusion_steps_inference=3")
RESIDUAL = ("model.likelihood=residual", "model.precision=bf16")
HEADS = {"l1": L1, "one": DIFFUSION, "all": (*DIFFUSION, "model.stochastic_steps=all"), "residual": RESIDUAL}


@pytest.mark.parametrize(("head", "algorithm"), [("l1", "ppo"), ("one", "grpo"), ("residual", "ppo")])
def test_continuous_head_run_trains_and_resumes(head: str, algorithm: str, tmp_path: Path) -> None:
    """Log-probabilities of acting and training agree in the first step, although the batches differ."""
    words = [*TOY_OFT, *HEADS[head], f"algorithm={algorithm}", "actor.micro_batch_size=4"]
    if algorithm == "ppo":
        words += ["env.train.max_steps_per_rollout_epoch=8", "algorithm.group_size=1"]
    run = train_toy(tmp_path, *words)
    found = rows(run)
    assert [row["step"] for row in found] == [1, 2]
    assert found[1]["actor/lr"] > found[0]["actor/lr"], "pretrained policies warm up by default"
    learned = [row for row in found if row["actor/grad_norm"]]
    assert learned, "no step had a signal"
    assert learned[0]["actor/logprob_gap"] < 1e-5
    assert [row["step"] for row in rows(resume_toy(run, "runner.max_steps=3"))][-1] == 3


@pytest.mark.parametrize("steps", ["one", "all"])
def test_denoising_chain_learns_the_bandit(steps: str) -> None:
    """RL moves a trained denoiser to the target of the bandit below; an untrained denoiser does not reach it.

    A network that predicts zero noise saturates the clean estimate at -1 and 1, where its gradient has the wrong sign.
    """
    torch.manual_seed(0)
    count, rng = 64, np.random.default_rng(0)
    chosen = {"num_diffusion_steps_inference": 3, "stochastic_steps": Stochastic(steps)}
    cfg = OftSettings(model_type="openvla_oft", num_action_chunks=1).updated(chosen)
    noisy, plain = build_ddim_schedule(3, 1.0), build_ddim_schedule(3)
    chain = DenoisingChain(
        get_chunk_record(cfg), noisy, plain, every_step=cfg.every_step, min_std=cfg.diffusion_min_std
    )
    side = torch.tensor([-1.0, 1.0]).repeat(count // 2)[:, None]
    net = nn.Sequential(nn.Linear(7 + 32 + 1, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 7))
    device = torch.device("cpu")

    def predict(x: torch.Tensor, level: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        noise = net(torch.cat([x.flatten(1), embed_time(level, 32), side], 1)).view_as(x)
        return noise, noise

    def loss_of(actions: torch.Tensor) -> torch.Tensor:
        return (actions[..., :6] - 0.4 * side[:, :, None]).square().mean((1, 2))

    def update(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(300):
        shown, noise = (0.3 * torch.randn(count, 1, 7)).clamp(-1, 1), torch.randn(count, 1, 7)
        level = torch.randint(TRAIN_STEPS, (count,))
        share = plain.alphas_cumprod[level][:, None, None]
        update((predict(share.sqrt() * shown + (1 - share).sqrt() * noise, level)[0] - noise).square().mean())
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)
    losses = []
    for _ in range(120):
        with torch.no_grad():
            drawn = chain.sample(predict, rng.integers(0, 2**46, count), device, 1.0)
        lost = loss_of(drawn.state)
        usual = lost.view(-1, 2).mean(0).repeat(count // 2)
        logprob = chain.score(predict, drawn.tokens, device, 1.0)[0].flatten(1).sum(1)
        update((logprob * (lost - usual) / (lost.std() + 1e-6)).mean())
        losses.append(float(lost.mean()))
    assert np.mean(losses[-10:]) < 0.6 * np.mean(losses[:10])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["up", "down"])
def test_continuous_head_learns_a_bandit(head: str, sign: float, request: pytest.FixtureRequest) -> None:
    """Reward: minus the squared distance of the chunk from a target that the instruction names.

    Policy gradient with the batch mean as baseline; with the opposite sign the reward decreases.
    """
    if head != "l1" and sign > 0:
        # Loss 0.738 became 0.629 and 0.482 after 40 updates, 0.713 and 0.681 after 160 and 120: not learned.
        request.applymarker(pytest.mark.xfail(strict=True, reason="denoising that was never trained does not learn"))
    tasks = ("reach the left", "reach the right")
    env = EnvSpec(
        name="bandit",
        action=ActionSpec(dim=7, gripper=GripperConvention(open=-1.0, closed=1.0)),
        tasks=tasks,
        states_per_task=(1, 1),
        cameras=CameraSpec(names=("front",), size=(64, 64)),
        benchmark=BenchmarkSpec(unnorm_key="libero_10"),
    )
    cfg = OftSettings(model_type="openvla_oft", path="assets/openvla_oft_tiny", precision=Precision.fp32)
    keys = {"num_action_chunks": 1, "action_head": ActionHead.l1 if head == "l1" else ActionHead.diffusion}
    more = dict(word.removeprefix("model.").split("=") for word in HEADS[head])
    for name, kind in (("action_std", float), ("num_diffusion_steps_inference", int)):
        keys |= {name: kind(more[name])} if name in more else {}
    if "stochastic_steps" in more:
        keys["stochastic_steps"] = type(cfg.stochastic_steps)(more["stochastic_steps"])
    policy = FACTORY.build(cfg.updated(keys), PolicyRequest(env=env, device="cpu", seed=0, trainable=True))
    rng, count = np.random.default_rng(0), 32
    image = rng.integers(0, 256, (1, 1, 64, 64, 3), np.uint8)
    obs = Observation(
        images=np.repeat(image, count, 0), state=np.zeros((count, 0), np.float32), instructions=tasks * (count // 2)
    )
    target = np.where(np.arange(count) % 2, 0.4, -0.4)[:, None, None]

    def reward(actions: np.ndarray) -> np.ndarray:
        return -np.square(actions[..., :6] - target).mean((1, 2))

    optimizer = torch.optim.Adam([p for p in policy.module.parameters() if p.requires_grad], lr=3e-4)
    before = reward(policy.act(obs, noise=None).actions).mean()
    for _ in range(40):
        out = policy.act(obs, noise=rng.random((count, policy.spec.tokens_per_chunk), dtype=np.float32))
        earned = reward(out.actions)
        advantage = torch.from_numpy(sign * (earned - earned.mean()) / (earned.std() + 1e-6)).float()
        optimizer.zero_grad()
        scores = policy.score(obs, out.tokens)
        (-(scores.logprob.sum(1) * advantage).mean()).backward()
        torch.nn.utils.clip_grad_norm_(policy.module.parameters(), 1.0)
        optimizer.step()
    after = reward(policy.act(obs, noise=None).actions).mean()
    assert (after > 0.6 * before) if sign > 0 else (after < 1.2 * before), (before, after)
