"""Soft actor-critic: one update against Stable-Baselines3, and the transitions in the replay buffer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from embodyrl.algorithms.off_policy.replay import Frames, ReplayBuffer
from embodyrl.algorithms.off_policy.sac import actor_loss, temperature_loss
from embodyrl.channels.arena import Arena
from embodyrl.channels.layout import Record
from embodyrl.channels.messages import UpdateRequest
from embodyrl.commands.collect import collect
from embodyrl.data.cards import read_card
from embodyrl.data.layout import Demonstration, Source
from embodyrl.data.writer import DatasetWriter
from embodyrl.errors import CheckpointError, ConfigError, NonFiniteError
from embodyrl.learners.off_policy.sac_learner import SacLearner
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.scheduler.start import build_policy_init
from embodyrl.workers.policy_host import PolicyHost

SMALL = ("env=gym", "env.id=Pendulum-v1", "model=mlp", "algorithm=sac", "model.hidden_sizes=[8,8]", "launcher=inline")


def filled(shape: tuple[int, ...], phase: float) -> torch.Tensor:
    count = int(np.prod(shape))
    return torch.from_numpy((0.5 * np.sin(np.arange(count) * 1.7 + phase)).reshape(shape).astype(np.float32))


def weighed(*parts: torch.Tensor) -> list[float]:
    """Return one number per tensor that changes with any element."""
    return [float((p.detach().double() * torch.arange(p.numel()).reshape(p.shape).double().cos()).sum()) for p in parts]


def frames(length: int, *, terminated: bool, final: bool, episode: int = 0) -> Frames:
    """Return an episode whose states and rewards count 0, 1, 2..."""
    count = length + final
    acted = np.arange(count) < length
    return Frames(
        seen={"state": np.arange(count, dtype=np.float32)[:, None]},
        action=np.zeros((count, 1), np.float32),
        reward=np.where(acted, np.arange(count), 0).astype(np.float32),
        acted=acted,
        terminated=terminated & (np.arange(count) == length - 1),
        episode=np.full(count, episode),
    )


def four_chunks() -> Frames:
    """Return four terminating chunks, as of Pendulum, with states of ones."""
    seen = {"images": np.zeros((4, 0, 0, 0, 3), np.uint8), "instruction": np.zeros((4, 64), np.uint8)}
    seen["observed_state"] = np.ones((4, 3), np.float32)
    return replace(frames(4, terminated=True, final=False), seen=seen)


@pytest.fixture
def make(tmp_path: Path):
    hosts: list[tuple[PolicyHost, Arena]] = []

    def build(*words: str, start: tuple[str, ...] = SMALL) -> tuple[PolicyHost, SacLearner]:
        words = (*start, f"runner.output_dir={tmp_path}", *words)
        run_plan = build_run_plan(load_config("train", words), training=True)
        arena = Arena.create(run_plan.layout, run_plan.capacity)
        host = PolicyHost(build_policy_init(run_plan, arena, None))
        hosts.append((host, arena))
        assert isinstance(host._learner, SacLearner)
        return host, host._learner

    yield build
    for host, arena in hosts:
        host.close()
        arena.close()


def test_sac_update_matches_stable_baselines3(make):
    """Values of stable_baselines3 2.9.2, SAC.train(1) with these weights, this batch and torch.manual_seed(0)."""
    rates = ("actor.optim.lr=0.01", "actor.optim.value_lr=0.01", "algorithm.tau=0.1", "algorithm.gamma=0.9")
    host, actor = make(*rates, "algorithm.alpha_init=0.5", "actor.optim.clip_grad=1e6")
    net = host.policy.module
    with torch.no_grad():
        for k, layer in enumerate(m for m in net.policy if isinstance(m, torch.nn.Linear)):
            layer.weight.copy_(filled(tuple(layer.weight.shape), k))
            layer.bias.copy_(filled(tuple(layer.bias.shape), k + 10))
        for late, critics in enumerate((actor._critics, actor._targets)):
            for k, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
                for q in range(2):
                    weight[q] = filled(tuple(weight.shape[1:]), 100 + 10 * q + k + 0.3 * late)
                    bias[q, 0] = filled((bias.shape[-1],), 200 + 10 * q + k + 0.3 * late)
    state = np.stack([filled((6, 3), 20).numpy() * 2, filled((6, 3), 21).numpy() * 2], 1).reshape(12, 3)
    acted = np.arange(12) % 2 == 0
    action, reward = np.zeros((12, 1), np.float32), np.zeros(12, np.float32)
    action[acted] = filled((6, 1), 22).numpy() * 1.8
    reward[acted] = filled((6,), 23).numpy() * 3
    arrays = {"images": np.zeros((12, 0, 0, 0, 3), np.uint8), "observed_state": state}
    batch = Frames(
        seen=arrays | {"instruction": np.zeros((12, 64), np.uint8)},
        action=action,
        reward=reward,
        acted=acted,
        terminated=np.isin(np.arange(12), (4, 10)),
        episode=np.arange(12) // 2,
    )
    actor._replay.add(batch)
    torch.manual_seed(0)
    metrics = actor._step([actor._replay.transitions(np.arange(0, 12, 2))], np.arange(2), 0)
    # It takes log(1 - tanh(u)^2 + 1e-6), which shows where tanh(u) is near 1; the gradient is the same.
    assert metrics["loss"] == pytest.approx(0.7302696, abs=2e-3)
    assert metrics["value_loss"] == pytest.approx(1.6004632, abs=1e-5)
    assert float(actor._log_alpha.detach()) == pytest.approx(-0.6831472, abs=1e-6)
    policy = [m.weight for m in net.policy if isinstance(m, torch.nn.Linear)]
    assert weighed(*policy) == pytest.approx([0.5958431, 0.5131407, -0.3930264], abs=1e-4)
    assert weighed(*actor._critics.weights) == pytest.approx([-0.1747495, 0.1145308, 0.1156545], abs=1e-4)
    assert weighed(*actor._targets.weights) == pytest.approx([-0.0529712, 0.2461300, 0.2077512], abs=1e-4)


def test_policy_loss_uses_minimum_of_two_or_mean_of_more_critics():
    """The minimum of ten critics would penalise rare actions; REDQ and RLPD use the mean."""
    logprob, alpha = torch.tensor([1.0, 3.0]), torch.tensor(0.5)
    values = torch.tensor([[1.0, 8.0], [4.0, 5.0], [4.0, -1.0]])
    assert float(actor_loss(values[:2], logprob, alpha)) == pytest.approx(((0.5 - 1.0) + (1.5 - 5.0)) / 2)
    assert float(actor_loss(values, logprob, alpha)) == pytest.approx(((0.5 - 3.0) + (1.5 - 4.0)) / 2)


def test_policy_and_temperature_update_at_the_policy_interval(make):
    _, actor = make("algorithm.policy_interval=2")
    actor._replay.add(four_chunks())
    chosen = [actor._replay.transitions(actor._replay.starts)]

    def weights() -> list[list[torch.Tensor]]:
        nets = (actor._policy.module, actor._critics, actor._targets)
        parts = [[actor._log_alpha], *(net.parameters() for net in nets)]
        return [[p.detach().clone() for p in part] for part in parts]

    def moved(now: list[list[torch.Tensor]]) -> list[bool]:
        return [any(not torch.equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in zip(before, now, strict=True)]

    before = weights()
    assert "loss" not in actor._step(chosen, np.arange(2), 0, updates_policy=False)
    assert moved(weights()) == [False, False, True, True]
    before = weights()
    assert "loss" in actor._step(chosen, np.arange(2), 0, updates_policy=True)
    assert moved(weights()) == [True] * 4


@pytest.mark.parametrize(
    ("terminated", "final", "starts", "discounts"),
    [
        (True, False, [0, 1, 2, 3], [0.25, 0.25, 0.0, 0.0]),
        (False, True, [0, 1, 2, 3], [0.25, 0.25, 0.25, 0.5]),
        (False, False, [0, 1], [0.25, 0.25]),
    ],
)
def test_n_step_returns_stop_at_the_episode_end(terminated, final, starts, discounts):
    """Two steps, gamma 1/2: terminated episodes have no bootstrap value, cut ones use the last observation."""
    buffer = ReplayBuffer(100, 0.5, 2)
    buffer.add(frames(4, terminated=terminated, final=final))
    buffer.add(frames(1, terminated=True, final=False, episode=1))
    found = buffer.starts[: len(starts)]
    assert found.tolist() == starts
    np.testing.assert_allclose(buffer["discount"][found], discounts)
    np.testing.assert_allclose(buffer["reward"][found], [0.5, 2.0, 3.5, 3.0][: len(starts)])
    known = buffer["discount"][found] > 0
    following = buffer["state"][buffer.transitions(found).after][:, 0]
    np.testing.assert_array_equal(following[known], np.minimum(found + 2, 4)[known])


def test_replay_buffer_is_fifo_and_restores_identically():
    buffer = ReplayBuffer(11, 0.9, 1)
    for episode in range(5):
        buffer.add(frames(3, terminated=False, final=True, episode=episode))
    assert len(buffer.starts) == 8  # 11 frames: two whole episodes, and all of the third but its first step
    smaller = ReplayBuffer(5, 0.9, 1)
    smaller.load_state(buffer.state())
    same = ReplayBuffer(11, 0.9, 1)
    same.load_state(buffer.state())
    for one in (buffer, same):
        one.add(frames(3, terminated=False, final=True))
    for each in (buffer, same, smaller):
        following = each["state"][each.transitions(each.starts).after][:, 0]
        np.testing.assert_array_equal(following, each["state"][each.starts][:, 0] + 1)
    assert len(same.starts) == len(buffer.starts)
    assert len(smaller.starts) == 3


def test_non_finite_sac_update_changes_no_weights(make, tmp_path):
    host, actor = make()
    batch = four_chunks()
    actor._replay.add(replace(batch, seen={**batch.seen, "observed_state": np.full((4, 3), np.nan, np.float32)}))
    before = [p.clone() for p in (*host.policy.module.parameters(), *actor._critics.parameters())]
    with pytest.raises(NonFiniteError, match=r"actor\.optim\.lr"):
        actor._step([actor._replay.transitions(actor._replay.starts)], np.arange(2), 0)
    after = [*host.policy.module.parameters(), *actor._critics.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    (tmp_path / "saved").mkdir()
    actor.save(tmp_path / "saved")
    _, other = make("algorithm.critics=3")
    with pytest.raises(CheckpointError, match=r"algorithm\.critics"):
        other.load(tmp_path / "saved")


def test_image_shift_augmentation_repeats_the_edges(make):
    pixels, count = 2, 40
    _, actor = make("env.id=pixel_env:Dial", "model=cnn", f"algorithm.image_shift={pixels}")
    images = np.random.default_rng(0).integers(0, 256, (count, 1, 8, 8, 3), np.uint8).repeat(2, axis=1)
    many = frames(count, terminated=True, final=False)
    seen = {"images": images, "observed_state": np.zeros((count, 0), np.float32)}
    arrays = {name: getattr(many, name) for name in ("action", "reward", "acted", "terminated", "episode")}
    actor._replay.add(Frames(seen=seen | {"instruction": np.zeros((count, 64), np.uint8)}, **arrays))
    wide = np.pad(images[:, 0], ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0)), mode="edge")
    found = set()
    shifted = actor._get_observations(actor._replay.transitions(np.arange(count)), np.arange(count)).images
    np.testing.assert_array_equal(shifted[:, 0], shifted[:, 1], err_msg="images of one observation move together")
    for padded, picture in zip(wide, shifted[:, 0], strict=True):
        crops = {(d, r): padded[d : d + 8, r : r + 8] for d in range(5) for r in range(5)}
        (place,) = [place for place, crop in crops.items() if np.array_equal(crop, picture)]
        found.add(place)
    assert {d for d, _ in found} == {r for _, r in found} == set(range(5))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env.id=CartPole-v1"], "differentiable samples"),
        (["model.squashed=false"], "differentiable samples"),
    ],
)
def test_incompatible_sac_settings_are_rejected_before_the_start(tmp_path, words, said):
    with pytest.raises(ConfigError, match=said):
        build_run_plan(load_config("train", [*SMALL, f"runner.output_dir={tmp_path}", *words]), training=True)


def stored(actor: SacLearner, episodes: list[tuple[int, str]], step: int = 0) -> UpdateRequest:
    """Return records of episodes (number of chunks, kind of end) as in a rollout; rewards are 1."""
    arena, numbers, finals = actor._arena, [], []
    record_refs: list[int] = []
    for number, (chunks, end) in enumerate(episodes):
        own = arena.allocate_all(chunks + (end != "terminated"))
        with arena.write_all(own) as records:
            for field in (Record.observed_state, Record.tokens, Record.terminated, Record.truncated):
                arena[field][records] = 0
            arena[Record.valid][records], arena[Record.advantage][records] = True, 1.0
            if end in ("terminated", "truncated"):
                arena[getattr(Record, end)][records[chunks - 1]] = True
        record_refs += own[:chunks].tolist()
        numbers += [number] * chunks
        finals += [(number, int(t)) for t in own[chunks:]]
    return UpdateRequest(step=step, record_refs=np.asarray(record_refs), episode=numbers, finals=tuple(finals))


def test_temperature_rises_if_entropy_is_below_target():
    """The expected loss is -log alpha (mean of log pi + target)."""
    found = temperature_loss(torch.tensor(2.0), torch.tensor([1.0, 3.0]), -1.5)
    assert float(found) == pytest.approx(-2.0 * (2.0 - 1.5))


def test_unfinished_episode_is_not_joined_with_the_next_episode():
    """Two unfinished episodes in one batch: their last chunks are not the start of a transition."""
    buffer, parts = ReplayBuffer(100, 0.5, 1), [frames(3, terminated=False, final=False, episode=k) for k in range(2)]
    names = ("action", "reward", "acted", "terminated", "episode")
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    buffer.add(Frames(seen={"state": np.zeros((6, 1), np.float32)}, **joined))
    assert buffer.starts.tolist() == [0, 1, 3, 4]


def test_each_sac_batch_contains_the_fraction_of_demonstrations(make):
    """Demonstrations have reward 1000, episodes have reward 1: the critic error reveals their fractions."""
    _, actor = make("algorithm.learning_starts=1", "actor.global_batch_size=64", "algorithm.gamma=1e-6")
    demos, batch = ReplayBuffer(100, 1e-6, 1), frames(4, terminated=True, final=False)
    seen = {"images": np.zeros((4, 0, 0, 0, 3), np.uint8), "instruction": np.zeros((4, 64), np.uint8)}
    demos.add(
        replace(
            batch,
            seen=seen | {"observed_state": np.zeros((4, 3), np.float32)},
            reward=np.full(4, 1000.0, np.float32),
        )
    )
    actor._demonstrations = demos
    (*_, result) = drained(actor.update(stored(actor, [(4, "terminated")])))
    assert result["value_loss"] == pytest.approx(actor._settings.demonstration_share * 1000.0**2, rel=0.05)


def test_sac_bootstraps_at_the_time_limit(make):
    """Two chunks terminate, two are truncated: only the terminated ones have no bootstrap value."""
    _, actor = make("algorithm.gamma=0.9")
    actor._store(stored(actor, [(2, "terminated"), (2, "truncated")]))
    starts = actor._replay.starts
    np.testing.assert_allclose(actor._replay["discount"][starts], [0.9, 0.0, 0.9, 0.9])


CHUNKED = {
    "sac": (*SMALL, "model.num_action_chunks=4"),
    "dsrl": ("model=flow_small", "algorithm=sac", "model.likelihood=dsrl", "launcher=inline"),
}


@pytest.mark.parametrize("start", CHUNKED)
def test_chunk_transition_sums_rewards_of_executed_actions(make, start):
    """Three chunks; the last one of each episode ends after two actions. Unexecuted actions contain old data."""
    _, actor = make("algorithm.gamma=0.9", start=CHUNKED[start])
    request, arena = stored(actor, [(2, "terminated"), (1, "truncated")]), actor._arena
    records = arena.read(request.record_refs)
    arena[Record.advantage][records], arena[Record.valid][records[1:], 2:] = [1.0, 2.0, 4.0, 8.0], False
    for field in (Record.terminated, Record.truncated):
        arena[field][records] &= np.arange(4) == 1
    arena[Record.terminated][records[2], 3] = True
    actor._store(request)
    starts = actor._replay.starts
    np.testing.assert_array_equal(actor._replay["reward"][starts], [15.0, 3.0, 3.0])
    np.testing.assert_allclose(actor._replay["discount"][starts], [0.9, 0.0, 0.9])


def test_truncation_bootstraps_from_its_own_final_observation(make):
    _, actor = make()
    request, arena = (
        stored(actor, [(2, "truncated"), (1, "truncated"), (1, "terminated"), (1, "truncated")]),
        actor._arena,
    )
    finals = arena.read([record_ref for _, record_ref in request.finals])
    arena[Record.observed_state][arena.read(request.record_refs)] = np.arange(5.0)[:, None]
    arena[Record.observed_state][finals] = 100.0 + np.array([episode for episode, _ in request.finals])[:, None]
    actor._store(request)
    drawn = actor._replay.transitions(actor._replay.starts)
    seen, then = (actor._replay["observed_state"][places][:, 0] for places in (drawn.indices, drawn.after))
    assert seen.tolist() == [0, 1, 2, 3, 4]
    goes_on = drawn.discount > 0
    assert goes_on.tolist() == [True, True, True, False, True]
    assert then[goes_on].tolist() == [1, 100, 101, 103]


def test_demonstration_may_continue_after_success(make, tmp_path):
    """Chunks of four; only success at the last step ends a demonstration, also in a shortened chunk."""
    words = ("env=gym", "env.id=Pendulum-v1", "model=random", "launcher=inline", "collect.filter=all")
    limits = ("collect.episodes=1", "env.train.max_episode_steps=1", f"collect.out={tmp_path}/one")
    collect(load_config("collect", [*words, *limits, f"runner.output_dir={tmp_path}"]))
    writer = DatasetWriter(tmp_path / "demos", read_card(tmp_path / "one"))
    for trial, (length, won) in enumerate([(8, [3]), (8, [7]), (8, [1, 7]), (6, [5])]):
        steps = np.arange(length)
        writer.append(
            Demonstration(
                images=np.zeros((length, 0, 0, 0, 3), np.uint8),
                state=np.zeros((length, 3), np.float32),
                action=np.zeros((length, 1), np.float32),
                reward=steps.astype(np.float32),
                success=np.isin(steps, won),
                instruction="Pendulum-v1",
                source=Source(task_id=0, reset_id=0, trial=trial, seed=0),
            )
        )
    writer.flush()
    writer.close()
    rates = ("algorithm.gamma=0.9", "algorithm.reward_scale=0.5", "model.num_action_chunks=4")
    _, actor = make(
        f"algorithm.demonstrations=[{tmp_path}/demos]", *rates, start=(*SMALL[:3], "algorithm=rlpd", *SMALL[4:])
    )
    demos = actor._demonstrations
    assert demos is not None
    assert demos.starts.tolist() == [0, 2, 3, 4, 6, 7]
    np.testing.assert_allclose(demos["discount"][demos.starts], [0.9, 0.9, 0.0, 0.9, 0.9, 0.0])
    np.testing.assert_allclose(demos["reward"][demos.starts], [3.0, 3.0, 11.0, 3.0, 3.0, 4.5])


@pytest.mark.parametrize(("count", "minima"), [(1, {0, 1, 2, 3, 4}), (2, {0, 1, 2, 3}), (5, {0})])
def test_target_uses_the_minimum_of_random_critics(make, count, minima):
    """Five critics without weights that return 0, 1000, ..., 4000: the loss reveals the smallest of the sample."""
    words = ("algorithm.gamma=0.9", "algorithm.tau=1e-9", "algorithm.learning_starts=1")
    _, actor = make("algorithm.critics=5", f"algorithm.critics_in_target={count}", *words)
    seen = set()
    for step in range(12):
        with torch.no_grad():
            for critics in (actor._critics, actor._targets):
                for weight, bias in zip(critics.weights, critics.biases, strict=True):
                    weight.zero_()
                    bias.zero_()
            actor._targets.biases[-1] += 1000.0 * torch.arange(5.0)[:, None, None]
        request = stored(actor, [(1, "truncated")], step)
        (*_, result) = drained(actor.update(request))
        seen.add(round((2 * result["value_loss"] / 5) ** 0.5 / 900))
        actor._arena.free([*request.record_refs.tolist(), *(t for _, t in request.finals)])
    assert seen <= minima
    assert len(seen) > len(minima) / 2


def test_target_contains_the_entropy_unless_backup_entropy_is_false(make):
    """Critics without weights: the target is the reward, plus the entropy of the next action."""
    losses = []
    for words in ((), ("algorithm.backup_entropy=false",)):
        _, actor = make(*words, "algorithm.alpha_init=0.5")
        actor._replay.add(replace(four_chunks(), terminated=np.zeros(4, np.bool_)))
        with torch.no_grad():
            for weight in (*actor._critics.parameters(), *actor._targets.parameters()):
                weight.zero_()
        torch.manual_seed(0)
        batch = actor._replay.transitions(actor._replay.starts)
        losses.append((actor._step([batch], np.arange(2), 0)["value_loss"], float(np.square(batch.reward).mean())))
    (with_entropy, _), (without_entropy, squared_reward) = losses
    assert without_entropy == pytest.approx(squared_reward), "two critics, half the squared error each"
    assert abs(with_entropy - squared_reward) > 0.01


def test_critic_warmup_leaves_policy_and_temperature_unchanged(make):
    _, actor = make("algorithm.critic_warmup=1", "algorithm.learning_starts=1")
    changed = []
    for step in range(2):
        parts = {
            "policy": [*actor._policy.module.parameters(), actor._log_alpha],
            "critics": [*actor._critics.parameters()],
        }
        before = {name: [p.detach().clone() for p in weights] for name, weights in parts.items()}
        drained(actor.update(stored(actor, [(3, "truncated")], step)))
        changed.append({n: not all(torch.equal(a, b) for a, b in zip(before[n], parts[n], strict=True)) for n in parts})
    assert changed == [{"policy": False, "critics": True}, {"policy": True, "critics": True}]


def test_critics_in_target_above_number_of_critics_is_rejected(make):
    with pytest.raises(ConfigError, match=r"critics_in_target=3 exceeds algorithm\.critics=2"):
        make("algorithm.critics_in_target=3")


def drained(parts):
    """Return the yielded values and the result of a generator."""
    found = []
    while True:
        try:
            found.append(next(parts))
        except StopIteration as end:
            return [*found, end.value]


def test_sac_state_round_trips(make, tmp_path):
    """Critics, target critics, temperature and optimizer moments round-trip; learning rates come from the config."""
    _, actor = make()
    actor._replay.add(batch := four_chunks())
    actor._step([actor._replay.transitions(actor._replay.starts)], np.arange(2), 0)
    (tmp_path / "saved").mkdir()
    actor.save(tmp_path / "saved")
    _, other = make("seed=5", "actor.optim.value_lr=0.5")
    other.load(tmp_path / "saved")
    for mine, theirs in ((actor._critics, other._critics), (actor._targets, other._targets)):
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))
    assert float(other._log_alpha.detach()) == float(actor._log_alpha.detach()) != 0
    assert other._optimizers["critics"].param_groups[0]["lr"] == 0.5
    for name in ("critics", "alpha"):
        moments = [o._optimizers[name].state_dict()["state"][0]["exp_avg"] for o in (actor, other)]
        assert torch.equal(*moments)
        assert moments[0].any()
    np.testing.assert_array_equal(other._replay["reward"][other._replay.starts], batch.reward)


def test_critic_and_temperature_settings_are_used(make):
    rates = ("actor.optim.lr=0.002", "actor.optim.value_lr=0.05")
    _, plain = make(*rates)
    _, chosen = make(*rates, "algorithm.target_entropy=-3.5", "algorithm.critic_layer_norm=true")
    assert [actor._target_entropy for actor in (plain, chosen)] == [-1.0, -3.5], "Pendulum has one dimension"
    assert {n: o.param_groups[0]["lr"] for n, o in chosen._optimizers.items()} == {"critics": 0.05, "alpha": 0.002}
    seen, done = filled((5, 3), 1), filled((5, 1), 2)
    for one in ("_critics", "_targets"):
        values = [getattr(actor, one)(seen, done) for actor in (plain, chosen)]
        assert not torch.allclose(*values), "the same weights, normalized in one of them"


def test_critics_have_their_own_gradient_clipping(make):
    """Adam's running mean starts with a tenth of the first gradient."""
    norms = []
    for words in (("actor.optim.value_clip_grad=0.5",), ()):
        _, actor = make("actor.optim.clip_grad=0.001", *words)
        actor._replay.add(four_chunks())
        actor._step([actor._replay.transitions(actor._replay.starts)], np.arange(2), 0)
        moments = actor._optimizers["critics"].state_dict()["state"].values()
        norms.append(sum(float(one["exp_avg"].square().sum()) for one in moments) ** 0.5 / 0.1)
    assert norms[0] == pytest.approx(0.5, rel=1e-3)
    assert norms[1] > 1.0


