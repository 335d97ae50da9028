"""`embodyrl dagger dagger.expert=human`: corrections of failed episodes, and training on them."""

from __future__ import annotations

import _thread
import json
import signal
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodyrl.api.acting import build_policy_of_config
from embodyrl.commands.collect import collect
from embodyrl.commands.dagger import dagger
from embodyrl.commands.sft_data import load_samples
from embodyrl.data.cards import read_card
from embodyrl.data.layout import Actor
from embodyrl.data.reader import load_demonstrations
from embodyrl.data.writer import read_episodes
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.plan.checks import check_components
from embodyrl.plan.config import apply_overrides, load_config
from embodyrl.play.human import compute_uncertainty
from embodyrl.play.recording import Recording
from embodyrl.policies import POLICIES

TABLE = ("env=tabletop", "env.train.task_ids=[0,1,2]", "env.train.max_episode_steps=12", "env.train.total_num_envs=4")
CAMERA = "env.init_params.camera_names=[front]"
SIZE = ("env.init_params.camera_heights=56", "env.init_params.camera_widths=56")
"""Image size of the checkpoint in `SMALL`."""
QUIET = ("launcher=inline", "runner.logger.backends=[jsonl]")
SMALL = ("model=flow_small", "ckpt=assets/flow_small_tabletop", "actor.global_batch_size=8", "actor.micro_batch_size=8")


def configure(command: str, folder: Path, *words: str):
    cfg = load_config(command, [*TABLE, *QUIET, f"runner.output_dir={folder}/runs", *words])
    check_components(cfg)
    return cfg


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demos")
    collect(configure("collect", folder, f"collect.out={folder}/demos", "collect.episodes=6", CAMERA, *SIZE))
    return folder / "demos"


def correct(ended: threading.Event, seen: list[str]) -> None:
    """Correct every episode: two steps of the policy, then the person until success."""
    from person import WatchedExpert, inputs_of

    while not WatchedExpert.pages:
        if ended.wait(0.05):
            return
    expert = WatchedExpert.pages.pop()
    address, _, token = expert.server.url.partition("?token=")
    seq = 0

    def act(do: str, **more: Any) -> dict[str, Any]:
        nonlocal seq
        seq += 1
        body = json.dumps({"client": "person", "seq": seq, "do": do, **more}).encode()
        request = urllib.request.Request(f"{address}act", body, {"X-Token": token})
        with urllib.request.urlopen(request, timeout=60) as answer:
            raw = answer.read()
        return json.loads(raw[4 : 4 + int.from_bytes(raw[:4], "big")])

    while (scene := expert.wait_for_scene(ended)) is not None:
        state = act("tick", inputs=None)
        seen.append(state["note"])
        while not state["over"]:
            state = act("tick", inputs=inputs_of(scene))
        act("next")


