"""Resolution of the values of weight keys, such as `ckpt`, to policy folders."""

import os
from pathlib import Path

from embodyrl.channels.messages import POLICY_FOLDER
from embodyrl.checkpoint.store import MANIFEST_NAME, CheckpointStore
from embodyrl.config.paths import resolve_run
from embodyrl.errors import CheckpointError
from embodyrl.text.model_folder import find_missing_weights


def find_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint folder that contains a path, even if the folder was copied or renamed; else None.

    Symbolic links in the path are resolved first.
    """
    real_path = Path(os.path.realpath(path))
    for folder in (real_path, *real_path.parents):
        is_policy = real_path.relative_to(folder).parts[:1] == (POLICY_FOLDER,)
        # Two of three signs suffice, because the manifest may be lost or the folder copied.
        if is_policy + (folder.parent.name == "checkpoints") + (folder / MANIFEST_NAME).is_file() > 1:
            return folder
    return None


def resolve_weights(ckpt: str, key: str = "ckpt") -> Path:
    """Return the policy folder of a run or checkpoint, or the folder itself if it contains published weights.

    A checkpoint is first verified against its manifest.

    Raises:
        CheckpointError: the path contains no usable weights, or a file is damaged; the message contains its path.
    """
    path = resolve_run(ckpt)
    if (path / "checkpoints").is_dir():
        steps = (store := CheckpointStore(path / "checkpoints")).folders()
        if not steps:
            raise CheckpointError(f"{key}={ckpt}: the run has no complete checkpoint; choose another run.")
        path = store.path(steps[-1])
    checkpoint = find_checkpoint(path)
    if (path / POLICY_FOLDER).is_dir():
        checkpoint, path = path, path / POLICY_FOLDER
    if checkpoint is not None:
        CheckpointStore(checkpoint.parent).verify(checkpoint)
        return path
    if (path / "config.json").is_file():
        # A policy without an index may store its adapter in a subfolder.
        if (problem := find_missing_weights(path)) and not any(path.glob("*/*.safetensors")):
            raise CheckpointError(f"{key}={ckpt}: {problem}")
        return path
    raise CheckpointError(
        f"{key}={ckpt}: {path} is neither a run, a checkpoint (runs/<id>/checkpoints/step_...), nor a folder "
        "with config.json. `embodyrl list runs` shows all runs."
    )
