"""Write these files with lerobot 0.4.4: python write.py FOLDER, in an environment with lerobot.

`image_v21` and `video_v21` have the same episodes, written by lerobot 0.3.3 (`add_frame(frame, task=task)`).
"""

import sys
from pathlib import Path

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset  # type: ignore[import-not-found]

JOINTS = [f"j{i}" for i in range(6)]
for name in ("image", "video"):
    picture = {"dtype": name, "shape": (64, 96, 3), "names": ["height", "width", "channels"]}
    numbers = {"dtype": "float32", "shape": (6,), "names": JOINTS}
    features = {"observation.images.top": picture, "observation.images.wrist": picture}
    features |= {"observation.state": numbers, "action": numbers}
    dataset = LeRobotDataset.create(
        "me/x", fps=10, features=features, root=Path(sys.argv[1]) / name, robot_type="so100", use_videos=name == "video"
    )
    rng = np.random.default_rng(0)
    for episode, (length, task) in enumerate([(5, "pick the cube"), (7, "open the lid"), (4, "pick the cube")]):
        for t in range(length):
            frame = np.zeros((64, 96, 3), np.uint8)
            frame[..., 0], frame[..., 1], frame[:, :48, 2] = 10 * t, 40 * episode, 200
            state, action = rng.normal(size=(2, 6)).astype(np.float32)
            pictures = {"observation.images.top": frame, "observation.images.wrist": 255 - frame}
            dataset.add_frame({**pictures, "observation.state": state, "action": action, "task": task})
        dataset.save_episode()
    dataset.finalize()
