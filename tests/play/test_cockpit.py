"""`embodyrl play`: requests of the page, take-over, rewind, and recorded episodes."""

from __future__ import annotations

import json
import random
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import start_cli

import embodyrl
from embodyrl.api.acting import LoadedPolicy
from embodyrl.controls import get_controls, inputs_to_action
from embodyrl.data.checks import check_layout
from embodyrl.data.layout import Actor
from embodyrl.data.reader import load_demonstrations
from embodyrl.data.writer import read_episodes
from embodyrl.play.recording import VIDEOS, Recording
from embodyrl.play.request_handlers import RequestHandlers
from embodyrl.play.scene import Scene
from embodyrl.workers.recording.video import VideoError

CHECKPOINT = "assets/flow_small_tabletop"
LONG = ("model=flow_small", "env.eval.max_episode_steps=1000")
SMALL = (
    *("env.train.total_num_envs=4", "algorithm.group_size=4", "algorithm.rollout_epoch=1"),
    *("runner.max_steps=1", "runner.val_check_interval=-1", "actor.global_batch_size=16"),
    *("actor.micro_batch_size=16", "launcher=inline", "runner.logger.backends=[jsonl]", "runner.experiment_name=run"),
)
X, AWAY = 1, 3
"""Positions of the inputs `right` and `away` of the tabletop."""


@pytest.fixture(scope="module")
def policy() -> LoadedPolicy:
    return embodyrl.load_policy(CHECKPOINT, *LONG, device="cpu")


@pytest.fixture
def scene(policy: LoadedPolicy, tmp_path: Path) -> Iterator[Scene]:
    recording = Recording(tmp_path / "demos", policy.run_plan)
    scene = Scene(policy, policy.make_env(), recording, reset_ids=(5, 4007, 8009))
    yield scene
    scene.env.close()
    recording.close()


class Client:
    """A page without a browser."""

    def __init__(self, desk: RequestHandlers, name: str) -> None:
        self.desk, self.name, self.seq = desk, name, 0

    def act(self, do: str, **more: Any) -> dict[str, Any]:
        self.seq += 1
        return parts(self.desk.execute({"client": self.name, "seq": self.seq, "do": do, **more}))[0]

    def hello(self) -> dict[str, Any]:
        return parts(self.desk.get_page_state({"client": self.name}))[0]


def parts(answer: tuple[str, bytes]) -> tuple[dict[str, Any], bytes]:
    raw = answer[1]
    size = int.from_bytes(raw[:4], "big")
    return json.loads(raw[4 : 4 + size]), raw[4 + size :]


def test_recording_contains_executed_actions_and_their_actor(scene: Scene, policy: LoadedPolicy) -> None:
    page = Client(RequestHandlers("run", scene), "a")
    seen, _ = (env := policy.make_env()).reset(options={"reset_id": 5})
    chunk = policy.act(seen)
    assert len(chunk) > 2, "the take-over is in the middle of a chunk"
    page.act("tick", inputs=None)
    page.act("tick", inputs=None)
    amounts: list[dict[int, float]] = [{X: 1.0}, {X: 0.25, AWAY: 0.5}, {}]
    for each in amounts:
        state = page.act("tick", inputs={str(k): v for k, v in each.items()})
    assert (state["actor"], state["by_person"], state["steps"]) == ("person", 3, 5)
    before = scene._observation
    page.act("tick", inputs=None)
    page.act("next")
    demos = load_demonstrations(Path(scene._recording.root))
    assert demos.actor.tolist() == [Actor.policy] * 2 + [Actor.person] * 3 + [Actor.policy]
    np.testing.assert_array_equal(demos.action[:2], chunk[:2])
    last = chunk[1]
    for row, each in zip(demos.action[2:5], amounts, strict=True):
        np.testing.assert_array_equal(row, last := inputs_to_action(env.layout.action, each, last))
    np.testing.assert_array_equal(demos.action[5], policy.act(before)[0], err_msg="a new plan after the hand-back")
    np.testing.assert_array_equal(demos.images[0], seen["images"])
    np.testing.assert_array_equal(demos.images[5], before["images"])
    assert demos.reset_id.tolist() == [5]
    assert check_layout(scene._recording.root) == []
    env.close()


