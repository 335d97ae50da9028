"""Compare simulators with their usual loops: chunks per second, resets, memory per environment.

    pip install stable-baselines3; python benchmarks/simulators.py --json simulators.json
    python benchmarks/simulators.py --parts maniskill --turns 1

LIBERO: the usual loop is the benchmark's own OffScreenRenderEnv, which renders its cameras at every sub-step, is
rebuilt at each reset and then settles for 15 rendered steps. ManiSkill: the registered environment, which renders at
every step. Candidates run one after another, each in a separate process with one thread; results are per second of CPU
time, which other programs hardly affect, and memory is the unique set size (USS).

Cheap environments: steps per second of CPU time of all processes together, environments spread over as many worker
processes as there are cores (ours) or one process each (gymnasium's AsyncVectorEnv with shared memory,
Stable-Baselines3's SubprocVecEnv). Candidates alternate; a result is the best of several turns. The side of embodyrl is
the path of a rollout: requests, workers, the arena.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "LP_NUM_THREADS")}
os.environ.setdefault("MUJOCO_GL", "osmesa")

import gymnasium
import numpy as np
import psutil

from embodyrl.files import available_cores

CHUNK = 8
PIXELS = 224
SUITE, TASK = "libero_spatial", 0
LIBERO_CAMERAS = ("agentview", "robot0_eye_in_hand")
SETTLE_STEPS = 15
SLOTS = 4
"""Number of environments per process of embodyrl."""
MANISKILL_PIXELS = 128
CORES = available_cores()


# --- measuring ------------------------------------------------------------------------------------------------------


def per_second(step: Callable[[], Any], seconds: float) -> float:
    """Return the calls per second of CPU time, after a warm-up call."""
    step()
    count, start = 0, time.process_time()
    while (spent := time.process_time() - start) < seconds or count < 3:
        step()
        count += 1
    return count / spent


def cpu_of_all() -> float:
    """Return the CPU seconds of this process and its children."""
    me = psutil.Process()
    # The kernel's own account, ns: the one in clock ticks loses up to 10 ms for each of 64 processes.
    threads = [f for p in (me, *me.children(recursive=True)) for f in Path(f"/proc/{p.pid}/task").glob("*/schedstat")]
    return sum(int(f.read_text().split()[0]) for f in threads) / 1e9


def own_memory() -> float:
    """Return the memory that this process does not share, in MB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def apart(call: Callable[..., dict[str, float]], *args: Any) -> dict[str, float]:
    """Run a measurement in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(call, *args).result(timeout=1800)


def row(
    what: str, unit: str, ours: float, against: str, theirs: float, *, goal: float | None, less: bool = False
) -> dict:
    ratio = (theirs / ours) if less else (ours / theirs)
    print(
        f"{what:52} {ours:10.2f} {unit:14} {against:34} {theirs:10.2f}  {ratio:7.2f}x  goal {goal or '-'}", flush=True
    )
    return {
        "what": what, "unit": unit, "ours": round(ours, 4), "against": against, "theirs": round(theirs, 4),
        "ratio": round(ratio, 3), "goal": goal,
    }  # fmt: skip


# --- LIBERO ---------------------------------------------------------------------------------------------------------


def libero_files() -> tuple[Path, Any]:
    from embodyrl.envs.libero import install

    install.prepare_process()
    entry = install.get_suite_tasks(SUITE)[TASK]
    path = install.get_libero_path("bddl_files") / entry.problem_folder / entry.bddl_file
    return path, install.load_init_states(SUITE, TASK)


def actions(rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(-0.3, 0.3, (CHUNK, 7)).astype(np.float32)


def libero_stock(cameras: tuple[str, ...], seconds: float) -> dict[str, float]:
    """Measure one environment of LIBERO, as in each process of its SubprocVectorEnv."""
    path, states = libero_files()
    from libero.libero.envs import OffScreenRenderEnv

    env: Any = OffScreenRenderEnv(
        bddl_file_name=str(path), camera_heights=PIXELS, camera_widths=PIXELS, camera_names=list(cameras)
    )
    rng = np.random.default_rng(0)

    def reset() -> None:
        env.reset()
        env.set_init_state(states[0])
        for _ in range(SETTLE_STEPS):
            env.step([0, 0, 0, 0, 0, 0, -1])

    def chunk() -> None:
        for action in actions(rng):
            env.step(action)

    resets = per_second(reset, 0.5)
    reset()
    return {"chunks": per_second(chunk, seconds), "resets": resets, "memory": own_memory()}


def libero_ours(cameras: tuple[str, ...], profile: str, fast: bool, seconds: float) -> dict[str, float]:
    from embodyrl.envs.libero.factory import LiberoSettings
    from embodyrl.envs.settings import InitParams, RenderProfile

    cfg = LiberoSettings(
        env_type="libero", task_suite_name=SUITE, render_profile=RenderProfile(profile), fast_physics=fast,
        init_params=InitParams(camera_heights=PIXELS, camera_widths=PIXELS, camera_names=list(cameras)),
    )  # fmt: skip
    return ours(cfg, seconds)


def ours(cfg: Any, seconds: float, chunk_length: int = CHUNK) -> dict[str, float]:
    """Measure environments in one process: a chunk and one observation at its end."""
    from embodyrl.envs import ENVS
    from embodyrl.envs.protocol import EnvContext
    from embodyrl.types import EpisodeStart, ObservationOut

    env = ENVS.get(cfg.env_type).make(cfg, EnvContext(num_envs=SLOTS))
    spec = env.spec
    out = ObservationOut(
        images=np.zeros((len(spec.cameras.names), *spec.cameras.size, 3), np.uint8),
        state=np.zeros(spec.state_dim, np.float32),
    )
    start = EpisodeStart(reset_id=0, seed=0, max_episode_steps=10**6, ignore_terminations=True)
    rng = np.random.default_rng(0)

    def reset() -> None:
        env.reset([0], [start])
        env.observe([0], out.images[None], out.state[None])

    def chunk() -> None:
        env.step_chunk([0], actions(rng)[None, :chunk_length])
        env.observe([0], out.images[None], out.state[None])

    env.reset(list(range(SLOTS)), [start] * SLOTS)
    resets = per_second(reset, 0.5)
    return {"chunks": per_second(chunk, seconds), "resets": resets, "memory": own_memory() / SLOTS}


def libero_physics(seconds: float) -> dict[str, float]:
    """Measure the limit: only MuJoCo's own steps."""
    import mujoco

    from embodyrl.envs.libero.simulator import TaskSimulator

    path, states = libero_files()
    sim: Any = TaskSimulator(path)
    sim.reset(states[0], 0)
    model, data = sim._model, sim._data
    return {"chunks": per_second(lambda: mujoco.mj_step(model, data, nstep=25 * CHUNK), seconds)}


