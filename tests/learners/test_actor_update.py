"""One actor update on hand-written records: inputs, weights and saved state."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from rank_work import RECORDS, fill
from toy_runs import TOY_OFT, toy_config

from embodyrl.channels.arena import Arena, get_record_indices
from embodyrl.channels.layout import Record
from embodyrl.channels.messages import LoadRequest, SaveRequest, ScoreRequest, UpdateRequest
from embodyrl.errors import NonFiniteError
from embodyrl.learners.policy_gradient import PolicyGradientLearner, _shuffle
from embodyrl.learners.settings import OptimSettings
from embodyrl.learners.training import Optimization, average_metrics
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.scheduler.start import build_policy_init
from embodyrl.types import IntArray
from embodyrl.workers.policy_host import PolicyHost


@dataclass(frozen=True)
class Actor:
    host: PolicyHost
    arena: Arena
    record_refs: IntArray

    def __setitem__(self, field: str, values: object) -> None:
        self.arena[field][get_record_indices(self.record_refs)] = values

    def update(self, step: int = 0) -> dict[str, float]:
        """Train on the records, one episode each."""
        (done,) = self.host.handle(
            UpdateRequest(step=step, record_refs=self.record_refs, episode=tuple(range(RECORDS)))
        )
        return done.metrics


@pytest.fixture
def make(tmp_path):
    """Build an actor; all actions of its records were executed, with the log-probabilities of its weights."""
    actors = []

    def build(*words: str) -> Actor:
        sizes = ("actor.global_batch_size=6", "actor.micro_batch_size=6", "env.train.total_num_envs=8")
        cfg = toy_config(tmp_path, *sizes, *words)
        run_plan = build_run_plan(cfg, training=True)
        arena = Arena.create(run_plan.layout, max(run_plan.capacity, RECORDS))
        host = PolicyHost(build_policy_init(run_plan, arena, None))
        actor = Actor(host, arena, fill(arena, run_plan, host, drift=0.0))
        actor["valid"] = True
        actors.append(actor)
        return actor

    yield build
    for actor in actors:
        actor.host.close()
        actor.arena.close()


Make = Callable[..., Actor]
HALVES = ("actor.global_batch_size=3", "actor.micro_batch_size=3")


def test_skipped_samples_count_in_the_denominator(make: Make):
    actor = make("actor.optim.lr=0", "actor.micro_batch_size=2")
    actor["advantage"] = np.array([1, 0, 1, 0, 0, 1])[:, None]
    assert actor.update()["policy_loss"] == pytest.approx(-3 / 6, rel=1e-4)


def test_update_thread_count_applies_only_during_updates(make: Make, monkeypatch):
    actor, counts = make("actor.optim.lr=0"), []
    score = actor.host.policy.score

    def record_threads(*args):
        counts.append(torch.get_num_threads())
        return score(*args)

    monkeypatch.setattr(actor.host.policy, "score", record_threads)
    before = torch.get_num_threads()
    monkeypatch.setattr(actor.host, "_init", replace(actor.host._init, threads=1, update_threads=2))
    try:
        actor["advantage"] = 1.0
        actor.update()
        assert {*counts} == {2}
        assert torch.get_num_threads() == 1, "inference runs next to env workers"
    finally:
        torch.set_num_threads(before)


def test_token_sum_norm_uses_the_time_limit(make: Make):
    """One chunk of each episode, of the two chunks of 4 that 8 steps of the toy environment could have."""
    actor = make("algorithm=dr_grpo", "actor.optim.lr=0")
    actor["advantage"] = 1.0
    assert actor.update()["policy_loss"] == pytest.approx(-1 / 2, rel=1e-4)


def test_off_policy_mask_uses_rollout_probabilities(make: Make):
    words = ("algorithm.old_logprob=recompute", "algorithm.off_policy_masking_delta=0.5", "actor.optim.lr=0")
    actor = make(*words)
    actor["advantage"] = -1.0
    assert actor.update()["policy_loss"] == pytest.approx(1, rel=1e-4)
    # The engine that acted said e times as likely: far off-policy, whatever the trainer says now.
    actor.arena[Record.logprob][:] += 1.0
    assert actor.update()["policy_loss"] == 0


def test_importance_weights_are_per_sample(make: Make):
    """Decoupled PPO in two optimizer steps: -A w of each sample, w = pi_proximal / pi_behavior of a token."""
    words = ("algorithm.old_logprob=recompute", "algorithm.behave_weight_threshold=100", "actor.optim.lr=0")
    actor = make(*words, "algorithm.behave_weight_level=geometric", *HALVES)
    drift, advantage = np.array([0.0, 0.3, -0.4, 1.0, -0.8, 0.5]), np.array([1.0, -2.0, 4.0, -8.0, 16.0, 3.0])
    actor["advantage"] = advantage[:, None]
    actor.arena[Record.logprob][get_record_indices(actor.record_refs)] += drift[:, None]
    assert actor.update()["policy_loss"] == pytest.approx(-np.mean(advantage * np.exp(-drift)), rel=1e-3)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum", "token-mean"])
def test_loss_weights_are_per_optimizer_step(make: Make, mode, whole):
    """Two optimizer steps of equal size, of other episodes and, unless `whole`, with other missing actions."""
    actor = make(f"algorithm.loss_agg_func={mode}", "actor.optim.lr=0", *HALVES)
    episode, ran = np.array([0, 0, 0, 0, 1, 2]), np.array([4] * RECORDS if whole else [4, 1, 2, 3, 4, 2])
    advantage = np.array([1.0, -2.0, 4.0, 0.0, 16.0, 3.0])  # 0: without a forward pass
    actor["advantage"], actor["valid"] = advantage[:, None], np.arange(4) < ran[:, None]
    expected = []
    for own in np.split(_shuffle(RECORDS, 0, 0, 0), 2):
        sequences = [own[episode[own] == e] for e in np.unique(episode[own])]
        earned, units = (np.array([values[s].sum() for s in sequences]) for values in (advantage * ran, ran))
        by_mode = {"seq-mean-token-mean": np.mean(earned / units), "token-mean": earned.sum() / units.sum()}
        # A sum over tokens, of which an action of the toy has seven.
        expected.append(by_mode.get(mode, 7 * np.mean(earned)))
    request = UpdateRequest(step=0, record_refs=actor.record_refs, episode=tuple(episode.tolist()))
    (done,) = actor.host.handle(request)
    assert done.metrics["policy_loss"] == pytest.approx(-np.mean(expected), rel=1e-3)


def test_rejected_step_keeps_the_previous_weights(make: Make):
    """Two optimizer steps, the second with a non-finite gradient; the error does not deny the first."""
    actor = make(*HALVES, "actor.optim.lr=0.01")
    actor["advantage"] = np.array([1.0, -2.0, 4.0, -8.0, 16.0, 3.0])[:, None]
    weight = next(iter(actor.host.policy.module.parameters()))
    begun: list[torch.Tensor] = []

    def broken(gradient: torch.Tensor) -> torch.Tensor:
        begun.append(weight.detach().clone())
        return gradient * (torch.nan if len(begun) == 2 else 1.0)

    weight.register_hook(broken)
    with pytest.raises(NonFiniteError, match="this optimizer step left the weights unchanged"):
        actor.update()
    assert not torch.equal(*begun)
    assert torch.equal(weight, begun[1])


def test_gradients_are_cleared_before_each_step(make: Make):
    """With learning rate 0 the second and third epoch repeat the first, so the mean norm equals the first."""
    norms = []
    for epochs in (1, 3):
        actor = make(f"algorithm.update_epoch={epochs}", "actor.optim.lr=0", "actor.micro_batch_size=3")
        actor["advantage"] = np.array([1, -1, 1, 1, -1, 1])[:, None]
        metrics = actor.update()
        assert metrics["optimizer_steps"] == epochs
        norms.append(metrics["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def test_reported_gradient_norm_is_unclipped():
    for given, kept in (([3.0, 4.0], 0.5), ([0.06, 0.08], 0.1)):
        module = torch.nn.Linear(2, 1, bias=False)
        optimization = Optimization(module, OptimSettings(clip_grad=0.5), 10)
        module.weight.grad = torch.tensor([given])
        assert optimization.step(0.0) == pytest.approx(np.linalg.norm(given))
        # A tenth of the first gradient is what Adam's running mean begins with.
        mean = optimization.optimizer.state_dict()["state"][0]["exp_avg"]
        assert mean.norm().item() == pytest.approx(0.1 * kept, rel=1e-4)


class TwoParts(torch.nn.Module):
    """A policy and its value head."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = torch.nn.Linear(1, 1, bias=False)
        self.value_head = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.policy.weight)
        torch.nn.init.ones_(self.value_head.weight)

    def move(self, optimization: Optimization, *, values_only: bool = False) -> tuple[float, float]:
        """Step with gradients of 1; return the change of each part."""
        before = [p.item() for p in self.parameters()]
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimization.step(0.0, values_only=values_only)
        moved = [old - p.item() for old, p in zip(before, self.parameters(), strict=True)]
        return moved[0], moved[1]