def test_finished_episodes_are_saved_with_a_video_that_shows_the_actor(scene: Scene) -> None:
    page = Client(RequestHandlers("run", scene), "a")
    root = scene._recording.root
    for number in range(3):
        page.act("tick", inputs={str(X): 1})
        state = page.act("next")
        rows = read_episodes(root)
        assert [row["embodyrl/reset_id"] for row in rows] == [5, 4007, 8009][: number + 1]
        assert len(list((root / VIDEOS).glob(f"episode_{number:05d}_*.mp4"))) == 1
    assert (state["over"], state["remaining"], state["assigned"], state["kept"]) == (True, 0, 3, 3)
    scene.finish_episode()
    page.act("next")
    assert len(read_episodes(root)) == 3, "nothing is recorded twice"


def test_failed_video_does_not_repeat_its_episode(scene: Scene) -> None:
    root = scene._recording.root
    (root / VIDEOS).write_text("a file instead of the folder of the videos")
    page = Client(RequestHandlers("run", scene), "a")
    page.act("tick", inputs={str(X): 1})
    with pytest.raises(VideoError, match=VIDEOS):
        page.act("next")
    page.seq -= 1
    assert page.act("next")["reset_id"] == 4007
    assert [row["embodyrl/reset_id"] for row in read_episodes(root)] == [5]


def test_rewind_restores_a_saved_state_and_removes_later_steps(scene: Scene) -> None:
    page = Client(RequestHandlers("run", scene), "a")
    path = [{str(X): 1}, {str(AWAY): 1}, {}, {str(X): 0.5}]
    for each in path:
        page.act("tick", inputs=each)
    first = scene.frame_jpeg
    for _ in range(2):
        assert page.act("rewind", steps=3)["steps"] == 1
        for each in path[1:]:
            state = page.act("tick", inputs=each)
        assert scene.frame_jpeg == first
        assert state["steps"] == 4
    assert page.act("rewind", steps=100)["steps"] == 0
    assert page.act("restart")["reset_id"] == 5
    page.act("tick", inputs={})
    page.act("next")
    assert len(load_demonstrations(scene._recording.root).action) == 1, "dropped steps are not recorded"


def test_played_policy_executes_whole_chunks_without_the_delay_of_the_run(tmp_path: Path, caplog) -> None:
    from embodyrl.play.scene import load_policy_with_env

    words = ["model=flow_small", "env.control.latency_steps=2"]
    policy, env = load_policy_with_env(Path(CHECKPOINT), words, records=True)
    assert env.max_episode_steps == 100_000
    assert "max_episode_steps" not in caplog.text, "a value that the user did not set gives no warning"
    recording = Recording(tmp_path / "demos", policy.run_plan)
    scene = Scene(policy, env, recording, reset_ids=(5,))
    for _ in range(10):
        scene.advance(None)
    scene.finish_episode()
    env.close()
    recording.close()
    plain = embodyrl.load_policy(CHECKPOINT, *LONG, device="cpu").make_env()
    seen, _ = plain.reset(options={"reset_id": 5})
    found: list[np.ndarray] = []
    while len(found) < 10:
        chunk = policy.act(seen)
        found.extend(chunk)
        for action in chunk:
            seen = plain.step(action)[0]
    plain.close()
    np.testing.assert_array_equal(load_demonstrations(recording.root).action, found[:10])


def test_repeated_requests_have_no_further_effect(scene: Scene) -> None:
    desk = RequestHandlers("run", scene)
    request = {"client": "a", "seq": 1, "do": "tick", "inputs": {str(X): 1}}
    first = desk.execute(request)
    assert [desk.execute(dict(request)) for _ in range(3)] == [first] * 3
    assert parts(first)[0]["steps"] == 1
    for seq in (1, 3, 0, -1, True, 2**60):
        with pytest.raises(ValueError, match="'seq' must be"):
            desk.execute({"client": "a", "seq": seq, "do": "tick", "inputs": None})
    assert parts(desk.get_page_state({"client": "a"}))[0]["seq"] == 1, "a reloaded page continues"
    assert parts(desk.execute({**request, "seq": 2}))[0]["steps"] == 2