def libero(seconds: float) -> Iterator[dict]:
    lean_fast: dict[str, float] = {}
    for cameras in (LIBERO_CAMERAS[:1], LIBERO_CAMERAS):
        eyes = f"{len(cameras)} camera{'s' * (len(cameras) - 1)} {PIXELS}"
        theirs = apart(libero_stock, cameras, seconds)
        for name, profile, fast, goal in (
            ("full", "full", False, 5),
            ("lean", "lean", False, None),
            ("lean + fast", "lean", True, 20),
        ):
            found = apart(libero_ours, cameras, profile, fast, seconds)
            against = "OffScreenRenderEnv, every sub-step"
            yield row(f"LIBERO {name}, {eyes}", "chunks/CPU-s", found["chunks"], against, theirs["chunks"], goal=goal)
            yield row(
                f"LIBERO {name} reset, {eyes}",
                "resets/CPU-s",
                found["resets"],
                "rebuild + 15 drawn steps",
                theirs["resets"],
                goal=10,
            )
            yield row(
                f"LIBERO {name} memory, {eyes}",
                "MB per env",
                found["memory"],
                "a process each",
                theirs["memory"],
                goal=2,
                less=True,
            )
            lean_fast = found
    limit = apart(libero_physics, seconds)
    yield row(
        f"LIBERO lean + fast, {eyes}", "chunks/CPU-s", lean_fast["chunks"], "mj_step alone", limit["chunks"], goal=None
    )


# --- ManiSkill ------------------------------------------------------------------------------------------------------