def test_actor_loss_adds_no_gradient_to_the_critics(make):
    found = []
    for acting in (False, True):
        _, actor = make()
        actor._replay.add(four_chunks())
        torch.manual_seed(0)
        actor._step([actor._replay.transitions(actor._replay.starts)], np.arange(2), 0, updates_policy=acting)
        found.append([p.grad for p in actor._critics.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_each_training_step_ends_with_a_policy_update(make):
    """Also with a long policy interval; before learning starts, nothing changes."""
    _, actor = make("algorithm.learning_starts=5", "algorithm.policy_interval=100")
    moved = []
    for step in range(2):
        before = [p.detach().clone() for p in actor._policy.module.parameters()]
        (*_, result) = drained(actor.update(stored(actor, [(4, "terminated")], step)))
        same = [torch.equal(a, b) for a, b in zip(before, actor._policy.module.parameters(), strict=True)]
        moved.append((result["optimizer_steps"], not all(same)))
    assert moved == [(0, False), (4, True)]


@pytest.mark.parametrize("bad", ["critics", "alpha", "policy"])
def test_non_finite_gradient_error_names_the_updated_networks(make, bad):
    """The losses are finite. Only the policy gradient cannot be checked before the critic step."""
    host, actor = make()
    actor._replay.add(four_chunks())
    weights = {
        "critics": list(actor._critics.parameters()),
        "alpha": [actor._log_alpha],
        "policy": list(host.policy.module.parameters()),
    }
    weights[bad][0].register_hook(lambda gradient: gradient * torch.nan)
    before = {name: [p.detach().clone() for p in parts] for name, parts in weights.items()}
    with pytest.raises(NonFiniteError) as caught:
        actor._step([actor._replay.transitions(actor._replay.starts)], np.arange(2), 0)
    moved = {
        name
        for name, parts in weights.items()
        if not all(torch.equal(one, other) for one, other in zip(before[name], parts, strict=True))
    }
    assert moved == ({"critics", "alpha"} if bad == "policy" else set())
    assert ("left the weights unchanged" in str(caught.value)) == (not moved)
    assert ("critics and temperature were updated" in str(caught.value)) == bool(moved)
    assert all(p.isfinite().all() for parts in weights.values() for p in parts)


def test_skipped_sac_updates_are_counted(make):
    _, actor = make("algorithm.learning_starts=1", "faults.on_nonfinite=skip")
    with torch.no_grad():
        actor._critics.biases[-1].fill_(torch.nan)
    (*_, result) = drained(actor.update(stored(actor, [(4, "terminated")])))
    assert (result["optimizer_steps"], result["skipped_nonfinite"]) == (0, 4)


def test_image_encoder_is_trained_only_by_the_critics(make):
    """The policy's rate changes the policy, but not the encoder; without a rate of the critics, the encoder stays."""
    found = []
    for rates in ("1e-3", "1e-3"), ("0.0", "1e-3"), ("1e-3", "0.0"):
        words = (f"actor.optim.lr={rates[0]}", f"actor.optim.value_lr={rates[1]}", "algorithm.learning_starts=1")
        _, actor = make("env.id=pixel_env:Dial", "model=cnn", *words)
        images = np.random.default_rng(0).integers(0, 256, (4, 1, 8, 8, 3), np.uint8)
        seen = {"images": images, "instruction": np.zeros((4, 64), np.uint8)}
        batch = replace(frames(4, terminated=True, final=False), action=np.zeros((4, actor._policy.width), np.float32))
        actor._replay.add(replace(batch, seen=seen | {"observed_state": np.zeros((4, 0), np.float32)}))
        start = [part.detach().clone() for part in actor._policy.encoder]
        torch.manual_seed(0)
        actor._step([actor._replay.transitions(np.arange(4))], np.array([0, 1]), 0)
        found.append([one - other for one, other in zip(actor._policy.encoder, start, strict=True)])
    assert all(torch.equal(one, other) for one, other in zip(found[0], found[1], strict=True))
    assert any(change.any() for change in found[0])
    assert not any(change.any() for change in found[2])
