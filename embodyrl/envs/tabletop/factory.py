"""Checks, description and construction of the tabletop environment."""

from collections.abc import Iterator

from embodyrl.envs.chunked import ChunkedEnv
from embodyrl.envs.problems import camera_problems, task_problems
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import CameraSettings, EnvSettings, RewardSettings
from embodyrl.envs.tabletop.sims import CAMERAS, STATE_DIM, TabletopSims
from embodyrl.envs.tabletop.views import MAX_SIZE
from embodyrl.envs.tabletop.world import TASKS
from embodyrl.types import EnvSpec, GripperConvention

STATES_PER_TASK = 4000

HORIZON = 48
"""Step limit: about twice what the expert needs."""

SMALLEST_IMAGE = 32
"""Pixels; on anything smaller a block has less than three."""


class TabletopSettings(EnvSettings, RewardSettings, CameraSettings):
    """Keys of the tabletop."""


class TabletopFactory:
    """Builds the tabletop environment."""

    settings = TabletopSettings

    def validate(self, cfg: TabletopSettings) -> list[str]:
        """Return config problems, one line each."""
        return [
            *task_problems(cfg, len(TASKS), "touch 0-2, push 3-11, put 12-20"),
            *_size_problems(cfg),
            *camera_problems(cfg, CAMERAS),
        ]

    def spec(self, cfg: TabletopSettings, context: EnvContext) -> EnvSpec:
        """Describe the environment."""
        return EnvSpec(
            on_gpu=False,
            name="tabletop",
            action_dim=7,
            tasks=tuple(task.instruction for task in TASKS),
            states_per_task=(STATES_PER_TASK,) * len(TASKS),
            cameras=tuple(cfg.init_params.camera_names),
            image_size=(cfg.init_params.camera_heights, cfg.init_params.camera_widths),
            state_dim=STATE_DIM,
            gripper=GripperConvention(open=-1.0, closed=1.0, binary=True),
            unnorm_key="tabletop",
            max_episode_steps=HORIZON,
            expert_tasks=tuple(range(len(TASKS))),
        )

    def make(self, cfg: TabletopSettings, context: EnvContext) -> ChunkedEnv:
        """Build `context.num_slots` tables in this process."""
        sims = TabletopSims(self.spec(cfg, context))
        return ChunkedEnv(sims, context.num_slots, use_rel_reward=cfg.use_rel_reward, reward_coef=cfg.reward_coef)


def _size_problems(cfg: TabletopSettings) -> Iterator[str]:
    params = cfg.init_params
    for key, value in {"camera_heights": params.camera_heights, "camera_widths": params.camera_widths}.items():
        if not SMALLEST_IMAGE <= value <= MAX_SIZE:
            yield f"env.init_params.{key}={value} is not in {SMALLEST_IMAGE}..{MAX_SIZE}, the sizes that show a block."
    if params.camera_heights != params.camera_widths:
        yield (
            f"env.init_params: camera_heights={params.camera_heights} and camera_widths={params.camera_widths} differ; "
            "tabletop's cameras are square, set both to the same number."
        )


FACTORY = TabletopFactory()
