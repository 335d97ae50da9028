"""The page of `embodyrl play` in a real browser: inputs, slow and lost connections, two windows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import CHROMIUM, DRIVER, Browser, browser

import embodyrl
from embodyrl.data.layout import Actor
from embodyrl.data.reader import load_demonstrations
from embodyrl.play.recording import Recording
from embodyrl.play.request_handlers import RequestHandlers, get_page
from embodyrl.play.scene import Scene
from embodyrl.web_pages.loopback import LoopbackServer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="no Chromium with its driver on this machine"),
]
WORDS = ("model=flow_small", "env.eval.max_episode_steps=1000", "env.eval.ignore_terminations=true")
KEY = "dispatchEvent(new KeyboardEvent('{event}', {{code: '{code}', key: '{code}'}}))"
PAD = """const buttons = Array.from({length: 17}, () => ({pressed: false, value: 0}));
window.pad = {connected: true, buttons, axes: [0, 0, 0, 0]}; navigator.getGamepads = () => [window.pad]"""


@contextmanager
def serving(desk: RequestHandlers) -> Iterator[str]:
    server = LoopbackServer(0, {"/": get_page}, desk.posts)
    thread = threading.Thread(target=server.process_requests)
    thread.start()
    try:
        yield server.url
    finally:
        server.stop()
        thread.join()
        server.server_close()


def key(window: Browser, event: str, code: str) -> None:
    window.run(KEY.format(event=event, code=code))


def open_page(window: Browser, url: str) -> None:
    window.open(url)
    window.until("document.querySelectorAll('#pad button').length == 8 && document.images[0].naturalWidth > 0")


def test_person_and_policy_share_episodes_in_the_browser(tmp_path: Path) -> None:
    policy = embodyrl.load_policy("assets/flow_small_tabletop", *WORDS, device="cpu")
    recording = Recording(tmp_path / "demos", policy.run_plan)
    scene = Scene(policy, policy.make_env(), recording)
    desk = RequestHandlers("table", scene)
    with serving(desk) as url, browser(tmp_path / "one", width=400) as one, browser(tmp_path / "two") as two:
        open_page(one, url)
        assert one.run("return document.documentElement.scrollWidth") <= 400, "no sideways scrolling on a phone"
        one.command("Network.enable")
        slow = {"latency": 150, "downloadThroughput": 2e5, "uploadThroughput": 1e5}
        one.command("Network.emulateNetworkConditions", offline=False, **slow)
        one.click("#run")
        one.until("state.actor == 'policy' && state.steps >= 2")
        key(one, "keydown", "KeyD")
        one.until("state.actor == 'person' && state.by_person >= 2")
        one.command("Network.emulateNetworkConditions", offline=True, **slow)
        one.until("document.getElementById('link').textContent.startsWith('connection lost')")
        waiting = scene.get_state()["steps"]
        open_page(two, url)
        assert two.run("return document.getElementById('run').disabled && !document.getElementById('take').hidden")
        assert scene.get_state()["steps"] == waiting, "nobody else advances the episode"
        one.command("Network.emulateNetworkConditions", offline=False, **slow)
        one.until(f"state.by_person >= 4 && state.steps > {waiting + 1}")
        key(one, "keydown", "Shift")
        assert list(one.run("return inputs()").values()) == [0.25], "Shift is for fine motions"
        key(one, "keyup", "Shift")
        assert list(one.run("return inputs()").values()) == [1]
        key(one, "keyup", "KeyD")
        one.until("state.actor == 'policy'")
        two.until("state.actor == 'policy'")
        one.click("#run")
        one.until("!running")
        one.run("window.settled = false; busy.then(() => { window.settled = true; })")
        one.until("settled")
        assert one.run("return shown.frames") == scene.frame_number, "every image was shown"
        assert one.run("return seq") == scene.get_state()["steps"]
        two.click("#take")
        two.until("state.drives")
        one.until("document.getElementById('run').disabled")
        two.run(PAD)
        two.click("#run")
        two.run("pad.axes[1] = -0.8; pad.buttons[0] = {pressed: true, value: 1}")
        steps = scene.get_state()["steps"]
        two.until(f"state.actor == 'person' && state.steps > {steps + 1}")
        two.run("dispatchEvent(new Event('blur'))")
        assert not two.run("return running"), "a window out of sight does not drive"
        two.run("pad.axes[1] = 0; pad.buttons[0] = {pressed: false, value: 0}")
        two.until("inputs() === null")
        seen = [(step.actor.name, step.action.tolist()) for step in scene._steps]
        two.click("#restart")
        two.until("state.steps == 0 && state.drives")
        two.click("#step")
        two.until("state.steps == 1")
        two.click("#next")
        two.until("state.kept == 1 && state.steps == 0")
    by_person = [action for actor, action in seen if actor == "person"]
    assert {(round(a[0], 2), round(a[1], 2), a[6]) for a in by_person} >= {(1.0, 0.0, by_person[0][6]), (0.0, 0.8, 1.0)}
    assert load_demonstrations(tmp_path / "demos").actor.tolist() == [Actor.policy], "after a restart"
    scene.env.close()
    recording.close()