def test_critic_warmup_trains_only_the_value_head():
    module = TwoParts()
    settings = OptimSettings(lr=0.001, value_lr=0.1, weight_decay=0.0, clip_grad=100.0)
    optimization = Optimization(module, settings, 10)
    # The first Adam step is as long as the rate.
    assert module.move(optimization, values_only=True) == pytest.approx((0.0, 0.1), rel=1e-3)
    assert module.move(optimization) == pytest.approx((0.001, 0.1), rel=1e-3)


def test_loaded_optimizer_keeps_the_configured_settings(make: Make, tmp_path):
    list(make("actor.optim.weight_decay=0.01").host.handle(SaveRequest(folder=str(tmp_path / "saved"))))
    other = make("actor.optim.weight_decay=0.5", "actor.optim.adam_eps=0.001")
    list(other.host.handle(LoadRequest(folder=str(tmp_path / "saved"))))
    assert other.host._trainer is not None
    (group,) = other.host._trainer.optimization.optimizer.param_groups
    assert (group["weight_decay"], group["eps"]) == (0.5, 0.001)


def test_update_metrics_are_averaged_except_maxima():
    steps = [{"kl": 1.0, "kl_max": 2.0}, {"kl": 3.0, "kl_max": 1.0}]
    assert average_metrics(steps) == {"kl": 2.0, "kl_max": 2.0}


