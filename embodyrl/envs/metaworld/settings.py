"""Keys of MetaWorld; its tasks, instructions and groups (instructions and difficulties as lerobot evaluates)."""

from embodyrl.envs.settings import CameraSettings, EnvSettings, RenderProfile, RewardSettings

_GROUPS: dict[str, dict[str, str]] = {
    "easy": {
        "button-press-v3": "Press a button",
        "button-press-topdown-v3": "Press a button from the top",
        "button-press-topdown-wall-v3": "Bypass a wall and press a button from the top",
        "button-press-wall-v3": "Bypass a wall and press a button",
        "coffee-button-v3": "Push a button on the coffee machine",
        "dial-turn-v3": "Rotate a dial 180 degrees",
        "door-close-v3": "Close a door with a revolving joint",
        "door-lock-v3": "Lock the door by rotating the lock clockwise",
        "door-open-v3": "Open a door with a revolving joint",
        "door-unlock-v3": "Unlock the door by rotating the lock counter-clockwise",
        "drawer-close-v3": "Push and close a drawer",
        "drawer-open-v3": "Open a drawer",
        "faucet-close-v3": "Rotate the faucet clockwise",
        "faucet-open-v3": "Rotate the faucet counter-clockwise",
        "handle-press-v3": "Press a handle down",
        "handle-press-side-v3": "Press a handle down sideways",
        "handle-pull-v3": "Pull a handle up",
        "handle-pull-side-v3": "Pull a handle up sideways",
        "lever-pull-v3": "Pull a lever down 90 degrees",
        "plate-slide-v3": "Slide a plate into a cabinet",
        "plate-slide-back-v3": "Get a plate from the cabinet",
        "plate-slide-back-side-v3": "Get a plate from the cabinet sideways",
        "plate-slide-side-v3": "Slide a plate into a cabinet sideways",
        "reach-v3": "Reach a goal position",
        "reach-wall-v3": "Bypass a wall and reach a goal",
        "window-close-v3": "Push and close a window",
        "window-open-v3": "Push and open a window",
        "peg-unplug-side-v3": "Unplug a peg sideways",
    },
    "medium": {
        "basketball-v3": "Dunk the basketball into the basket",
        "bin-picking-v3": "Grasp the puck from one bin and place it into another bin",
        "box-close-v3": "Grasp the cover and close the box with it",
        "coffee-pull-v3": "Pull a mug from a coffee machine",
        "coffee-push-v3": "Push a mug under a coffee machine",
        "hammer-v3": "Hammer a screw on the wall",
        "peg-insert-side-v3": "Insert a peg sideways",
        "push-wall-v3": "Bypass a wall and push a puck to a goal",
        "soccer-v3": "Kick a soccer into the goal",
        "sweep-v3": "Sweep a puck off the table",
        "sweep-into-v3": "Sweep a puck into a hole",
    },
    "hard": {
        "assembly-v3": "Pick up a nut and place it onto a peg",
        "hand-insert-v3": "Insert the gripper into a hole",
        "pick-out-of-hole-v3": "Pick up a puck from a hole",
        "pick-place-v3": "Pick and place a puck to a goal",
        "push-v3": "Push the puck to a goal",
        "push-back-v3": "Push the puck to a goal",
    },
    "very_hard": {
        "shelf-place-v3": "Pick and place a puck onto a shelf",
        "disassemble-v3": "Pick a nut out of a peg",
        "stick-pull-v3": "Grasp a stick and pull a box with the stick",
        "stick-push-v3": "Grasp a stick and push a box using the stick",
        "pick-place-wall-v3": "Pick a puck, bypass a wall and place the puck",
    },
}
TASKS = {name: text for group in _GROUPS.values() for name, text in group.items()}
"""Instruction of each of the 50 tasks."""
_HELD_OUT = ("bin-picking-v3", "box-close-v3", "hand-insert-v3", "door-lock-v3", "door-unlock-v3")
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "MT50": tuple(sorted(TASKS)),
    "MT10": (
        *("reach-v3", "push-v3", "pick-place-v3", "door-open-v3", "drawer-open-v3", "drawer-close-v3"),
        *("button-press-topdown-v3", "peg-insert-side-v3", "window-open-v3", "window-close-v3"),
    ),
    "ML45": (*(name for name in sorted(TASKS) if name not in _HELD_OUT), *_HELD_OUT),
    **{name: tuple(group) for name, group in _GROUPS.items()},
}
"""Tasks by what they are known as; of ML45 the last five are held out."""
HIDDEN_GOALS = ("ML45",)
"""Benchmarks that do not show the goal."""


STATE, PROPRIOCEPTION = 39, 4
"""Numbers that a task observes, and those of them that are the arm's own."""


class MetaWorldSettings(EnvSettings, RewardSettings, CameraSettings):
    """MetaWorld."""

    id: str = "MT50"
    """A task (reach-v3), a benchmark (MT10, MT50, ML45), or a group of MT50: easy, medium, hard, very_hard."""
    pixels: bool = True
    """Camera images, and hand and gripper as the state; false: all 39 numbers, and which of several tasks it is."""
    render_profile: RenderProfile = RenderProfile.lean
    """full: pixel-identical to the package; lean: without multisampling and shadows, same physics."""

    @property
    def names(self) -> tuple[str, ...]:
        """Tasks that `id` names."""
        return BENCHMARKS.get(self.id, (self.id,))
