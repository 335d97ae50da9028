"""Returns, advantages and labels against an example computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from settings import model_of

from embodyrl.commands import recap_labelling as labelling
from embodyrl.commands.recap_labelling import Stage, label_in_process
from embodyrl.data.layout import Actor
from embodyrl.data.reader import Demonstrations
from embodyrl.data.recap import value
from embodyrl.data.recap.settings import LabelSource, RecapSettings
from embodyrl.data.recap.targets import (
    Outcomes,
    advantages,
    assign_folds,
    find_expert_frames,
    normalised_returns,
    rank_correlation,
    ranked_labels,
    shuffle_labels,
    thresholds,
    two_hot,
)
from embodyrl.data.recap.value import ValueModel, ValueTraining, train_value
from embodyrl.errors import ConfigError, NonFiniteError

LENGTHS, WON = (4, 6, 5), (True, True, False)
G = [
    *(-0.25, -0.166667, -0.083333, 0.0),
    *(-0.416667, -0.333333, -0.25, -0.166667, -0.083333, 0.0),
    *(-0.833333, -0.75, -0.666667, -0.583333, -0.5),
]
VALUE = [*(-0.30, -0.20, -0.10, -0.02), *(-0.45, -0.50, -0.35, -0.20, -0.10, -0.02), *(-0.45, -0.5, -0.6, -0.5, -0.45)]
ADVANTAGE = [
    *(0.033333, 0.013333, 0.016667, 0.02),
    *(-0.066667, 0.133333, 0.083333, 0.013333, 0.016667, 0.02),
    *(-0.316667, -0.166667, -0.016667, -0.083333, -0.05),
]
MONTE_CARLO = [
    *(0.05, 0.033333, 0.016667, 0.02),
    *(0.033333, 0.166667, 0.1, 0.033333, 0.016667, 0.02),
    *(-0.383333, -0.25, -0.066667, -0.083333, -0.05),
]
RANKED = [1, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0]
LABELS = [1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 0, 0, 1, 0, 0]


def demos(lengths: tuple[int, ...] = LENGTHS, won: tuple[bool, ...] = WON, task: str = "touch") -> Demonstrations:
    """Return episodes whose last step succeeds where `won`."""
    stop = np.cumsum(lengths)
    success = np.zeros(stop[-1], np.bool_)
    success[stop[np.array(won)] - 1] = True
    actor = np.zeros(stop[-1], np.int64)
    if lengths == LENGTHS:
        actor[:4], actor[12] = Actor.expert, Actor.person
    return Demonstrations(
        images=np.zeros((stop[-1], 0, 0, 0, 3), np.uint8),
        state=np.zeros((stop[-1], 1), np.float32),
        action=np.zeros((stop[-1], 1), np.float32),
        reward=success.astype(np.float32),
        success=success,
        start=np.concatenate([[0], stop[:-1]]),
        stop=stop,
        instruction=np.array([task] * stop[-1], object),
        actor=actor,
    )


def test_recap_labels_match_a_hand_computed_example():
    found = demos()
    outcomes = Outcomes.of(found)
    g = normalised_returns(outcomes, 1.0)
    np.testing.assert_allclose(g, G, atol=1e-6)
    value = np.array(VALUE)
    advantage = advantages(outcomes, g, value, 2)
    np.testing.assert_allclose(advantage, ADVANTAGE, atol=1e-6)
    np.testing.assert_allclose(advantages(outcomes, g, value, None), MONTE_CARLO, atol=1e-6)
    limits = thresholds(outcomes, advantage, 0.3)
    assert limits == {0: pytest.approx(0.0193333, abs=1e-7)}
    ranked = ranked_labels(outcomes, advantage, limits)
    assert ranked.astype(int).tolist() == RANKED
    assert (ranked | find_expert_frames(found)).astype(int).tolist() == LABELS


def test_two_hot_targets_match_a_hand_computed_example():
    target = two_hot(np.array([-1 / 3, 0.0, -1.0]), 201)
    np.testing.assert_allclose(target[0, [133, 134]], [2 / 3, 1 / 3])
    assert target[1, 200] == target[2, 0] == 1.0
    np.testing.assert_allclose(target @ np.linspace(-1, 0, 201), [-1 / 3, 0.0, -1.0])
    np.testing.assert_allclose(target.sum(1), 1.0)


def test_advantage_thresholds_are_independent_of_other_tasks():
    alone = Outcomes.of(demos())
    both = replace(
        alone,
        start=np.append(alone.start, 15),
        end=np.append(alone.end, 45),
        success=np.append(alone.success, False),
        task=np.append(alone.task, 1),
        frames=45,
    )
    g = normalised_returns(both, 1.0)
    np.testing.assert_allclose(g[:15], G, atol=1e-6)
    advantage = advantages(both, g, np.append(VALUE, np.full(30, -0.3)), 2)
    assert thresholds(both, advantage, 0.3)[0] == pytest.approx(0.0193333, abs=1e-7)


def test_labels_are_independent_of_episode_order():
    order = [2, 0, 1]
    first = Outcomes.of(demos())
    other = Outcomes.of(demos(tuple(LENGTHS[i] for i in order), tuple(WON[i] for i in order)))
    rows = np.concatenate([np.arange(first.start[i], first.end[i]) for i in order])
    g = normalised_returns(other, 1.0)
    np.testing.assert_allclose(g, np.array(G)[rows], atol=1e-6)
    advantage = advantages(other, g, np.array(VALUE)[rows], 2)
    ranked = ranked_labels(other, advantage, thresholds(other, advantage, 0.3))
    assert ranked.astype(int).tolist() == np.array(RANKED)[rows].tolist()


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (7, 3)])
def test_task_without_failures_has_finite_labels(lengths: tuple[int, ...]):
    outcomes = Outcomes.of(demos(lengths, (True,) * len(lengths)))
    g = normalised_returns(outcomes, 1.0)
    assert (g >= -0.5).all()
    assert g[outcomes.end - 1].tolist() == [0.0] * len(lengths)
    advantage = advantages(outcomes, g, np.linspace(-0.4, 0.0, len(g)), 50)
    assert ranked_labels(outcomes, advantage, thresholds(outcomes, advantage, 0.3)).any()


def test_steps_after_the_first_success_do_not_count():
    """The goal is reached at the fourth of six steps and lost again."""
    found = demos((6,), (True,))
    found = replace(found, success=np.array([0, 0, 0, 1, 0, 1], np.bool_))
    outcomes = Outcomes.of(found)
    assert outcomes.end.tolist() == [4]
    np.testing.assert_allclose(normalised_returns(outcomes, 1.0), [-3 / 8, -2 / 8, -1 / 8, 0, 0, 0])
    assert outcomes.task_of_frame.tolist() == [0, 0, 0, 0, -1, -1]
    assert not ranked_labels(outcomes, np.ones(6), {0: 0.5})[4:].any()


def test_third_party_demonstrations_count_as_successful():
    found = demos((5, 4), (False, True))
    unknown = replace(found, actor=np.where(np.arange(9) < 5, Actor.unknown, Actor.policy))
    assert Outcomes.of(unknown).success.tolist() == [True, True]
    assert Outcomes.of(found).success.tolist() == [False, True]
    assert find_expert_frames(unknown).tolist() == [True] * 5 + [False] * 4


def test_shuffling_keeps_label_counts_and_expert_labels():
    outcomes = Outcomes.of(demos((50, 50), (True, False)))
    labels, free = np.arange(100) % 3 == 0, np.arange(100) >= 10
    found = shuffle_labels(outcomes, labels, free, seed=1)
    assert found.sum() == labels.sum()
    assert (found != labels).any()
    assert (found[:10] == labels[:10]).all()


def test_folds_have_equal_sizes_and_rank_correlation_handles_ties():
    assert np.bincount(assign_folds(11, 3, seed=0)).tolist() == [4, 4, 3]
    assert rank_correlation([1, 2, 3], [10, 20, 15]) == pytest.approx(0.5)
    assert rank_correlation([1, 1, 2], [1, 1, 5]) == pytest.approx(1.0)
    assert rank_correlation([1, 1], [1, 2]) == 0.0


def test_non_finite_gradient_of_a_value_model_is_refused() -> None:
    """Otherwise NaN values would label no frame as positive."""
    training = ValueTraining(steps=3, batch_size=4, lr=1e38, seed=0)
    features = torch.linspace(-1.0, 1.0, 30).reshape(15, 2)
    with pytest.raises(NonFiniteError, match=r"value model in optimizer step [23]; the policy is unchanged"):
        train_value(lambda: ValueModel(features), np.arange(15), np.array(G), training)


def test_shuffled_labels_stay_within_their_task() -> None:
    """The first task has three positive frames of 50, the second one 40."""
    two = demos((50, 50), (True, False))
    outcomes = Outcomes.of(replace(two, instruction=np.array(["a"] * 50 + ["b"] * 50, object)))
    labels = (np.arange(100) < 3) | (np.arange(100) >= 60)
    found = shuffle_labels(outcomes, labels, np.ones(100, np.bool_), seed=1)
    assert (found[:50].sum(), found[50:].sum()) == (3, 40)
    assert (found != labels).any()


def test_episode_with_some_unknown_actors_does_not_count_as_demonstration() -> None:
    found = demos((5, 4), (False, False))
    mixed = replace(found, actor=np.where(np.arange(9) == 2, Actor.unknown, Actor.policy))
    assert Outcomes.of(mixed).success.tolist() == [False, False]


def test_stored_labels_are_rejected_if_the_label_source_changes(tmp_path: Path) -> None:
    def stage(source: LabelSource) -> Stage:
        cfg = RecapSettings(out=str(tmp_path), labels=source)
        model = model_of("flow_small", path=str(tmp_path))
        return Stage(folders=(), cfg=cfg, model=model, seed=0, labels=tmp_path / "a", summary=tmp_path / "b")

    first = stage(LabelSource.advantage)
    first.labels.touch()
    first.summary.write_text(json.dumps({"settings": first.settings}))
    assert label_in_process(first)["settings"] == first.settings
    with pytest.raises(ConfigError, match=r"recap\.labels=advantage"):
        label_in_process(stage(LabelSource.shuffled))


def test_values_come_from_models_trained_on_other_episodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each value model learns one constant, here the number of its training frames."""
    outcomes = Outcomes.of(found := demos())
    trained: list[set[int]] = []
    monkeypatch.setattr(labelling, "_value_models", lambda *_: None)
    monkeypatch.setattr(value, "train_value", lambda _, frames, *__: trained.append({*frames.tolist()}))
    monkeypatch.setattr(value, "rate", lambda _, frames: np.full(len(frames), float(trained[-1].isdisjoint(frames))))
    cfg = RecapSettings(out=str(tmp_path), value_folds=3)
    stage = Stage(
        folders=(), cfg=cfg, model=model_of("flow_small"), seed=0, labels=tmp_path / "a", summary=tmp_path / "b"
    )
    assert labelling.predict_held_out_values(found, outcomes, np.array(G), stage).tolist() == [1.0] * 15
    assert sorted(len(own) for own in trained) == [15 - 6, 15 - 5, 15 - 4]
