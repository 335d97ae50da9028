"""A GRPO step by hand: groups of episodes from one table, advantages, a clipped loss. See docs/tutorials/program.md."""

import sys

import numpy as np
import torch

import embodyrl

GROUPS, GROUP_SIZE, CLIP, TABLES = 4, 8, 0.2, range(3000)


def episode(policy, env, reset_id, rng):
    """Play one episode with sampled actions: observations, tokens and log-probabilities of each chunk, and success."""
    seen, info = env.reset(options={"reset_id": reset_id})
    chunks, done = [], False
    while not done:
        obs = policy.observe([seen])
        out = policy.decide(obs, noise=rng.random((1, policy.policy.spec.tokens_per_chunk), np.float32))
        chunks.append((seen, out.tokens[0], out.logprob[0]))
        for action in out.actions[0]:
            seen, _, terminated, truncated, info = env.step(action)
            if done := terminated or truncated:
                break
    return chunks, float(info["success"])


def grpo_step(policy, env, optimizer, rng):
    """Collect, compare within each group (Shao et al. 2024, arXiv:2402.03300), and take one optimizer step."""
    samples, successes = [], []
    for reset_id in rng.choice(TABLES, GROUPS, replace=False):
        played = [episode(policy, env, int(reset_id), rng) for _ in range(GROUP_SIZE)]
        reward = np.array([success for _, success in played])
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        samples += [(*chunk, a) for (chunks, _), a in zip(played, advantage, strict=True) if a for chunk in chunks]
        successes.append(reward.mean())
    if samples:  # a group whose episodes all ended alike teaches nothing
        seen, tokens, before, weight = zip(*samples, strict=True)
        now = policy.policy.score(policy.observe(seen), np.stack(tokens)).logprob
        ratio = torch.exp(now - torch.as_tensor(np.stack(before)))
        weight = torch.as_tensor(np.array(weight, np.float32))[:, None]
        loss = -torch.minimum(ratio * weight, ratio.clamp(1 - CLIP, 1 + CLIP) * weight).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(np.mean(successes))


if __name__ == "__main__":
    policy = embodyrl.load_policy("assets/openvla_oft_tabletop", "env.eval.task_ids=[0]", trainable=True, device="cpu")
    env, rng = policy.make_env(), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(policy.policy.module.parameters(), lr=2e-4)
    for step in range(20):
        sys.stdout.write(f"step {step}: success {grpo_step(policy, env, optimizer, rng):.2f}\n")