@pytest.mark.integration
def test_person_corrects_failed_episodes_and_the_policy_trains_on_them(tmp_path: Path, demos: Path, capsys) -> None:
    few = ("dagger.rounds=2", "dagger.corrections=2", "collect.episodes=6", "runner.max_steps=2")
    places = (f"data.path={demos}", f"collect.out={tmp_path}/rounds", "runner.experiment_name=taught")
    cfg = configure("dagger", tmp_path, *SMALL, *few, *places, "dagger.expert=person:WatchedExpert", "trust=true")
    with pytest.raises(EmbodyError, match=r"for 0.01 s .*correction_timeout_s.* to resume, run the same command"):
        dagger(apply_overrides(cfg, {"dagger.correction_timeout_s": 0.01}))
    from person import WatchedExpert

    WatchedExpert.pages.clear()
    ended, seen = threading.Event(), []
    person = threading.Thread(target=correct, args=(ended, seen))
    person.start()
    try:
        result = dagger(cfg)
    finally:
        ended.set()
        person.join()
    for number, folder in enumerate(result.data, start=1):
        rows = read_episodes(tmp_path / f"rounds/round_{number}_alone")
        alone = {row["embodyrl/reset_id"]: row["embodyrl/success"] for row in rows}
        corrected = load_demonstrations(folder)
        states = read_card(folder).collected["state_ids"]
        assert states == cfg.env.train.state_ids, "else an evaluation would count all states as demonstrated"
        assert len(alone) == 6
        assert 1 <= corrected.num_episodes <= 2
        assert not any(alone[reset_id] for reset_id in corrected.reset_id.tolist()), "only episodes that failed"
        assert corrected.success[corrected.stop - 1].all()
        assert corrected.actor[corrected.start].tolist() == [Actor.policy] * corrected.num_episodes
        assert (corrected.actor == Actor.person).sum() == len(corrected.action) - corrected.num_episodes
        whole, by_person = samples_of(folder), samples_of(folder, "data.actors=[person]")
        assert len(by_person) == len(whole) - corrected.num_episodes, "a chunk with an action of the policy is left out"
    said = capsys.readouterr().out
    assert "round 1 of 2: without corrections, the policy solves" in seen[0]
    assert "round 2 of 2: without corrections, the policy solves" in said
    saved = (result.run / "config.yaml").read_text()
    assert "round_1" in saved
    assert "- person" in saved
    assert dagger(cfg).run == result.run, "a finished DAgger opens no page"


def test_interrupted_correction_is_not_recorded(tmp_path: Path, demos: Path) -> None:
    from person import WatchedExpert

    words = [*SMALL, f"data.path={demos}", f"collect.out={tmp_path}/rounds"]
    expert = WatchedExpert(configure("dagger", tmp_path, *words))
    WatchedExpert.pages.clear()
    policy = build_policy_of_config(load_config("eval", [TABLE[0], CAMERA, *SIZE, *QUIET, *SMALL[:2]]))
    recording = Recording(tmp_path / "corrections", policy.run_plan)

    def act_once_and_interrupt() -> None:
        scene = expert.wait_for_scene(threading.Event())
        expert.server.call(lambda: scene.advance({0: 1.0}))
        _thread.interrupt_main()

    person = threading.Thread(target=act_once_and_interrupt)
    # A shell ignores SIGINT in background processes, and their child processes inherit this.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    person.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            expert._correct(policy, recording, [5])
    finally:
        signal.signal(signal.SIGINT, handler)
        person.join()
        expert.close()
        recording.close()
    assert read_episodes(tmp_path / "corrections") == []


def test_uncertainty_is_the_spread_of_sampled_actions(demos: Path, tmp_path: Path) -> None:
    policy = build_policy_of_config(
        load_config("eval", [TABLE[0], CAMERA, *QUIET, *SMALL[:2], f"runner.output_dir={tmp_path}"])
    )
    shown = load_demonstrations(demos)
    first = compute_uncertainty(policy, shown, 0)
    assert first > 0
    assert first == compute_uncertainty(policy, shown, 0)
    assert len({compute_uncertainty(policy, shown, e) for e in range(3)}) == 3


def samples_of(demos: Path, *words: str):
    model = ("model=flow_small", "model.path=assets/flow_small_tabletop", "data.val_share=0")
    cfg = load_config("sft", [f"data.path={demos}", *model, *words])
    env = read_card(demos, cfg.data).env
    return load_samples(cfg, env, POLICIES.get(cfg.model.model_type).spec(cfg.model, env, 0))[0]


def test_training_selects_chunks_by_actor(demos: Path) -> None:
    np.testing.assert_array_equal(samples_of(demos, "data.actors=[expert]").steps, samples_of(demos).steps)
    with pytest.raises(ConfigError, match=r"data.actors=\['person'\]: no action chunk"):
        samples_of(demos, "data.actors=[person]")


def test_unknown_expert_is_rejected(tmp_path: Path, demos: Path) -> None:
    with pytest.raises(ConfigError, match=r"Unknown dagger.expert 'humans'. Did you mean 'human'"):
        configure("dagger", tmp_path, *SMALL, f"data.path={demos}", f"collect.out={tmp_path}/o", "dagger.expert=humans")
