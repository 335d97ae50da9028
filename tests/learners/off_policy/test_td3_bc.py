"""TD3+BC: losses in float64, gradients, replay classes, and resumed runs."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from rank_work import RECORDS, fill
from toy_runs import TOY_COLLECT, TOY_OFT, comparable, resume_toy, toy_config, train_toy, weights

from embodyrl.algorithms.off_policy.td3_bc import policy_loss, smooth_actions
from embodyrl.channels.arena import Arena, get_record_indices, read_observation
from embodyrl.channels.layout import Record, encode_instruction
from embodyrl.channels.messages import UpdateRequest
from embodyrl.commands.collect import collect
from embodyrl.data.cards import read_card
from embodyrl.data.reader import load_demonstrations
from embodyrl.errors import ConfigError
from embodyrl.learners.off_policy.td3_bc_learner import SUCCESS, TARGET, Td3BcLearner
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.scheduler.start import build_policy_init
from embodyrl.specs import convert_gripper
from embodyrl.workers.policy_host import PolicyHost

TD3 = (
    *(*TOY_OFT, "model.action_head=l1", "algorithm=td3_bc", "algorithm.group_size=1", "algorithm.learning_starts=1"),
    *("algorithm.n_step=1", "algorithm.policy_interval=2", "actor.optim.warmup_steps=0"),
)


@pytest.fixture
def make(tmp_path):
    """Build an actor with records of two terminated episodes of three chunks, the first with reward 1."""
    made = []

    def build(*words: str) -> tuple[PolicyHost, Td3BcLearner, Arena, np.ndarray]:
        sizes = ("actor.global_batch_size=6", "actor.micro_batch_size=6", "env.train.total_num_envs=8")
        run_plan = build_run_plan(toy_config(tmp_path, *sizes, *TD3, *words), training=True)
        arena = Arena.create(run_plan.layout, max(run_plan.capacity, RECORDS))
        host = PolicyHost(build_policy_init(run_plan, arena, None))
        record_refs = fill(arena, run_plan, host)
        records = get_record_indices(record_refs)
        arena[Record.advantage][records], arena[Record.valid][records] = 0.0, True
        arena[Record.advantage][records[2], 0] = 1.0
        arena[Record.terminated][records] = np.array([0, 0, 1] * 2, np.bool_)[:, None]
        made.append((host, arena))
        assert isinstance(host._learner, Td3BcLearner)
        return host, host._learner, arena, record_refs

    yield build
    for host, arena in made:
        host.close()
        arena.close()


def update(host: PolicyHost, record_refs: np.ndarray, step: int = 0) -> dict[str, float]:
    (done,) = host.handle(UpdateRequest(step=step, record_refs=record_refs, episode=[i // 3 for i in range(RECORDS)]))
    return done.metrics


def changed(before: dict[str, torch.Tensor], module: torch.nn.Module) -> set[str]:
    return {name for name, weight in module.named_parameters() if not torch.equal(before[name], weight)}


def test_losses_match_float64_reference():
    rng = np.random.default_rng(0)
    value, scale = rng.random((2, 5)), 0.7
    action, target, normal = (rng.normal(size=(5, 4)) for _ in range(3))
    imitated, weight = np.array([1.0, 0, 1, 0, 1]), 0.3
    noise = [[0.2 * max(-2.5, min(2.5, 2 * n)) for n in row] for row in normal]
    pairs = [zip(*rows, strict=True) for rows in zip(action, noise, strict=True)]
    noisy = [[max(-1, min(1, a + n)) for a, n in row] for row in pairs]
    smoothed = smooth_actions(torch.from_numpy(action), torch.from_numpy(2 * normal), 0.2)
    np.testing.assert_allclose(smoothed, noisy, rtol=1e-12)
    parts = [torch.from_numpy(array) for array in (value[0], np.array(scale), action, target, imitated)]
    errors = [sum(abs(a - b) for a, b in zip(*rows, strict=True)) / 4 for rows in zip(action, target, strict=True)]
    expected = [-v / scale + weight * i * e for v, i, e in zip(value[0], imitated, errors, strict=True)]
    np.testing.assert_allclose(policy_loss(*parts, weight), expected, rtol=1e-12)


def evaluate(critics: torch.nn.Module, features: torch.Tensor, actions: torch.Tensor) -> np.ndarray:
    """Return the Q values [n, B] of critics with layer normalization, computed in float64."""
    x = np.concatenate([features.detach().numpy(), actions.detach().numpy()], 1).astype(np.float64)[None]
    pairs = zip(critics.weights, critics.biases, strict=True)  # type: ignore[arg-type]
    layers = [[part.detach().double().numpy() for part in pair] for pair in pairs]
    for index, (weight, bias) in enumerate(layers):
        x = x @ weight + bias
        if index < len(layers) - 1:
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
            x = np.maximum(x, 0)
    return x[..., 0]


def test_update_matches_float64_reference(make):
    """One update of critics and policy: sampled rows, values and losses are computed again in numpy."""
    words = ("algorithm.updates_per_sample=0.1", "algorithm.bc_weight=0.3", "algorithm.target_noise=0.05")
    host, actor, _, record_refs = make(*words, "algorithm.success_share=0.5", "actor.micro_batch_size=4")
    before, policy = deepcopy((actor._critics, actor._targets)), deepcopy(actor._policy.module.state_dict())
    add = actor._add
    actor._add = lambda frames, request: add(  # type: ignore[method-assign]
        replace(frames, seen={**frames.seen, TARGET: -frames.action}), request
    )
    metrics = update(host, record_refs)
    after = deepcopy(actor._critics)
    host.policy.module.load_state_dict(policy)
    with torch.no_grad():
        features, chunks = actor._policy.propose(read_observation(actor._replay, np.arange(6)))
    rng = np.random.default_rng(np.random.SeedSequence([actor._seed, 0, 0x0FF]))
    rows = actor._sample(rng, 0.5)
    normal = rng.standard_normal(chunks[rows].shape, np.float32)
    rng.permutation(2)
    last = np.isin(rows, (2, 5))
    following = np.where(last, rows, rows + 1)
    noisy = np.clip(chunks[following].numpy() + 0.05 * np.clip(normal, -2.5, 2.5), -1, 1)
    bootstrap = evaluate(before[1], features[following], torch.from_numpy(noisy)).min(0)
    target = (rows == 2) + np.where(last, 0.0, actor._settings.gamma) * bootstrap
    taken = torch.from_numpy(actor._replay["action"])
    value = evaluate(before[0], features[rows], taken[rows])
    assert metrics["value"] == pytest.approx(value.mean(), rel=1e-4, abs=1e-6)
    assert metrics["value_loss"] == pytest.approx(0.5 * np.square(value - target).mean(1).sum(), rel=1e-4)
    rows, imitated = actor._sample(rng, 0.5), -taken
    scale = np.abs(evaluate(after, features[rows], imitated[rows]).mean(0)).mean()
    improved = evaluate(after, features[rows], chunks[rows].clamp(-1, 1)).mean(0)
    error = np.abs(chunks[rows].double().numpy() - imitated[rows].double().numpy()).mean(1)
    assert metrics["loss"] == pytest.approx((-improved / scale + 0.3 * (rows < 3) * error).mean(), rel=1e-4)


def test_stored_transitions_are_sampled_actions_and_successes(make):
    host, actor, arena, record_refs = make("algorithm.learning_starts=1000")
    update(host, record_refs)
    records = get_record_indices(record_refs)
    sampled = arena[Record.tokens][records].astype(np.int32).view(np.float32)
    np.testing.assert_array_equal(actor._replay["action"][:6], sampled.clip(-1, 1))
    np.testing.assert_array_equal(actor._replay[SUCCESS][:6], [True] * 3 + [False] * 3)
    np.testing.assert_array_equal(actor._replay["reward"][:6], [0, 0, 1, 0, 0, 0])


def test_final_observation_has_no_reward(make):
    """The record of a final observation contains the reward of an earlier chunk."""
    _, actor, _, record_refs = make("algorithm.learning_starts=1000")
    acted, final = record_refs[[0, 1, 3, 4, 5]], int(record_refs[2])
    request = UpdateRequest(step=0, record_refs=acted, episode=[0, 0, 1, 1, 1], finals=((0, final),))
    actor._store(request)
    np.testing.assert_array_equal(actor._replay["reward"][:6], np.zeros(6))
    assert not actor._replay[SUCCESS][:6].any()


def test_policy_imitates_labels_and_critics_train_on_executed_actions(make, tmp_path):
    words = (*TOY_COLLECT, "model.expert_noise=0.3", "collect.episodes=2", "launcher=inline")
    folder = tmp_path / "demos"
    collect(load_config("collect", [*words, f"collect.out={folder}", f"runner.output_dir={tmp_path}"]))
    _, actor, _, _ = make(f"algorithm.demonstrations=[{folder}]")
    demos, spec, stored = load_demonstrations(folder), actor._policy.spec, actor._replay
    steps = np.arange(0, demos.stop[0], spec.num_action_chunks)
    observation = read_observation(stored, np.arange(len(steps)))
    for field, actions in ((TARGET, demos.action), ("action", demos.executed)):
        chunks = replace(demos, action=actions).chunks(steps, spec.num_action_chunks)
        convert_gripper(chunks, read_card(folder).env.action.gripper, spec.gripper)
        np.testing.assert_array_equal(stored[field][: len(steps)], actor._policy.normalize(chunks, observation))
    assert np.abs(stored[TARGET] - stored["action"]).max() > 0.1, "the noise"


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_batches_contain_the_fraction_of_successes(make, share):
    """An empty class is replaced by the other class, in both directions."""
    host, actor, _, record_refs = make("actor.global_batch_size=40", "algorithm.learning_starts=1000")
    update(host, record_refs)
    rng, actor._starts = np.random.default_rng(0), actor._replay.starts
    assert (actor._sample(rng, share) < 3).mean() == share
    for only in (np.arange(3), np.arange(3, 6)):
        actor._starts = only
        assert np.isin(actor._sample(rng, share), only).all()
        assert len(actor._sample(rng, share)) == 40


def test_each_task_has_the_same_share_of_successes(make):
    """The sixth record alone has another instruction, so it is half of the sample instead of a sixth."""
    host, actor, arena, record_refs = make("actor.global_batch_size=2000", "algorithm.learning_starts=1000")
    records = get_record_indices(record_refs)
    arena[Record.instruction][records[5]] = encode_instruction("another task", arena[Record.instruction].shape[1])
    arena[Record.advantage][records[5], 0] = 1.0
    update(host, record_refs)
    actor._starts = actor._replay.starts
    sampled = actor._sample(np.random.default_rng(0), 0.5)
    np.testing.assert_allclose(np.bincount(sampled) / 2000, [0.1] * 5 + [0.5], atol=0.05)


def test_only_successful_actions_are_imitated(make):
    """Without a Q term there is a gradient for a batch of successes, and none for a batch of failures."""
    moved = []
    for share in ("1.0", "0.0"):
        words = ("algorithm.bc_weight=1e9", f"algorithm.success_share={share}", "actor.optim.clip_grad=1")
        host, actor, _, record_refs = make(*words)
        with torch.no_grad():  # constant critics: the Q term has no gradient
            for weight in (*actor._critics.weights, *actor._critics.biases):  # type: ignore[misc]
                weight.zero_()
        actor._optimizers["critics"].param_groups[0]["lr"] = 0.0
        before = deepcopy(host.policy.module.state_dict())
        update(host, record_refs)
        moved.append(bool(changed(before, host.policy.module)))
    assert moved == [True, False]


def test_critics_train_head_and_backbone_without_imitation(make):
    host, _, _, record_refs = make("algorithm.bc_weight=0", "actor.optim.lr=0.01")
    before = deepcopy(host.policy.module.state_dict())
    update(host, record_refs)
    parts = {name.partition(".")[0] for name in changed(before, host.policy.module)}
    assert {"action_head", "language_model", "projector", "vision_backbone"} <= parts
    assert "action_scale" not in parts, "the exploration noise is fixed"


def test_only_adapters_and_head_are_trained_with_lora(make, tmp_path):
    (tmp_path / "start").mkdir()
    make()[0].policy.save(tmp_path / "start")
    host, _, _, record_refs = make(f"model.path={tmp_path}/start", "model.is_lora=true", "actor.optim.lr=0.01")
    before = deepcopy(host.policy.module.state_dict())
    update(host, record_refs)
    names = changed(before, host.policy.module)
    assert any("lora" in name for name in names)
    assert all("lora" in name or name.startswith("action_head") for name in names), names


def test_critic_warmup_leaves_policy_unchanged(make):
    host, actor, _, record_refs = make("algorithm.critic_warmup=1", "actor.optim.lr=0.01")
    before, critics = deepcopy(host.policy.module.state_dict()), deepcopy(actor._critics.state_dict())
    assert "loss" not in update(host, record_refs)
    assert not changed(before, host.policy.module)
    assert changed(critics, actor._critics)
    assert "loss" in update(host, record_refs, step=1)
    assert changed(before, host.policy.module)


def test_rollouts_and_target_policy_use_averaged_weights(make):
    """One policy update from w to w' gives a policy of 0.75 w + 0.25 w', and the next update starts from w'."""
    words = ("actor.optim.lr=0.01", "algorithm.updates_per_sample=0.1")
    plain, moving = (make(*words, *more) for more in ((), ("algorithm.average=0.75",)))
    start, after = deepcopy(moving[0].policy.module.state_dict()), []
    for host, _, _, record_refs in (plain, moving):
        update(host, record_refs)
        after.append(deepcopy(host.policy.module.state_dict()))
    for name, weight in after[1].items():
        torch.testing.assert_close(weight, start[name].lerp(after[0][name], 0.25), rtol=0, atol=1e-6, msg=name)
    host, actor, _, record_refs = moving
    actor._average.swap()
    assert all(torch.equal(weight, after[0][name]) for name, weight in host.policy.module.named_parameters())
    actor._average.swap()
    with torch.no_grad():
        expected = actor._policy.propose(read_observation(actor._replay, np.arange(6)))
    proposed: list[torch.Tensor] = []
    encode = actor._encode

    def record():
        result = yield from encode()
        proposed.extend(part[:6] for part in result)
        return result

    actor._encode = record
    update(host, record_refs, step=1)
    assert all(torch.equal(a, b) for a, b in zip(proposed, expected, strict=True))


@pytest.mark.parametrize("average", [0.0, 0.9])
def test_resumed_run_equals_uninterrupted_run(tmp_path, average):
    words = (*TD3, "runner.deterministic=true", "runner.save_interval=1", "actor.micro_batch_size=4")
    words = (*words, f"algorithm.average={average}", "actor.optim.lr=0.003")
    whole = train_toy(tmp_path, *words, "runner.max_steps=3", name="whole")
    part = train_toy(tmp_path, *words, "runner.max_steps=2", name="part")
    resume_toy(part, "runner.max_steps=3")
    assert weights(whole, 3) == weights(part, 3)
    assert comparable(whole)[-1] == comparable(part)[-1]


@pytest.mark.parametrize("model", ["openvla_oft_tiny", "flow_small", "openvla_oft_tiny model.likelihood=residual"])
def test_policy_without_regression_head_is_rejected_by_name(tmp_path, model):
    cfg = load_config(
        "train", ["env=tabletop", *f"model={model}".split(), "algorithm=td3_bc", f"runner.output_dir={tmp_path}"]
    )
    with pytest.raises(ConfigError, match=r"td3_bc.*has none here.*model\.action_head=l1"):
        build_run_plan(cfg, training=True)
