"""The verifier: weights, components, penalties, and reward functions that fail or hang."""

import os
import signal
import time
from pathlib import Path

import pytest
from processes import wait_until

from embodyrl.envs.text.protocol import Answer
from embodyrl.envs.text.reward_runner import build_reward_runner, compute_overlong_penalty, find_reward_problems
from embodyrl.text.rewards.settings import TextRewardSettings


def two_parts(prompt: str, response: str, reference: str) -> dict[str, float]:
    return {"right": float(response == reference), "short": float(len(response) < 4)}


two_parts.components = ("right", "short")  # type: ignore[attr-defined]


def moody(prompt: str, response: str, reference: str) -> float:
    if response == "raise":
        raise RuntimeError("bad mood")
    while response == "hang":
        time.sleep(0.01)
    if response == "die":
        os._exit(3)
    if response.startswith("begin "):
        Path(response[6:]).touch()
        time.sleep(0.5)
    return {"nan": float("nan"), "infinite": float("inf")}.get(response, 1.0)


def ask(response: str, *, reference: str = "abc", tokens: int = 3) -> Answer:
    return Answer(prompt="?", response=response, reference=reference, tokens=tokens)


def test_reward_is_the_weighted_sum_of_components():
    judge = build_reward_runner(TextRewardSettings(name="exact", weights={"exact": 0.5, "overlap": 2.0}), 8)
    try:
        right, wrong = judge([ask("abc"), ask("abd")])
    finally:
        judge.close()
    assert judge.components == ("exact", "overlap", "errors")
    assert (right.reward, right.success, right.components) == (2.5, True, (1.0, 1.0, 0.0))
    assert (wrong.reward, wrong.success) == (pytest.approx(2.0 * 3 / 4), False)


def test_reward_function_can_return_named_components():
    judge = build_reward_runner(TextRewardSettings(path="test_judge:two_parts", weights={"short": 0.1}, workers=2), 8)
    try:
        found = judge([ask("abc"), ask("abcd"), ask("ab")])
    finally:
        judge.close()
    assert judge.components == ("right", "short", "errors")
    assert [f.reward for f in found] == pytest.approx([1.1, 0.0, 0.1])


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"test_judge:two_parts": 0.5}, (0.5, 0.5, 0.0)),
        ({"test_judge:two_parts": 0.5, "short": 0.1}, (0.5, 0.1, 0.0)),
    ],
)
def test_weight_of_a_reward_function_applies_to_its_components(weights, expected):
    judge = build_reward_runner(TextRewardSettings(path="test_judge:two_parts", weights=weights), 8)
    assert judge.weights == expected


def test_failing_reward_affects_one_reply_and_is_counted():
    judge = build_reward_runner(TextRewardSettings(path="test_judge:moody", timeout_s=0.5), 8)
    try:
        found = judge([ask("fine"), ask("raise"), ask("hang"), ask("fine")])
        again = judge([ask("fine")])
    finally:
        judge.close()
    assert [f.components for f in found] == [(1.0, 0.0), (0.0, 1.0), (0.0, 1.0), (1.0, 0.0)]
    assert [f.problem for f in found] == [None, "RuntimeError: bad mood", "no result within 0.5 s", None]
    assert again[0].success


def test_non_finite_reward_counts_as_an_error():
    judge = build_reward_runner(TextRewardSettings(path="test_judge:moody"), 8)
    try:
        found = judge([ask("nan"), ask("infinite"), ask("die"), ask("fine")])
    finally:
        judge.close()
    assert [(f.reward, f.success, f.components) for f in found[:3]] == [(0.0, False, (0.0, 1.0))] * 3
    assert ["nan" in str(found[0].problem), "inf" in str(found[1].problem)] == [True, True]
    assert (found[2].problem, found[3].reward) == ("the reward process exited with code 3", 1.0)


@pytest.mark.integration
def test_killed_verifier_process_is_replaced():
    judge = build_reward_runner(TextRewardSettings(path="test_judge:moody", workers=2), 8)
    try:
        judge([ask("fine"), ask("fine")])
        for _ in range(4):
            for child in [int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]:
                if b"rewards.child" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(child, signal.SIGKILL)
                    state = Path(f"/proc/{child}/stat")  # a zombie has closed its pipes, one that is dying has not
                    assert wait_until(lambda path=state: path.read_text().rpartition(")")[2].split()[0] == "Z", 10)
            found = judge([ask("fine"), ask("fine"), ask("fine")])
            assert [(f.reward, f.problem) for f in found] == [(1.0, None)] * 3
    finally:
        judge.close()


@pytest.mark.integration
def test_suspended_time_does_not_count_towards_the_reward_timeout(tmp_path: Path):
    """As with Ctrl-Z and fg: verifier and reward process are stopped for longer than the time limit of a reply."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        judge = build_reward_runner(TextRewardSettings(path="test_judge:moody", timeout_s=1.0), 8)
        found = judge([ask(f"begin {tmp_path / 'begun'}"), ask("hang"), ask("fine")])
        judge.close()
        os._exit([f.problem for f in found] != [None, "no result within 1 s", None])
    assert wait_until((tmp_path / "begun").exists, 60)
    os.killpg(pid, signal.SIGSTOP)
    time.sleep(2.5)  # the fault itself
    os.killpg(pid, signal.SIGCONT)
    assert os.waitpid(pid, 0)[1] == 0


def test_overlong_replies_are_penalized():
    """Reference values of the penalty at lengths 5, 6, 7, 9, 10, 12 with limit 10 and buffer 4."""
    lengths = (5, 6, 7, 9, 10, 12)
    found = [compute_overlong_penalty(n, limit=10, buffer=4, factor=1.0) for n in lengths]
    assert found == pytest.approx([0, 0, -0.25, -0.75, -1, -1.5])
    judge = build_reward_runner(TextRewardSettings(name="exact", overlong_buffer=4), 10)
    try:
        (found,) = judge([ask("abc", tokens=9)])
    finally:
        judge.close()
    assert found.components == (1.0, -0.75, 0.0)
    assert found.reward == pytest.approx(0.25)


def test_reward_settings_errors_contain_a_fix():
    assert "are not set" in find_reward_problems(TextRewardSettings())[0]
    assert "Did you mean 'exact'?" in find_reward_problems(TextRewardSettings(name="exakt"))[0]
    assert "reward.weights" in find_reward_problems(TextRewardSettings(name="exact", weights={"nothing": 1.0}))[0]
    assert find_reward_problems(TextRewardSettings(name="math", weights={"format": 0.2})) == []
