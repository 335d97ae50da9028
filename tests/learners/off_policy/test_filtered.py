"""Filtered behavior cloning: stored chunks, target actions and updates."""

from __future__ import annotations

import json
from contextlib import closing
from copy import deepcopy

import numpy as np
import pytest
import torch
from rank_work import RECORDS, Rollout, fill, losses, run_ranks, state
from toy_runs import TOY_COLLECT, TOY_OFT, toy_config

from embodyrl.channels.arena import Arena, get_record_indices
from embodyrl.channels.layout import Record
from embodyrl.channels.messages import LoadRequest, SaveRequest, UpdateRequest
from embodyrl.commands.collect import collect
from embodyrl.data.reader import load_demonstrations
from embodyrl.errors import ConfigError
from embodyrl.learners.off_policy.filtered_bc_learner import FilteredLearner
from embodyrl.learners.off_policy.weight_average import TRAINED
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config
from embodyrl.scheduler.start import build_policy_init
from embodyrl.specs import convert_gripper
from embodyrl.types import Observation
from embodyrl.workers.policy_host import PolicyHost

FILTERED = ("algorithm=filtered_bc", "algorithm.learning_starts=1", "algorithm.updates_per_sample=0.2")


@pytest.fixture
def make(tmp_path):
    """Build an actor with records of two episodes of three chunks, the first with a high return."""
    made = []

    def build(*words: str) -> tuple[PolicyHost, FilteredLearner, Arena, np.ndarray]:
        sizes = ("actor.global_batch_size=6", "actor.micro_batch_size=6", "env.train.total_num_envs=8")
        run_plan = build_run_plan(toy_config(tmp_path, *sizes, *FILTERED, *words), training=True)
        arena = Arena.create(run_plan.layout, max(run_plan.capacity, RECORDS))
        host = PolicyHost(build_policy_init(run_plan, arena, None))
        record_refs = fill(arena, run_plan, host)
        arena[Record.advantage][get_record_indices(record_refs)] = np.repeat([1.0, 0.0], 3)[:, None]
        made.append((host, arena))
        assert isinstance(host._learner, FilteredLearner)
        return host, host._learner, arena, record_refs

    yield build
    for host, arena in made:
        host.close()
        arena.close()


