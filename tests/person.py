"""A scripted person who corrects a policy at the page: an environment's expert, through the page's inputs."""

from __future__ import annotations

import _thread
import json
import threading
from pathlib import Path
from typing import Any, ClassVar, Protocol

from browser import Browser, browser

from embodyrl.commands.dagger import DaggerResult, dagger
from embodyrl.envs.tabletop.sims import expert_action
from embodyrl.plan.schema import Config
from embodyrl.play.human import HumanExpert
from embodyrl.play.scene import Scene
from embodyrl.types import FloatArray

_NEARER = 0.005
"""Decrease of the distance that counts as approach, meters."""
_MOST_STEPS = 600
"""Steps after which the person restarts the episode, and drives from the first step on."""
_START_S = 55.0
"""Maximum time until an episode begins, seconds; a simulator may load."""
_STEP = """document.getElementById("step").click();
const look = () => state.steps > n ? done([state.over, performance.now()]) : setTimeout(look, 2); look();"""


class WatchedExpert(HumanExpert):
    """The page of `dagger.expert=human`, which the test finds in this process."""

    pages: ClassVar[list[WatchedExpert]] = []

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.pages.append(self)

    def wait_for_scene(self, ended: threading.Event) -> Scene | None:
        """Return the scene of the next corrections; None after the end."""
        while not ended.is_set():
            if (scene := self.handlers.scene) is not None and scene.remaining:
                return scene
            ended.wait(0.05)
        return None


class Arm(Protocol):
    """Inputs of the page with which the person drives a robot arm."""

    patience: int
    """Steps without approach after which the person takes over."""
    setup: str
    step: str
    """Script that sets the inputs to its first argument."""
    release: str
    rest: Any
    """Argument of `step` while the policy acts."""

    def begin(self) -> None:
        """Plan again: an episode begins."""
        ...

    def press(self, scene: Scene) -> Any:
        """Return the argument of `step` for the next action of the person."""
        ...

    def gap(self, scene: Scene) -> float:
        """Return the distance from the goal, meters."""
        ...


class Gamepad:
    """The tabletop, with a gamepad."""

    patience = 3
    rest: ClassVar[dict[str, Any]] = {"axes": [0, 0, 0, 0], "buttons": [{"pressed": False, "value": 0}] * 17}
    setup = f"window.pad = {{connected: true, ...{json.dumps(rest)}}}; navigator.getGamepads = () => [window.pad]"
    step = "window.pad.axes = input.axes; window.pad.buttons = input.buttons; gamepad();"
    release = f"Object.assign(window.pad, {json.dumps(rest)}); gamepad()"

    def begin(self) -> None:
        """Do nothing: the expert reacts to the current state."""

    def press(self, scene: Scene) -> dict[str, list[Any]]:
        """Return axes and buttons of the gamepad for the expert's next action."""
        x, y, z, *_, gripper = expert_action(world_of(scene)).tolist()
        buttons = [{"pressed": False, "value": 0}] * 17
        buttons[int(gripper < 0)] = {"pressed": True, "value": 1}
        return {"axes": [x, -y, 0, -z], "buttons": buttons}

    def gap(self, scene: Scene) -> float:
        """Return the distance of the gripper from the task's block, meters."""
        world = world_of(scene)
        return world.distance(world.blocks[world.task.block]) + world.z


class Person:
    """Corrects one episode after the other in the browser."""

    def __init__(self, page: Browser, expert: WatchedExpert, arm: Arm) -> None:
        self.page, self.expert, self.arm = page, expert, arm
        self.round_trips: list[float] = []
        self.restarts = 0

    def correct(self, ended: threading.Event) -> None:
        """Correct all episodes of all rounds."""
        opened = None
        while (scene := self.expert.wait_for_scene(ended)) is not None:
            if scene is not opened:  # a new round
                opened = scene
                self.page.open(self.expert.server.url)
                self.page.run(self.arm.setup)
            reset_id = scene.start["reset_id"]
            self._wait_for_start(reset_id)
            if not self._finish(scene, self.arm.patience):
                self.restarts += 1
                self.page.click("#restart")
                self._wait_for_start(reset_id)
                assert self._finish(scene, 0), "the person does not solve the episode"
            self.round_trips += self.page.run("return timings")
            self.page.click("#next")
            self.page.until(f"!state.live || state.reset_id != {reset_id} || state.remaining == 0")

    def _wait_for_start(self, reset_id: int) -> None:
        self.page.until(
            f"state.live && state.reset_id == {reset_id} && state.steps == 0 && inputs() === null", deadline_s=_START_S
        )

    def _finish(self, scene: Scene, patience: int) -> bool:
        """Take over after `patience` steps without approach; return whether the episode ended in time."""
        over, steps, nearest, lost = False, 0, self.arm.gap(scene), 0
        script = f"const [input, n, done] = arguments; {self.arm.step} {_STEP}"
        self.arm.begin()
        while not over and steps < _MOST_STEPS:
            over, _ = self.page.call(script, self.arm.press(scene) if lost >= patience else self.arm.rest, steps)
            steps += 1
            near = self.arm.gap(scene)
            lost = lost if lost >= patience else 0 if near < nearest - _NEARER else lost + 1
            nearest = min(nearest, near)
        self.page.run(self.arm.release)
        return over


def dagger_with_person(cfg: Config, arm: Arm, profile: Path) -> tuple[DaggerResult, list[float]]:
    """Run DAgger with a scripted person in a browser; return its result and the round trips of the page, ms."""
    ended, found = threading.Event(), []

    def act() -> None:
        while not WatchedExpert.pages:
            if ended.wait(0.05):
                return
        try:
            with browser(profile) as page:
                person = Person(page, WatchedExpert.pages.pop(), arm)
                person.correct(ended)
                found.extend(person.round_trips)
        except BaseException:
            _thread.interrupt_main()  # the driver would wait for the person
            raise

    thread = threading.Thread(target=act)
    thread.start()
    try:
        result = dagger(cfg)
    finally:
        ended.set()
        thread.join()
    return result, sorted(found)


def world_of(scene: Scene):
    """Return the table of a scene."""
    return scene.env.env._sims._worlds[0]


def amounts_of(scene: Scene, action: FloatArray) -> dict[str, float]:
    """Return how far the person presses each input for an action [A], at most fully."""
    parts = ((str(n), action[control.index] / control.value) for n, control in enumerate(scene.controls))
    return {name: min(1.0, float(part)) for name, part in parts if part > 0}


def inputs_of(scene: Scene) -> dict[str, float]:
    """Return how far the person presses each input: the tabletop expert's next action."""
    return amounts_of(scene, expert_action(world_of(scene)))
