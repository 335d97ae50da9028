"""A scripted person who corrects the tabletop: the environment's expert, through the page's inputs."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from embodyrl.envs.tabletop.sims import expert_action
from embodyrl.extensions.cockpit.human import HumanExpert
from embodyrl.extensions.cockpit.scene import Scene
from embodyrl.plan.schema import Config

_MOVES = ((0, 1), (2, 3), (4, 5))
"""Positions of the inputs that decrease and increase x, y and z."""
_CLOSE, _OPEN = 6, 7


class WatchedExpert(HumanExpert):
    """The page of `dagger.expert=human`, which the test finds in this process."""

    pages: ClassVar[list[WatchedExpert]] = []

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.pages.append(self)

    def wait_for_scene(self, ended: threading.Event) -> Scene | None:
        """Return the scene of the next corrections; None after the end."""
        while not ended.is_set():
            if (scene := self.desk.scene) is not None and scene.remaining:
                return scene
            ended.wait(0.05)
        return None


def world_of(scene: Scene):
    """Return the table of a scene."""
    return scene.env.env._sims._worlds[0]


def inputs_of(scene: Scene) -> dict[str, float]:
    """Return how far the person presses each input: the expert's next action."""
    action = expert_action(world_of(scene)).tolist()
    amounts = {str(pair[value > 0]): abs(value) for pair, value in zip(_MOVES, action[:3], strict=True) if value}
    return amounts | {str(_CLOSE if action[6] > 0 else _OPEN): 1.0}


def gap(scene: Scene) -> float:
    """Return the distance of the gripper from the task's block, metres."""
    world = world_of(scene)
    return world.distance(world.blocks[world.task.block]) + world.z


def pad_of(scene: Scene) -> dict[str, list[Any]]:
    """Return axes and buttons of a gamepad for the expert's next action."""
    x, y, z, *_, gripper = expert_action(world_of(scene)).tolist()
    buttons = [{"pressed": False, "value": 0}] * 17
    buttons[int(gripper < 0)] = {"pressed": True, "value": 1}
    return {"axes": [x, -y, 0, -z], "buttons": buttons}
