"""Search for run folders by path, name, experiment or age."""

from pathlib import Path

from embodyrl.config.compose import flatten
from embodyrl.config.plain_yaml import read_plain_yaml
from embodyrl.errors import ConfigError
from embodyrl.registry import closest

NEWEST = "newest"
"""Value of `--resume` without an argument."""


def run_folders(output_dir: Path) -> list[Path]:
    """Return the run folders in an output folder, newest first."""
    files = sorted(output_dir.glob("*/config.yaml"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [file.parent for file in files]


def find_experiment_run(output_dir: Path, experiment_name: str) -> Path | None:
    """Return the folder of the newest training run of an experiment; None if the experiment has no training run."""
    for folder in run_folders(output_dir):
        saved = flatten(read_plain_yaml(folder / "config.yaml"))
        # An evaluation also has a run folder, but no training state to resume.
        if saved.get("runner.experiment_name") == experiment_name and (folder / "checkpoints").is_dir():
            return folder
    return None


def find_newest_run(command: str, *, is_training: bool | None = None) -> Path:
    """Return the folder of the newest run in ./runs.

    Args:
        command: command line for the error message.
        is_training: True: only training runs, False: only evaluations, None: both.

    Raises:
        ConfigError: ./runs contains no such run.
    """
    for folder in run_folders(Path("runs")):
        if is_training is None or (folder / "checkpoints").is_dir() == is_training:
            return folder
    raise ConfigError(f"{command}: ./runs contains no matching run. Pass a run folder, or start a run: embodyrl train.")


def find_run(run: str) -> Path:
    """Return the run folder for a path, or for the name of a run in ./runs.

    Raises:
        ConfigError: the run does not exist.
    """
    for path in (Path(run), Path("runs") / run):
        if (path / "config.yaml").is_file():
            return path
    run_names = [path.name for path in run_folders(Path("runs"))]
    hint = closest(Path(run).name, run_names) or " `embodyrl list runs` shows the runs in ./runs."
    raise ConfigError(f"'{run}' is not a run: config.yaml is missing.{hint}")