def draw_numbers() -> tuple[float, float, float]:
    return random.random(), np.random.random(), torch.rand(1).item()


def test_loaded_state_continues_training(make: Make, tmp_path):
    """The rate decays from the end of the warm-up, and the global generators continue their sequences."""
    words = ("actor.optim.warmup_steps=2", "actor.optim.schedule=linear", "runner.max_steps=7", "actor.optim.lr=0.001")
    first = make(*words)
    for step in range(4):
        first.update(step)
    draw_numbers()  # a new actor is seeded like the first one was
    list(first.host.handle(SaveRequest(folder=str(tmp_path / "saved"))))
    drawn = draw_numbers()
    rate = first.update(4)["lr"]
    second = make(*words)
    list(second.host.handle(LoadRequest(folder=str(tmp_path / "saved"))))
    assert draw_numbers() == drawn
    assert second.update(4)["lr"] == pytest.approx(rate)
    assert rate == pytest.approx(0.001 * (7 - 4) / (7 - 2))  # not the 1/2 of a first warm-up step


def test_samples_are_shuffled_per_step_and_epoch():
    orders = [_shuffle(50, *place).tolist() for place in ((0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0))]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert _shuffle(50, 0, 1, 0).tolist() == orders[1]


def test_value_clipping_is_relative_to_rollout_values(make: Make):
    """The estimate is right, but 1 below the rollout's value and may change by 0.1: half of 0.9 squared."""
    actor = make("algorithm=ppo", "actor.optim.lr=0", "actor.optim.value_lr=0", "algorithm.value_clip=0.1")
    now = actor.arena[Record.value][get_record_indices(actor.record_refs)].copy()
    actor["advantage"], actor["returns"], actor["value"] = 0.0, now, now + 1.0
    assert actor.update()["value_loss"] == pytest.approx(0.5 * 0.9**2, rel=1e-3)


