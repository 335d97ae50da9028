"""Evaluation episodes of embodyrl as a task of inspect-robots."""

from inspect_robots.scene import Scene
from inspect_robots.task import Task

import embodyrl
from embodyrl.envs.protocol import instruction_for
from embodyrl.plan.environment import env_spec
from embodyrl.plan.episodes import eval_start
from inspect_robots_embodyrl.spaces import words


def episodes(env: str = "tabletop", overrides: str | list[str] = "", count: int = 20) -> Task:
    """Return the first episodes of `embodyrl eval`; the score is success at the end.

    Args:
        env: option of `env=`.
        overrides: overrides as for `embodyrl eval`, separated by spaces; `env.eval.*` selects tasks and initial states.
        count: number of episodes; the tasks take turns.

    Raises:
        ConfigError: unknown environment or setting.
    """
    cfg = embodyrl.compose("eval", f"env={env}", "model=random", *words(overrides))
    spec, split = env_spec(cfg), cfg.env.eval
    scenes = []
    for episode in range(int(count)):
        task, reset_id, _ = eval_start(spec, split, episode)
        scenes.append(
            Scene(
                id=f"episode_{episode:04d}",
                instruction=instruction_for(spec, reset_id),
                init_seed=episode,
                metadata={"episode": episode, "task_id": task, "reset_id": reset_id},
            )
        )
    return Task(f"embodyrl/{spec.name}", scenes, "success_at_end", max_steps=split.max_episode_steps)