def update(host: PolicyHost, record_refs: np.ndarray, step: int = 0) -> dict[str, float]:
    (done,) = host.handle(
        UpdateRequest(step=step, record_refs=record_refs, episode=[i // 3 for i in range(len(record_refs))])
    )
    return done.metrics


def test_chunks_of_successful_episodes_are_stored(make):
    """Unexecuted actions are not stored; after the end of an episode its last action repeats, as in demonstrations."""
    host, actor, arena, record_refs = make("algorithm.learning_starts=1000")
    records = get_record_indices(record_refs)
    arena[Record.advantage][records] = np.repeat([1.0, 0.0, 1.0], 2)[:, None]
    arena[Record.valid][records] = np.arange(4) < np.array([4, 2, 4, 4, 4, 4])[:, None]
    actor._horizon = 6  # of a policy that executes four
    list(host.handle(UpdateRequest(step=0, record_refs=record_refs, episode=[0, 0, 1, 1, 2, 2])))
    done = arena[Record.action][records].copy()
    convert_gripper(done, actor._gripper, actor._policy.spec.gripper)
    first, last = done[:2].reshape(8, -1)[:6], done[4:].reshape(8, -1)
    followed = [part[np.minimum(at + np.arange(6), len(part) - 1)] for part in (first, last) for at in (0, 4)]
    assert len(actor._replay.starts) == 4
    np.testing.assert_array_equal(actor._replay["action"][:4], followed)
    np.testing.assert_array_equal(actor._replay[Record.images][:4], arena[Record.images][records[[0, 1, 4, 5]]])


def test_actions_of_a_delayed_chunk_start_at_its_observation(make):
    """The first two actions after the observation are those of the previous chunk."""
    _, actor, arena, record_refs = make("algorithm.learning_starts=1000")
    records = get_record_indices(record_refs)[:2]
    arena[Record.valid][records] = [[True] * 4, [False] * 2 + [True] * 2]
    first, second = actor._collect_executed_actions(records, np.array([0, 0]))
    done = arena[Record.action][records].copy()
    convert_gripper(done, actor._gripper, actor._policy.spec.gripper)
    np.testing.assert_array_equal(first, done[0])
    np.testing.assert_array_equal(second, [done[0, 2], done[0, 3], done[1, 2], done[1, 3]])


def test_stored_actions_use_the_gripper_convention_of_the_policy(make):
    host, actor, _, record_refs = make(*TOY_OFT)
    means, own = actor._gripper, actor._policy.spec.gripper
    assert means is not None
    assert own is not None
    assert (means.open, means.closed) != (own.open, own.closed), "or this test shows nothing"
    update(host, record_refs)
    assert set(np.unique(actor._replay["action"][:3, :, own.index])) <= {own.open, own.closed}


def test_filtered_bc_update_matches_sft(make):
    """Loss and gradient equal the mean over the samples in plain torch; micro-batches have no effect."""
    host, actor, _, record_refs = make("actor.optim.lr=0.01", "actor.optim.clip_grad=1e9", "actor.optim.weight_decay=0")
    twin = deepcopy(actor._policy.module)
    metrics = update(host, record_refs)
    assert metrics["optimizer_steps"] == 1
    after = {name: w.detach().clone() for name, w in actor._policy.module.named_parameters()}
    actor._policy.module.load_state_dict(twin.state_dict())
    rng = np.random.default_rng(np.random.SeedSequence([actor._seed, 0, 0xF1]))
    obs, actions = actor._sample_batch(rng, actor._replay.starts, 0)
    loss = actor._policy.imitate(obs, actions).loss.mean()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    optim = actor._trainer.cfg.optim
    adam = torch.optim.AdamW(
        actor._policy.module.parameters(),
        lr=metrics["lr"],
        betas=(optim.adam_beta1, optim.adam_beta2),
        eps=optim.adam_eps,
        weight_decay=0,
    )
    loss.backward()
    adam.step()
    for name, weight in actor._policy.module.named_parameters():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-4 * metrics["lr"] + 1e-6, msg=name)
    small, other, *_ = make("actor.optim.lr=0.01", "actor.micro_batch_size=2")
    whole, same, *_ = make("actor.optim.lr=0.01")
    losses_of = [update(one, record_refs)["loss"] for one in (small, whole)]
    assert losses_of[0] == pytest.approx(losses_of[1], rel=1e-5)
    for (name, a), b in zip(other._policy.module.named_parameters(), same._policy.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4, msg=name)


def test_filtered_bc_without_successful_episode_changes_no_weights(make):
    host, actor, arena, record_refs = make("actor.optim.lr=0.1")
    arena[Record.advantage][get_record_indices(record_refs)] = 0.0
    before = deepcopy(actor._policy.module.state_dict())
    assert update(host, record_refs) == {"replay_size": 0.0, "optimizer_steps": 0.0}
    assert all(torch.equal(before[name], now) for name, now in actor._policy.module.state_dict().items())


def test_restored_filtered_bc_continues_identically(make, tmp_path):
    host, actor, _, record_refs = make()
    update(host, record_refs)
    list(host.handle(SaveRequest(folder=str(tmp_path / "saved"))))
    again, other, _, later = make()
    list(again.handle(LoadRequest(folder=str(tmp_path / "saved"))))
    for one, own in ((host, record_refs), (again, later)):
        assert update(one, own, step=1)["replay_size"] == 6
    np.testing.assert_array_equal(other._replay["action"][:6], actor._replay["action"][:6])
    for name, weight in other._policy.module.named_parameters():
        assert torch.equal(weight, dict(actor._policy.module.named_parameters())[name]), name


def planned(words: list[str]) -> None:
    cfg = load_config("train", words)
    check_components(cfg)
    build_run_plan(cfg, training=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model=flow_small", "model.likelihood=dsrl"), "model.likelihood=dsrl freezes it"),
        (("model=flow_small", "model.likelihood=residual"), "model.likelihood=residual freezes it"),
        (("env=text/length", "model=causal_lm_tiny", "algorithm.demonstrations=[assets]"), "robot actions"),
        (("algorithm.demonstrations=[nowhere]",), "nowhere is not a folder"),
    ],
)
def test_incompatible_filtered_bc_settings_are_rejected(tmp_path, words, said):
    words = ["algorithm=filtered_bc", *words, f"runner.output_dir={tmp_path}"]
    with pytest.raises(ConfigError, match=said):
        planned(words)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("algorithm.demonstration_share=0.2", "without algorithm.demonstrations"),
        ("algorithm.kl_beta=0.1", "this algorithm has its own update"),
    ],
)
def test_keys_without_effect_give_a_warning(word, reason):
    (line,) = load_config("train", ["algorithm=filtered_bc", word]).warnings
    assert reason in line


def test_staleness_has_an_effect_without_transitions():
    assert load_config("train", ["algorithm=filtered_bc", "algorithm.max_staleness=1"]).warnings == ()