def test_only_one_client_controls_the_episode(scene: Scene) -> None:
    desk = RequestHandlers("run", scene)
    one, two = Client(desk, "one"), Client(desk, "two")
    assert one.hello()["free"]
    one.act("tick", inputs=None)
    with pytest.raises(ValueError, match="another browser window controls the episode"):
        two.act("tick", inputs=None)
    told, image = parts(desk.get_view({"client": "two"}))
    assert (told["steps"], told["drives"], image == scene.frame_jpeg) == (1, False, True)
    assert parts(desk.get_view({"client": "two", "after": told["moment"]}))[1] == b"", "the image is not sent again"
    assert two.act("take")["drives"]
    assert two.act("tick", inputs=None)["steps"] == 2
    with pytest.raises(ValueError, match="another browser window controls the episode"):
        one.act("tick", inputs=None)
    assert scene.get_state()["steps"] == 2
    assert one.hello()["seq"] == 0
    assert one.act("take")["drives"], "control can be taken back"
    assert one.act("tick", inputs=None)["steps"] == 3


BAD = [
    *({"do": "tick", "inputs": value} for value in ([], 7, "x", True, {"99": 1}, {"-1": 1}, {"x": 1}, {"²": 1})),
    *({"do": "tick", "inputs": {"0": value}} for value in (1.5, -0.1, float("nan"), float("inf"), None, "1", True)),
    *({"do": "next", "task": value} for value in (99, -2, 1.0, float("inf"), None, [], True)),
    *({"do": "rewind", "steps": value} for value in (0, -1, None, "3", 1e999)),
    *({"do": value} for value in ("fly", "", None, 7, "\ud800")),
    *({"do": "tick", "client": value} for value in ("", None, "x" * 65, "\udfff", [])),
    {"do": "say", "instruction": "\ud800"},
    {"do": "say", "instruction": "touch the blue block"},
]


def test_rejected_requests_leave_the_scene_unchanged(scene: Scene) -> None:
    desk = RequestHandlers("run", scene)
    before = scene.get_state()
    for bad in BAD:
        with pytest.raises(ValueError, match=r"'|no earlier state|recorded episode"):
            desk.execute({"client": "a", "seq": 1, **bad})
    assert scene.get_state() == before
    rng = random.Random(0)
    good = json.dumps({"client": "a", "seq": 1, "do": "tick", "inputs": {"0": 0.5}})
    for _ in range(500):
        raw = bytearray(good.encode())
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        try:
            body = json.loads(raw)
        except ValueError:
            continue
        for post in desk.posts.values() if isinstance(body, dict) else ():
            try:
                post(body)
            except ValueError:
                pass


def test_typed_instruction_reaches_the_policy(policy: LoadedPolicy) -> None:
    scene = Scene(policy, policy.make_env())
    page = Client(RequestHandlers("run", scene), "a")
    page.act("next", task=0)
    assert page.hello()["speaks"]
    page.act("say", instruction="touch  the blue block")
    seen = scene._observation
    page.act("tick", inputs=None)
    np.testing.assert_array_equal(scene._steps[0].action, policy.act(seen, instruction="touch the blue block")[0])
    scene.env.close()


def test_steps_store_no_frames_and_few_states_without_recording(policy: LoadedPolicy, monkeypatch) -> None:
    """An episode without a time limit fits in memory."""
    monkeypatch.setattr("embodyrl.play.scene._MAX_REWIND_STEPS", 3)
    scene = Scene(policy, policy.make_env())
    pictures = [scene.frame_jpeg]
    for amount in range(6):
        scene.advance({X: amount / 5})
        pictures.append(scene.frame_jpeg)
    assert {(*step.observation, step.frame_jpeg) for step in scene._steps} == {("instruction", b"")}
    assert [state is None for state in scene._states] == [True] * 3 + [False] * 4
    scene.rewind(100)
    assert (scene.frame_jpeg, scene.get_state()["steps"]) == (pictures[3], 3)
    with pytest.raises(ValueError, match="no earlier state"):
        scene.rewind(1)
    scene.advance({})
    scene.rewind(2)
    assert (scene.frame_jpeg, scene.get_state()["steps"]) == (pictures[3], 3)
    scene.env.close()


