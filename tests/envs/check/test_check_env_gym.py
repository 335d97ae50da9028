"""`check-env` on Gymnasium environments: valid environments pass, and reports of invalid environments contain a fix."""

from __future__ import annotations

import json
import re
from pathlib import Path

import foreign_envs
import pytest

from embodyrl.cli.main import main
from embodyrl.envs import ENVS
from embodyrl.envs.check import CHECKS, Finding, check_env, check_env_in_subprocess
from embodyrl.envs.protocol import EnvContext
from embodyrl.errors import MissingDependencyError, UnknownNameError
from embodyrl.plan.config import load_config

pytestmark = pytest.mark.integration

slow = pytest.mark.slow


def look(*words: str, apart: bool = False, timeout_s: float = 60.0) -> list[Finding]:
    cfg = load_config("check-env", ["env=gym", *words]).env
    found = list((check_env_in_subprocess if apart else check_env)(cfg, timeout_s=timeout_s))
    assert [finding.check for finding in found] == list(CHECKS)
    return found


def place(name: str) -> str:
    foreign = name in vars(foreign_envs) and name != "Plain"
    return f"env.id={'foreign_envs' if foreign else 'odd_envs'}:{name}"


def failures(found: list[Finding]) -> list[str]:
    return [f"{f.check}: {v}" for f in found if f.level == "FAIL" for v in f.violations]


EXPECTED_WARNINGS = {
    "FixedStart": ["reset_ids_differ"],
    "TupleObs": [],
    "ListObs": [],
    "ArrayReward": [],
    "Endless": [],
    "HalfOpen": [],
    "OneStep": [],
    "GreyStack": [],
    "ArraysOfOne": [],
    "Switches": [],
    "WholeNumbers": [],
    "OutsideItsSpace": ["spec"],
    "FloatPicture": ["spec"],
    "ShakesItsAction": [],
    "OneArray": [],
    "Words": [],
    "Missions": [],
    "RedPicture": ["spec"],
    "Rgba": ["spec"],
    "RgbaFirst": ["spec"],
    "TrueStack": [],
    "LateSuccess": [],
    "SimilarKey": ["spec"],
    "AlmostTheSame": ["reset_repeats", "repeatable", "independent_envs"],
    "Stamp": ["spec"],
    "FarAway": ["spec", "reset_ids_differ"],
    "Depth": ["spec"],
    "TwoCameras": [],
    "make_env": [],
    "make_suites": ["spec"],
    "make_single": [],
}
"""Checks that warn, by environment name."""
CHEAP = (
    "FixedStart",
    "HalfOpen",
    "TupleObs",
    "Switches",
    "FloatPicture",
    "Missions",
    "AlmostTheSame",
    "make_env",
    "SeesNothing",
    "TwoRewards",
    "OldClass",
    "NanForOneStep",
    "NanPicture",
    "OldReset",
    "NanLater",
    "Agents",
    "forgets_to_return",
    "NoEnd",
    "SaysNo",
)


@pytest.mark.parametrize("name", [n if n in CHEAP else pytest.param(n, marks=slow) for n in EXPECTED_WARNINGS])
def test_unusual_valid_environments_pass(name):
    found = look(place(name))
    assert not failures(found)
    assert [f.check for f in found if f.level == "warn"] == EXPECTED_WARNINGS[name]
    assert "skip" not in {f.level for f in found}


@pytest.mark.parametrize(
    ("name", "level", "said"), [("Walk", "ok", "7 rewards"), ("Drifts", "warn", "reward of step 4")]
)
def test_goal_interface_must_match_step_rewards(name, level, said):
    """Mutants: the goal is compared with the observation before the step, or only the first step is compared."""
    found = {f.check: f for f in look(f"env.id=goal_env:{name}")}
    assert [f.check for f in found.values() if f.level == "FAIL"] == []
    assert found["goals"].level == level
    assert said in f"{found['goals'].note} {found['goals'].violations}"


ILLEGAL = {
    "OldReset": ("spec", "reset returned one ndarray.*before Gymnasium 0.26. Fix: "),
    "OldSeed": ("spec", "reset does not accept a seed. This is the API before.*Fix: "),
    "OldStep": ("spec", "step returned 4 values.*before Gymnasium 0.26. Fix: "),
    "NothingStepped": ("spec", "step returned nothing, expected \\(observation, reward, terminated"),
    "NoReward": ("spec", "the reward None, expected a number"),
    "NanAtSomeStarts": ("reset_ids_differ", "state\\[0\\]: expected a finite number, found nan"),
    "NanLater": ("flags", "state\\[0\\]: expected a finite number, found nan"),
    "RaisesLater": ("lasts", "RuntimeError: the arm fell off \\(odd_envs.py:"),
    "SleepsLater": ("lasts", "did not finish within 8 s"),
    "WrongShape": ("spec", "returned shape \\(3,\\).*its observation space declares \\(2,\\)"),
    "NoSpaces": ("spec", "observation_space is None.*Fix: set self.observation_space"),
    "NotSeeded": ("reset_repeats", "fix: use only generators that the reset seeds"),
    "FailsToBuild": ("spec", "AttributeError: no licence"),
    "NoEnv": ("spec", "odd_envs.NoEnv, which is not a Gymnasium environment. Fix: derive it from gymnasium.Env"),
    "Agents": ("spec", "PettingZoo.*several agents.*Fix: "),
    "forgets_to_return": ("spec", "the function returned None. Fix: end the function with `return env`"),
    "NoInfo": ("spec", "bool, NoneType.*Fix: return info={} if there is no information"),
    "NoInfoAtFirst": ("spec", "ndarray, NoneType.*Fix: return info={} if there is no information"),
    "TwoEnds": ("spec", "array\\(.*for terminated, expected True or False. Fix: "),
    "NoEnd": ("spec", "None for truncated, expected True or False. Fix: "),
    "SaysNo": ("step", "'no' for success in info, expected True or False. Fix: "),
    "SeesWords": ("reset_repeats", "returned array.*'left'.* in 'observation', expected real numbers"),
    "OneWorldForAll": ("independent_envs", "states differ"),
    "ResetsOnce": ("reset", "RuntimeError: already running \\(odd_envs.py:"),
    "SeesNothing": ("spec", "has neither numbers nor images.*Fix: add observations"),
    "TwoRewards": ("spec", "the reward array.*expected a number. Fix: .*TransformReward"),
    "OldClass": ("spec", "not a Gymnasium environment.*API before Gymnasium 0.26. Fix: "),
    "NanForOneStep": ("lasts", "state\\[0\\]: expected a finite number, found nan"),
    "NanPicture": ("lasts", "expected finite numbers"),
    "Crossed": ("spec", "resets all environments together.*Fix: "),
}