@pytest.mark.integration
@pytest.mark.parametrize("average", [0.0, 0.75])
def test_filtered_bc_on_two_ranks_matches_one(tmp_path, average):
    """Resumed from a checkpoint with the trained and the averaged weights as well."""
    words = (*FILTERED, "actor.micro_batch_size=2", "actor.optim.lr=0.001", f"algorithm.average={average}")
    first = Rollout(name="first", words=words, last=3)
    then = Rollout(name="two", words=words, first=3, last=5, load=tmp_path / "first" / "saved")
    run_ranks(tmp_path, 2, [first, then])
    run_ranks(tmp_path, 1, [Rollout(name="one", words=words, last=5)])
    one, two = state(tmp_path / "one"), state(tmp_path / "two")
    assert one.keys() == two.keys()
    assert (tmp_path / "two" / "saved" / f"{TRAINED}.safetensors").is_file() == (average > 0)
    for key, weight in one.items():
        torch.testing.assert_close(two[key], weight, rtol=0, atol=1e-4, msg=key)
    parts = [*losses(tmp_path / "first"), *losses(tmp_path / "two")]
    for a, b in zip(losses(tmp_path / "one"), parts, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["replay_size"] == b["replay_size"] > 0


def test_policy_may_use_averaged_weights(make, tmp_path):
    """One update from w to w' gives a policy of 0.75 w + 0.25 w', and the next update starts from w'."""
    plain, moving, again = (make("actor.optim.lr=0.01", *more) for more in ((), *[("algorithm.average=0.75",)] * 2))
    start, weights = deepcopy(moving[1]._policy.module.state_dict()), {}
    for (host, actor, _, record_refs), name in ((plain, "plain"), (moving, "moving")):
        update(host, record_refs)
        weights[name] = deepcopy(actor._policy.module.state_dict())
    for name, weight in weights["moving"].items():
        torch.testing.assert_close(weight, start[name].lerp(weights["plain"][name], 0.25), rtol=0, atol=1e-7)
        if name in moving[1]._average._swapped_weights:
            assert torch.equal(moving[1]._average._swapped_weights[name], weights["plain"][name]), name
    list(moving[0].handle(SaveRequest(folder=str(tmp_path / "saved"))))
    list(again[0].handle(LoadRequest(folder=str(tmp_path / "saved"))))
    losses_now = [update(host, record_refs, step=1)["loss"] for host, _, _, record_refs in (plain, moving, again)]
    assert losses_now[0] == losses_now[1] == losses_now[2]
    after = [actor._policy.module.state_dict() for _, actor, *_ in (moving, again)]
    assert all(torch.equal(weight, after[1][name]) for name, weight in after[0].items())


def test_each_batch_contains_the_fraction_of_demonstrations(make, tmp_path, caplog):
    words = (*TOY_COLLECT, "model=random", "collect.filter=all", "collect.episodes=4", "launcher=inline")
    demos = tmp_path / "demos"
    collect(load_config("collect", [*words, f"collect.out={demos}", f"runner.output_dir={tmp_path}"]))
    host, actor, _, record_refs = make(f"algorithm.demonstrations=[{demos}]", "algorithm.demonstration_share=0.34")
    assert "more than the time limit" not in caplog.text
    short = toy_config(tmp_path, *FILTERED, f"algorithm.demonstrations=[{demos}]", "env.train.max_episode_steps=4")
    build_run_plan(short, training=True)
    assert "more than the time limit of 4" in caplog.text
    update(host, record_refs)
    obs, actions = actor._sample_batch(np.random.default_rng(0), actor._replay.starts, 2)
    shown = load_demonstrations(demos)
    means, own = actor._gripper, actor._policy.spec.gripper
    for row in (4, 5):
        steps = np.flatnonzero((shown.images == obs.images[row]).all(axis=(1, 2, 3, 4)))
        expected = shown.chunks(steps, 4)
        convert_gripper(expected, means, own)
        assert (expected == actions[row]).all(axis=(1, 2)).any()
        assert obs.instructions[row] in shown.instruction[steps]
    drawn = [
        actor._sample_batch(np.random.default_rng(seed), actor._replay.starts, 2)[0].images[4] for seed in range(20)
    ]
    first = shown.images[: shown.stop[0]]
    assert not all((first == image).all(axis=(1, 2, 3, 4)).any() for image in drawn), "of all episodes"
    mine = actor._replay[Record.images][actor._replay.starts]
    assert all((mine == obs.images[row]).all(axis=(1, 2, 3, 4)).any() for row in range(4))


def test_demonstrations_that_cannot_be_converted_are_rejected(tmp_path):
    """Frames of another orientation are rotated; an unknown gripper convention cannot be converted."""
    words = (*TOY_COLLECT, "model=random", "collect.filter=all", "collect.episodes=1", "launcher=inline")
    demos = tmp_path / "demos"
    collect(load_config("collect", [*words, f"collect.out={demos}", f"runner.output_dir={tmp_path}"]))
    cfg = toy_config(tmp_path, *FILTERED, f"algorithm.demonstrations=[{demos}]")
    card = demos / "meta/embodyrl.json"
    saved = json.loads(card.read_text())
    card.write_text(json.dumps(saved | {"env": saved["env"] | {"image_rotation_deg": 180}}))
    build_run_plan(cfg, training=True)
    card.write_text(json.dumps(saved | {"env": saved["env"] | {"gripper": None}}))
    with pytest.raises(ConfigError, match="differ in gripper"):
        build_run_plan(cfg, training=True)


def test_each_training_step_samples_different_chunks(make):
    """The buffer contains the same three chunks after every step, and the weights are constant."""
    host, _, _, record_refs = make("algorithm.replay_size=3", "actor.optim.lr=0")
    assert len({round(update(host, record_refs, step)["loss"], 6) for step in range(4)}) > 1


def test_update_count_and_schedule_follow_new_chunks(make):
    """Three of six chunks have a high return; the last of three updates in the first of two steps is at one third."""
    words = ("algorithm.updates_per_sample=0.5", "actor.optim.schedule=linear", "actor.optim.lr=0.003")
    host, _, _, record_refs = make(*words, "runner.max_steps=2")
    metrics = update(host, record_refs)
    assert metrics["optimizer_steps"] == 3
    assert metrics["lr"] == pytest.approx(0.003 * (1 - (2 / 3) / 2))


def test_learning_starts_and_save_replay_are_respected(make, tmp_path):
    host, _, _, record_refs = make("algorithm.learning_starts=4", "algorithm.save_replay=false")
    assert [update(host, record_refs, step)["optimizer_steps"] for step in range(2)] == [0, 1]
    list(host.handle(SaveRequest(folder=str(tmp_path / "saved"))))
    assert [file.name for file in (tmp_path / "saved").rglob("replay*")] == []


def test_skipped_update_keeps_the_weight_average(make):
    """The trained weights are not finite, but the average stays finite."""
    host, actor, _, record_refs = make("algorithm.average=0.5", "faults.on_nonfinite=skip")
    name = next(iter(actor._average._swapped_weights))
    actor._average._swapped_weights[name].fill_(torch.nan)
    before = {name: weight.clone() for name, weight in host.policy.module.state_dict().items()}
    metrics = update(host, record_refs)
    assert metrics["optimizer_steps"] == 0
    assert metrics["skipped_nonfinite"] > 0
    after = host.policy.module.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_token_budget_counts_prompts_and_replies(tmp_path):
    words = ("env=text/copy", "model=causal_lm_tiny", "algorithm=filtered_bc", "actor.global_batch_size=6")
    words = (*words, "actor.micro_batch_size=6", "actor.max_tokens_per_mbs=40", f"runner.output_dir={tmp_path}")
    run_plan = build_run_plan(load_config("train", [*words, "launcher=inline"]), training=True)
    with (
        closing(Arena.create(run_plan.layout, run_plan.capacity)) as arena,
        closing(PolicyHost(build_policy_init(run_plan, arena, None))) as host,
    ):
        actor = host._learner
        assert isinstance(actor, FilteredLearner)
        prompts, replies = ["1" * n for n in (2, 30, 3, 8, 14, 1)], np.array([30, 2, 3, 8, 1, 6])
        empty, state = np.zeros((6, 0, 0, 0, 3), np.uint8), np.zeros((6, 0), np.float32)
        obs = Observation(images=empty, state=state, instructions=tuple(prompts))
        actions = np.where(np.arange(32) < replies[:, None], 5.0, -1.0)[:, :, None].astype(np.float32)
        costs = np.array([len(prompt) for prompt in host.policy.reader(obs)]) + replies
        found = actor._trainer.split_micro_batches(6, actor._count_tokens(obs, actions))
    assert sorted(np.concatenate([rows for rows, _ in found]).tolist()) == list(range(6))
    assert all(len(rows) * costs[rows].max() <= 40 for rows, _ in found)
    assert len(found) == 4, "32, 32, two of at most 16 and the rest"
