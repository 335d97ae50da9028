"""Recording of episodes of `play`: a data set with the author of each action, and videos that show these authors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from embodyrl.commands.collect import write_environment
from embodyrl.data.layout import Actor, Card, Demonstration, Source
from embodyrl.data.writer import DatasetWriter
from embodyrl.plan.run_plan import RunPlan
from embodyrl.plan.schema import Config
from embodyrl.types import FloatArray
from embodyrl.workers.recording.video import VideoRecorder

VIDEOS = "watch"
"""Name of the folder with the videos in a data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One executed action with the observation before it."""

    observation: Mapping[str, Any]
    """Observation of `SingleEnv`; only the instruction if the episode is not recorded."""
    action: FloatArray
    """[A] action that was executed."""
    reward: float
    success: bool
    actor: Actor
    frame_jpeg: bytes
    """Rendered frame after the action as JPEG; empty if the episode is not recorded."""


class Recording:
    """Data set and videos of episodes of `play`; each episode is appended when it ends."""

    def __init__(
        self,
        root: Path,
        run_plan: RunPlan,
        environment: Config | None = None,
        state_ids: Sequence[int] | None = None,
    ) -> None:
        """Start or continue a data set.

        Args:
            root: folder of the data set.
            run_plan: plan of the policy and the environment.
            environment: config whose environment is stored with the data; None: the config of `run_plan`.
            state_ids: first and last initial state from which episodes may start; None: any initial state.

        Raises:
            EmbodyError: the folder contains other files, or a data set of another policy.
        """
        cfg, self._env = run_plan.cfg, run_plan.env
        collected = {"by": "play", "model": run_plan.policy.name, "weights": cfg.ckpt or cfg.model.weights}
        if state_ids is not None:
            collected["state_ids"] = list(state_ids)
        card = Card(env=self._env, fps=cfg.video_cfg.fps, video=False, actors=True, collected=collected)
        self._writer = DatasetWriter(root, card)
        write_environment(environment or cfg, root)
        self._trials = Counter(row["embodyrl/task_id"] for row in self._writer.episodes)

    @property
    def root(self) -> Path:
        """Folder of the data set."""
        return self._writer.root

    def append(self, steps: Sequence[Step], start: Mapping[str, int]) -> None:
        """Write an episode to disk.

        Args:
            steps: the executed steps.
            start: task, reset_id and seed of the episode.
        """
        task, cameras = start["task"], self._env.cameras
        shape = (len(cameras.names), *cameras.size, 3)
        no_images, no_state = np.zeros(shape, np.uint8), np.zeros(self._env.state_dim, np.float32)
        episode = Demonstration(
            images=np.stack([step.observation.get("images", no_images) for step in steps]),
            state=np.stack([step.observation.get("state", no_state) for step in steps]),
            action=np.stack([step.action for step in steps]),
            reward=np.array([step.reward for step in steps], np.float32),
            success=np.array([step.success for step in steps], np.bool_),
            instruction=steps[0].observation["instruction"],
            source=Source(
                task_id=task, reset_id=start["reset_id"], trial=self._trials[task], seed=start["seed"], version=-1
            ),
            actor=np.array([step.actor for step in steps], np.int64),
        )
        self._writer.append(episode)
        self._writer.flush()
        self._trials[task] += 1

    def record_video(self, steps: Sequence[Step]) -> None:
        """Write a video of the last episode, with the author of each action in a band below the image."""
        stem = self.root / VIDEOS / f"episode_{len(self._writer.episodes) - 1:05d}"
        instruction = steps[0].observation["instruction"]
        video = VideoRecorder(stem, round(self._writer.card.fps), instruction, info=True)
        for step in steps:
            frame = simplejpeg.decode_jpeg(step.frame_jpeg)
            video.add(frame, step.success, actor=step.actor.name, highlighted=step.actor is Actor.person)
        video.finish()

    def close(self) -> None:
        """Close the data set; idempotent."""
        self._writer.close()