@pytest.mark.parametrize("name", [n if n in CHEAP else pytest.param(n, marks=slow) for n in ILLEGAL])
def test_invalid_environment_report_contains_a_fix(name):
    check, said = ILLEGAL[name]
    first = failures(look(place(name), timeout_s=8.0 if name == "SleepsLater" else 60.0))[0]
    assert first.startswith(f"{check}: ")
    assert re.search(said, first), first


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("CrashesLater", "killed by SIGSEGV"),
        pytest.param("ExitsLater", "exited with code 7", marks=slow),
        pytest.param("LocksLater", "the check hangs where Python cannot interrupt it,", marks=slow),
    ],
)
def test_environment_that_kills_its_process_is_reported(name, said):
    found = look(place(name), apart=True, timeout_s=8.0)
    assert [f.split(":")[0] for f in failures(found)] == ["lasts"]
    assert said in failures(found)[0]
    assert {f.level for f in found[-5:]} == {"skip"}


def test_json_is_valid_if_the_environment_prints(capfd):
    assert main(["check-env", "env=gym", "env.id=odd_envs:Chatty", "--json"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["failed"] == 0
    assert "from below Python" in printed.err


MINIGRID = "env.wrappers=[minigrid.wrappers:ImgObsWrapper]"
REAL = """CartPole-v1
Pendulum-v1
Acrobot-v1
MountainCar-v0
MountainCarContinuous-v0
FrozenLake-v1
FrozenLake8x8-v1
Taxi-v4
CliffWalking-v1
Blackjack-v1
LunarLander-v3
LunarLanderContinuous-v3
BipedalWalker-v3
CarRacing-v3
Hopper-v5
HalfCheetah-v5
Ant-v5
Humanoid-v5
InvertedPendulum-v5
InvertedDoublePendulum-v5
Reacher-v5
Pusher-v5
Swimmer-v5
Walker2d-v5
minigrid:MiniGrid-Empty-5x5-v0
minigrid:MiniGrid-DoorKey-5x5-v0
ale_py:ALE/Pong-v5
ale_py:ALE/Breakout-v5
metaworld:Meta-World/MT1
gymnasium_robotics:FetchReach-v4
gymnasium_robotics:PointMaze_UMaze-v3
gymnasium_robotics:AdroitHandDoor-v1
gym_pusht:gym_pusht/PushT-v0
highway_env:parking-v0
panda_gym:PandaReach-v3
minatar.gym:MinAtar/Breakout-v1""".splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("env_id", REAL)
def test_installed_gymnasium_environments_pass(env_id):
    words = [f"env.id={env_id}"]
    words += [MINIGRID] if env_id.startswith("minigrid") else []
    # Without a seed its constructor samples other tasks in every environment.
    words += ["env.kwargs.env_name=reach-v3", "env.kwargs.seed=1"] if "MT1" in env_id else []
    cfg = load_config("check-env", ["env=gym", *words]).env
    try:
        ENVS.get("gym").spec(cfg, EnvContext(renders_images=False))
    except (MissingDependencyError, UnknownNameError) as error:
        pytest.skip(str(error))
    assert not failures(look(*words, apart=True))


def test_threads_and_processes_left_after_close_are_reported():
    found = {f.check: f for f in look("env.id=foreign_envs:LeavesThreads", apart=True)}
    assert found["close"].level == "warn"
    assert re.search(r"thread motor.*process (\d+) \(sleep 1000\)", str(found["close"].violations[0]))
    ended = re.findall(r"process (\d+)", str(found["close"].violations[0]))
    assert not [pid for pid in ended if Path("/proc", pid).exists()]


@pytest.mark.parametrize(
    ("name", "said"), [("RendersNothing", "render() returned None"), ("RendersChannelsFirst", "(3, 4, 6)")]
)
def test_unusable_frames_give_a_warning(name, said):
    found = {f.check: f for f in look(f"env.id=odd_envs:{name}")}
    assert found["render"].level == "warn"
    assert said in str(found["render"].violations[0])