def test_early_stop_ends_the_update(make: Make):
    for limit, taken, stopped in ((1e-7, 2, 1), (1e9, 4, 0)):
        actor = make("algorithm.update_epoch=4", "actor.optim.lr=0.01", f"algorithm.early_stop_kl={limit}")
        actor["advantage"] = np.array([1, -1, 1, 1, -1, 1])[:, None]
        metrics = actor.update()
        assert (metrics["optimizer_steps"], metrics["early_stopped"]) == (taken, stopped)


def test_reference_is_updated_every_interval(make: Make):
    actor = make("algorithm.kl_beta=0.1", "algorithm.reference_interval=2", "actor.optim.lr=0.01")
    actor["advantage"] = np.array([1, -1, 1, 1, -1, 1])[:, None]
    followed = []
    for step in range(3):
        actor.update(step)
        pairs = (actor.host._learner._reference.module.state_dict(), actor.host.policy.module.state_dict())
        followed.append(all(torch.equal(pairs[0][name], pairs[1][name]) for name in pairs[0]))
    assert followed == [False, True, False]


def test_updated_reference_is_restored_on_resume(make: Make, tmp_path):
    """Saved a step after the reference was replaced, so it equals neither the initial nor the current policy."""
    words = ("algorithm.kl_beta=0.1", "algorithm.reference_interval=2", "actor.optim.lr=0.01")
    first, second = make(*words), make(*words)
    first["advantage"] = np.array([1, -1, 1, 1, -1, 1])[:, None]
    for step in range(3):
        first.update(step)
    list(first.host.handle(SaveRequest(folder=str(tmp_path / "saved"))))
    list(second.host.handle(LoadRequest(folder=str(tmp_path / "saved"))))
    saved, loaded = (actor.host._learner._reference.module.state_dict() for actor in (first, second))
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    policy = first.host.policy.module.state_dict()
    assert not all(torch.equal(saved[name], policy[name]) for name in saved)


def test_reference_log_probs_cover_every_sample(make: Make):
    """In micro-batches of two; before the first update the reference equals the policy."""
    actor = make("algorithm.kl_beta=0.1", "actor.micro_batch_size=2")
    list(actor.host.handle(ScoreRequest(record_refs=actor.record_refs)))
    records = get_record_indices(actor.record_refs)
    scored, acted = (actor.arena[name][records] for name in (Record.ref_logprob, Record.logprob))
    np.testing.assert_allclose(scored, acted, atol=1e-4)
    assert scored.any(axis=1).all()


def test_value_head_with_adapters_has_its_own_learning_rate(make: Make):
    soup = ("model.path=assets/openvla_oft_tiny_soup", "model.unnorm_key=libero_object_no_noops")
    rates = ("actor.optim.lr=0.001", "actor.optim.value_lr=0.05")
    actor = make("algorithm=ppo", *TOY_OFT, "model.is_lora=true", *soup, *rates)
    assert actor.host._trainer is not None
    groups = actor.host._trainer.optimization.optimizer.param_groups
    values = {id(p) for p in actor.host.policy.module.value_head.parameters()}
    assert {id(p) for p in groups[1]["params"]} == values
    assert [group["lr"] for group in groups] == [0.001, 0.05]
    assert not values & {id(p) for p in groups[0]["params"]}


