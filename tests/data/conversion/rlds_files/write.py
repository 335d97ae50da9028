"""Write these files: python write.py FOLDER (pip install tensorflow-cpu tensorflow-datasets, version 4.9)."""

import sys

import numpy as np
import tensorflow_datasets as tfds  # type: ignore[import-not-found]

_FLAG, _NUMBER = tfds.features.Scalar(dtype=np.bool_), tfds.features.Scalar(dtype=np.float32)
_STEP = {
    "observation": tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(16, 24, 3), dtype=np.uint8, encoding_format="png"),
            "wrist_image": tfds.features.Image(shape=(16, 24, 3), dtype=np.uint8, encoding_format="jpeg"),
            "state": tfds.features.Tensor(shape=(4,), dtype=np.float32),
            "joints": tfds.features.Tensor(shape=(2,), dtype=np.float64),
        }
    ),
    "action": tfds.features.Tensor(shape=(3,), dtype=np.float32),
    "discount": _NUMBER,
    "reward": _NUMBER,
    "is_first": _FLAG,
    "is_last": _FLAG,
    "is_terminal": _FLAG,
    "language_instruction": tfds.features.Text(),
}


class Tiny(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    name = "tiny_arm"

    def _info(self):
        metadata = tfds.features.FeaturesDict({"file_path": tfds.features.Text()})
        features = {"steps": tfds.features.Dataset(_STEP), "episode_metadata": metadata}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        rng = np.random.default_rng(0)
        for episode, length in enumerate((3, 5, 4)):
            steps = []
            for t in range(length):
                image = np.zeros((16, 24, 3), np.uint8)
                image[...] = 40 * episode + 10, 12 * t + 5, 80
                numbers, last = rng.normal(size=9), t == length - 1
                seen = {"image": image, "wrist_image": 255 - image, "joints": numbers[4:6]}
                seen["state"] = numbers[:4].astype(np.float32)
                flags = {"is_first": t == 0, "is_last": last, "is_terminal": last, "reward": float(last)}
                text = ("touch the red block", "open the door")[episode % 2]
                step = {"observation": seen, "action": numbers[6:].astype(np.float32), "discount": 1.0}
                steps.append({**step, **flags, "language_instruction": text})
            yield episode, {"steps": steps, "episode_metadata": {"file_path": f"demo_{episode}.hdf5"}}


Tiny(data_dir=sys.argv[1]).download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=2))