def test_pressed_key_selects_a_discrete_action(tmp_path: Path) -> None:
    """An environment without saved states, whose images are rendered."""
    from embodyrl.play.scene import load_policy_with_env

    names = ("env=gym", "env.id=pixel_env:PixelEnv", "model=cnn", "algorithm=ppo", "algorithm.group_size=1")
    few = ("env.train.max_episode_steps=4", "env.train.max_steps_per_rollout_epoch=16")
    played = ("runner.val_check_interval=1", "eval.episodes=1", "env.eval.max_episode_steps=4")
    cfg = embodyrl.compose("train", *SMALL, *names, *few, *played, f"runner.output_dir={tmp_path}/runs")
    run = embodyrl.train(cfg).run
    assert "embodyrl play" in (run / "logs" / "events.log").read_text()
    policy, env = load_policy_with_env(run, ["trust=true"])
    recording = Recording(tmp_path / "demos", policy.run_plan)
    scene = Scene(policy, env, recording)
    page = Client(RequestHandlers("run", scene), "a")
    told = page.hello()
    assert (told["rewinds"], told["recorded"], told["speaks"]) == (False, True, False)
    keys = [control.key for control in get_controls(env.layout.action)]
    states = [page.act("tick", inputs={"0": 1} if keys else None) for _ in range(6)]
    assert [state["steps"] for state in states] == [1, 2, 3, 4, 4, 4]
    assert states[-1]["over"], "the environment is not stepped after its end"
    with pytest.raises(ValueError, match="no earlier state"):
        page.act("rewind", steps=1)
    page.seq -= 1
    page.act("next")
    assert len(load_demonstrations(tmp_path / "demos").action) == 4
    env.close()
    recording.close()
    blind = cfg.updated({"env.id": "goal_env:Walk", "model.model_type": "mlp", "runner.experiment_name": "blind"})
    assert "embodyrl play" not in (embodyrl.train(blind).run / "logs" / "events.log").read_text(), "nothing to watch"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run of the tabletop."""
    out = tmp_path_factory.mktemp("runs")
    cfg = embodyrl.compose("train", *SMALL, "env.train.max_episode_steps=8", f"runner.output_dir={out}")
    return embodyrl.train(cfg).run


@pytest.mark.integration
def test_play_serves_its_page_and_saves_the_current_episode_on_ctrl_c(run: Path) -> None:
    demos = run.parent / "demos"
    started = start_cli("play", str(run), "--record", str(demos), cwd=run.parent)
    started.wait_for(started.out, lines=1)
    url, _, secret = started.out.read_text().split()[1].partition("?token=")
    token = {"X-Token": secret}

    def ask(name: str, body: object = None, **headers: str) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(url + name, data, headers), timeout=60) as answer:
            return answer.read()

    assert b"<html" in ask(f"?token={secret}")
    silent = [socket.create_connection(("127.0.0.1", int(url.split(":")[2].strip("/")))) for _ in range(8)]
    for seq in (1, 2):
        body = {"client": "a", "seq": seq, "do": "tick", "inputs": {"1": 1} if seq == 2 else None}
        assert parts(("", ask("act", body, **token)))[0]["steps"] == seq
    for code, name, body, headers in (
        (403, "", None, {}),
        (403, "", None, token | {"Host": "evil.example"}),
        (403, "", None, token | {"Origin": "https://evil.example"}),
        (404, "other", None, token),
        (403, "act", {}, {}),
        (403, "act", {}, {"X-Token": "\xfc"}),
        (403, "act", {}, {"Content-Length": "many"}),
        (404, "act", {}, token | {"Content-Length": "9" * 5000}),
        *((400, "act", body, token) for body in ([], 7, None, {"task": 1e999})),
    ):
        with pytest.raises(urllib.error.HTTPError, match=str(code)):
            ask(name, [None] if body is None and name == "act" else body, **headers)
    for each in silent:
        each.close()
    started.signal_group(signal.SIGINT)
    assert started.wait() == 130
    assert load_demonstrations(demos).actor.tolist() == [Actor.policy, Actor.person]