def maniskill_stock(env_id: str, seconds: float) -> dict[str, float]:
    import mani_skill.envs  # noqa: F401
    import torch

    torch.set_num_threads(1)
    size = {"width": MANISKILL_PIXELS, "height": MANISKILL_PIXELS}
    env: Any = gymnasium.make(
        env_id, obs_mode="rgb", render_backend="cpu", sim_backend="cpu", control_mode="pd_ee_delta_pose",
        sensor_configs={**size, "shader_pack": "minimal"}, max_episode_steps=10**6,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    env.reset(seed=0)

    def chunk() -> None:
        for action in actions(rng):
            env.step(action)

    resets = per_second(lambda: env.reset(seed=0), 0.3)
    return {"chunks": per_second(chunk, seconds), "resets": resets, "memory": own_memory()}


def maniskill_ours(env_id: str, profile: str, length: int, seconds: float) -> dict[str, float]:
    import torch

    from embodyrl.envs.maniskill.settings import ManiSkillSettings
    from embodyrl.envs.settings import InitParams, RenderProfile

    torch.set_num_threads(1)
    cameras = InitParams(camera_heights=MANISKILL_PIXELS, camera_widths=MANISKILL_PIXELS, camera_names=["base_camera"])
    cfg = ManiSkillSettings(
        env_type="maniskill", id=env_id, control_mode="pd_ee_delta_pose", render_profile=RenderProfile(profile),
        init_params=cameras,
    )  # fmt: skip
    return ours(cfg, seconds, length)


def maniskill(seconds: float) -> Iterator[dict]:
    for env_id in ("PickCube-v1", "PushCube-v1"):
        theirs = apart(maniskill_stock, env_id, seconds)
        for profile, goal in (("full", None), ("lean", 3)):
            for length in (CHUNK, 1):
                found = apart(maniskill_ours, env_id, profile, length, seconds)
                what = f"ManiSkill {env_id} rgb {MANISKILL_PIXELS}, {profile}, chunks of {length}"
                mine, stock = found["chunks"] * length, theirs["chunks"] * CHUNK
                yield row(what, "steps/CPU-s", mine, "stock, every step drawn", stock, goal=goal)
        yield row(
            f"ManiSkill {env_id} lean memory",
            "MB per env",
            found["memory"],
            "a process each",
            theirs["memory"],
            goal=2,
            less=True,
        )


# --- cheap environments ---------------------------------------------------------------------------------------------


def cheap(seconds: float, turns: int) -> Iterator[dict]:
    # The memory of the other parts is without these modules.
    from vectors import CHEAP, OurVector, async_vector, subproc_vector

    makers: dict[str, Callable[[str, int], Any]] = {
        "ours": OurVector, "AsyncVectorEnv": async_vector, "SubprocVecEnv": subproc_vector,
    }  # fmt: skip
    for name in CHEAP:
        for count in (8, 64):
            best = dict.fromkeys(makers, 0.0)
            for _ in range(turns):
                for maker, make in makers.items():
                    vector = make(name, count)
                    vector.step()
                    steps, start = 0, cpu_of_all()
                    while (spent := cpu_of_all() - start) < seconds:
                        for _ in range(10):
                            vector.step()
                        steps += 10 * count
                    best[maker] = max(best[maker], steps / spent)
                    vector.close()
            for peer in ("AsyncVectorEnv", "SubprocVecEnv"):
                goal = 1.5 if count == 64 and name != "2 ms of work" else 0.95
                yield row(f"{name}, {count} envs", "steps/CPU-s", best["ours"], peer, best[peer], goal=goal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--parts", nargs="+", choices=("libero", "maniskill", "cheap"), default=["libero", "maniskill", "cheap"]
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="CPU seconds per result")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    # Workers import the environments of `vectors` by its name.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    parts: dict[str, Callable[[], Iterator[dict]]] = {
        "cheap": lambda: cheap(args.seconds / 2, args.turns),
        "libero": lambda: libero(args.seconds),
        "maniskill": lambda: maniskill(args.seconds),
    }
    rows = [found for name, part in parts.items() if name in args.parts for found in part()]
    if args.json:
        machine = {
            "platform": platform.platform(), "cores": CORES, "python": platform.python_version(),
            "numpy": np.__version__, "load": os.getloadavg()[0],
        }  # fmt: skip
        args.json.write_text(json.dumps({"rows": rows, "machine": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