def returned(parts: Generator[None, None, Any]) -> Any:
    """Return the result of a generator."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


def test_padding_micro_batch_has_no_gradient(make: Make):
    """Ranks without samples repeat a sample; loss, gradient and metrics must not contain it."""
    actor = make("actor.optim.lr=0")
    actor["advantage"] = np.array([1, -2, 4, -8, 3, 1])[:, None]
    learner = actor.host._learner
    assert isinstance(learner, PolicyGradientLearner)
    batch = learner._build_batch(get_record_indices(actor.record_refs), np.arange(RECORDS))
    proximal = returned(learner._compute_proximal(batch))
    parts = learner._build_micro_batches(batch, proximal, np.arange(RECORDS))
    found = []
    for more in ([], [(parts[0][0], False)]):
        step = learner._trainer.run_optimizer_step([*parts, *more], 0.0, learner._score, learner._loss)
        metrics, said = returned(step)
        found.append([metrics["loss"], metrics["grad_norm"], len(said)])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


TEXT = ("env=text/copy", "~env.env_type", "~env.use_rel_reward", "model=causal_lm_tiny", "algorithm.entropy_bonus=0")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (TEXT, [[[3], [1, 5]], [[0], [2]]]),
        ((), [[[1, 3, 5]], [[0, 2]]]),
    ],
    ids=["text", "robot"],
)
def test_micro_batches_of_text_respect_the_token_budget(make: Make, words, expected):
    """Two optimizer steps of shuffled samples; one sample has no gradient."""
    actor = make("actor.max_tokens_per_mbs=20", *HALVES, *words)
    costs = np.array([20, 1, 1, 20, 1, 5])
    actor["cost"], actor["advantage"] = costs, np.array([1, -2, 4, -8, 0, 1])[:, None]
    learner, records = actor.host._learner, get_record_indices(actor.record_refs)
    assert isinstance(learner, PolicyGradientLearner)
    batch = learner._build_batch(records, np.arange(RECORDS))
    planned = [np.array([1, 3, 5]), np.array([2, 4, 0])]
    proximal = returned(learner._compute_proximal(batch))
    steps = [learner._build_micro_batches(batch, proximal, samples) for samples in planned]
    found = [[np.flatnonzero(np.isin(records, part.records)).tolist() for part, _ in parts] for parts in steps]
    assert found == expected


def test_policy_and_value_gradients_are_clipped_separately():
    """Gradients 3 and 4 with norm 5; Adam's running means start with a tenth of each."""
    module = TwoParts()
    optimization = Optimization(module, OptimSettings(clip_grad=0.5, value_clip_grad=2.0), 10)
    module.policy.weight.grad, module.value_head.weight.grad = torch.full((1, 1), 3.0), torch.full((1, 1), 4.0)
    assert optimization.step(0.0) == pytest.approx(5.0)
    means = [state["exp_avg"].item() for state in optimization.optimizer.state_dict()["state"].values()]
    assert means == pytest.approx([0.05, 0.2], rel=1e-4)


def test_skipped_step_does_not_count_in_the_warm_up():
    module = TwoParts()
    optimization = Optimization(module, OptimSettings(lr=0.1, warmup_steps=2), 10)
    for gradient in (torch.nan, 1.0):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimization.step(0.0)
    assert optimization.lr == pytest.approx(0.1 / 2)


def test_learning_rate_decays_within_an_update(make: Make):
    """The last of four optimizer steps in the first of two training steps has three quarters of the rate."""
    words = ("actor.optim.schedule=linear", "runner.max_steps=2", "actor.optim.lr=0.01", "algorithm.update_epoch=4")
    actor = make(*words)
    actor["advantage"] = np.array([1, -1, 1, 1, -1, 1])[:, None]
    metrics = actor.update()
    assert metrics["lr"] == pytest.approx(0.01 * (1 - 0.75 / 2))
    assert metrics["ratio_max"] > 1.01, "or the policy has not moved"
    assert metrics["logprob_gap"] < 1e-4


@pytest.mark.parametrize("way", ["flow_sde", "dsrl"])
def test_token_mean_excludes_tokens_without_log_prob(tmp_path, way):
    """Records of a flow contain whole states: with equal advantages and ratios of 1 the mean is the advantage."""
    sizes = ("actor.global_batch_size=6", "actor.micro_batch_size=6", "actor.optim.lr=0")
    words = ["env=tabletop", "model=flow_small", f"model.likelihood={way}", "algorithm=grpo", "launcher=inline", *sizes]
    run_plan = build_run_plan(load_config("train", [*words, f"runner.output_dir={tmp_path}"]), training=True)
    arena = Arena.create(run_plan.layout, max(run_plan.capacity, RECORDS))
    host = PolicyHost(build_policy_init(run_plan, arena, None))
    actor = Actor(host, arena, fill(arena, run_plan, host, drift=0.0))
    actor["valid"], actor["advantage"] = True, 1.0
    metrics = actor.update()
    host.close()
    arena.close()
    scored = run_plan.policy.scored
    assert run_plan.algorithm is not None
    assert 0 < scored * run_plan.policy.num_action_chunks < run_plan.policy.tokens_per_chunk
    assert run_plan.algorithm.scored == scored
    assert metrics["policy_loss"] == pytest.approx(-1, rel=1e-3)
    assert metrics["ratio"] == pytest.approx(1, rel=1e-3)
