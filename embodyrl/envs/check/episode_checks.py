"""Checks of `check-env` that run episodes."""

import time
from dataclasses import replace
from typing import cast

import numpy as np

from embodyrl.envs.check.harness import (
    CHUNK_LENGTH,
    MAX_STEPS,
    NUM_ENVS,
    Harness,
    Trace,
    check,
    describe_observation_difference,
)
from embodyrl.envs.protocol import GoalFactory, instruction_for
from embodyrl.envs.settings import EnvSettings
from embodyrl.types import BoolArray, ChunkResult, EpisodeStart

SHORT_EPISODE_STEPS = 5
"""Length of the episode that tests the time limit, in env steps; not a multiple of SHORT_CHUNK_LENGTH."""
SHORT_CHUNK_LENGTH = 3
SEARCH_STEPS = 64
"""Maximum number of env steps with random actions to find an episode that terminates."""
ENDURANCE_STEPS = 1000
ENDURANCE_CHUNK_LENGTH = 25
SINGLE_STEPS = 200
ENDURANCE_SECONDS = 10.0
"""Time limit of the check `lasts`, in seconds."""


@check("spec")
def make(harness: Harness) -> None:
    """Check that `make` builds the environment described by `spec`."""
    started = time.perf_counter()
    env = harness.env
    harness.note = f"{NUM_ENVS} environments in {time.perf_counter() - started:.1f} s"
    harness.expect(env.spec == harness.spec, "env.spec", "the factory's spec", f"{env.spec}"[:120])
    harness.expect(
        env.task_limit is None or env.task_limit >= 1, "env.task_limit", "None or at least 1", env.task_limit
    )


@check("make")
def reset(harness: Harness) -> None:
    """Check that `reset` accepts several reset ids of each tested task."""
    seconds = []
    for reset_id in (reset_id for task in harness.get_tasks() for reset_id in harness.get_reset_ids(task)):
        started = time.perf_counter()
        harness.env.reset([0], [harness.make_start(reset_id)])
        seconds.append(time.perf_counter() - started)
    harness.note = f"{len(seconds)} resets, median {1000 * float(np.median(seconds)):.1f} ms"


@check("reset")
def observe(harness: Harness) -> None:
    """Check that all pixels and states are written and finite, and that observing twice gives equal values."""
    harness.env.reset([0], [harness.make_first_start()])
    # Observe twice, over black and over white: a pixel that is not written keeps both values.
    black, white = harness.observe(0, fill=0), harness.observe(0, fill=255)
    unwritten = (black.images == 0) & (white.images == 255)
    for camera, name in enumerate(harness.spec.cameras.names):
        num_unwritten = int(unwritten[camera].any(axis=-1).sum())
        expected = "every pixel written, in place (out.images[...] = ...)"
        harness.expect(
            not num_unwritten,
            f"observe: image of camera '{name}'",
            expected,
            f"{num_unwritten} pixels were not written",
        )
    if not harness.violations:
        difference = describe_observation_difference(black, white)
        harness.expect(difference is None, "observe", "the same in two calls without a step", difference)


@check("reset")
def instruction(harness: Harness) -> None:
    """Check that the instruction is the declared one, or, if the environment sets it, constant in an episode."""
    for task in harness.get_tasks():
        first = harness.make_start(harness.get_reset_ids(task)[0])
        harness.env.reset([0], [first])
        text, expected = harness.env.instruction(0), instruction_for(harness.spec, first.reset_id)
        if not harness.spec.text.prompt_bytes:
            harness.expect(text == expected, "instruction", f"spec.tasks[{task}], {expected!r}", repr(text))
            continue
        size = len(text.encode("utf-8", errors="replace"))
        harness.expect(bool(text.strip()), "instruction", "a text", repr(text))
        harness.expect(
            size <= harness.spec.text.prompt_bytes,
            "instruction",
            f"at most {harness.spec.text.prompt_bytes} bytes",
            size,
        )
        harness.run_episode(0, first, harness.sample_actions(CHUNK_LENGTH))
        later_text = harness.env.instruction(0)
        harness.expect(
            later_text == text, "instruction", f"the same in all steps of an episode, {text!r}", repr(later_text)
        )
    harness.note = (
        repr(harness.env.instruction(0))
        if harness.spec.text.instructed
        else "none: the name of the environment is used"
    )


@check("observe")
def reset_ids_differ(harness: Harness) -> None:
    """Warn if all tested reset ids of a task give the same first observation."""
    for task in harness.get_tasks():
        ids = harness.get_reset_ids(task)
        first, *others = (harness.get_first_observation(harness.make_start(reset_id)) for reset_id in ids)
        differ = not others or any(describe_observation_difference(first, other) for other in others)
        problem = "equal first observations for all reset ids"
        harness.warn_unless(differ, f"reset ids {ids} of task {task}", "different initial states", problem)


@check("observe")
def step(harness: Harness) -> None:
    """Check shapes, dtypes and finite rewards of a chunk's results, and the calls of `after_step`."""
    env_indices, called_envs = list(range(NUM_ENVS)), []
    harness.env.reset(env_indices, [harness.make_first_start()] * NUM_ENVS)
    actions = np.stack([harness.sample_actions(CHUNK_LENGTH)] * NUM_ENVS)
    result = harness.env.step_chunk(env_indices, actions, after_step=lambda env_index, _: called_envs.append(env_index))
    harness.expect_array("step_chunk: reward", result.reward, (NUM_ENVS, CHUNK_LENGTH), np.float32)
    for name in ("terminated", "truncated", "valid", "success"):
        harness.expect_array(f"step_chunk: {name}", getattr(result, name), (NUM_ENVS, CHUNK_LENGTH), np.bool_)
    if harness.violations:
        return
    finite = bool(np.isfinite(result.reward).all())
    harness.expect(finite, "step_chunk: reward", "finite numbers", result.reward.tolist())
    executed = [env_index for row, env_index in enumerate(env_indices) for _ in range(int(result.valid[row].sum()))]
    harness.expect(sorted(called_envs) == executed, "after_step", f"calls for environments {executed}", called_envs)


@check("step")
def reset_repeats(harness: Harness) -> None:
    """Check that reset id and seed determine the first observation, even after other episodes."""
    start = harness.make_first_start()
    first = harness.get_first_observation(start)
    for reset_id in harness.get_reset_ids(harness.get_tasks()[-1]):
        harness.run_episode(0, harness.make_start(reset_id), harness.sample_actions(CHUNK_LENGTH))
    expected = "the same first observation (fix: use only generators that the reset seeds)"
    harness.expect_same(first, harness.get_first_observation(start), f"reset {start.reset_id}", expected)
    task = harness.spec.task_of(start.reset_id)[0]
    if task not in harness.spec.seeded_tasks:
        expected_for_seeds = f"{expected}, or task {task} in EnvSpec.seeded_tasks"
        other = harness.get_first_observation(replace(start, seed=start.seed + 1))
        harness.expect_same(first, other, f"reset {start.reset_id} with another seed", expected_for_seeds)


@check("step")
def expert(harness: Harness) -> None:
    """Check that the expert solves at least one task in `spec.expert.tasks`, and raises an error in all other tasks."""
    expert_tasks = [task for task in harness.get_tasks() if task in harness.spec.expert.tasks]
    successes = 0
    for task in expert_tasks:
        trace = _play_expert(harness, harness.make_start(harness.get_reset_ids(task)[0], limit=harness.horizon))
        if harness.violations:
            return
        successes += trace.any("success")
        harness.expert_episode = harness.expert_episode or trace
        if trace.any("terminated"):
            harness.terminated_episode = harness.terminated_episode or trace
    actual = f"none within {harness.horizon} steps"
    must_succeed = bool(expert_tasks) and harness.spec.reward.reports_success
    harness.expect(not must_succeed or successes > 0, "expert_chunk", f"a success in tasks {expert_tasks}", actual)
    harness.note = f"{successes} of {len(expert_tasks)} episodes succeed" if expert_tasks else "none declared"
    for task in [i for i in harness.get_tasks() if i not in harness.spec.expert.tasks][:1]:
        harness.env.reset([0], [harness.make_start(harness.get_reset_ids(task)[0])])
        harness.expect_error(
            f"expert_chunk, task {task}",
            "EnvError: not declared",
            "an action",
            lambda: harness.env.expert_chunk([0], 1, noise=0.0),
        )


def _play_expert(harness: Harness, start: EpisodeStart) -> Trace:
    """Run the expert to the end of the episode, or to the first violation."""
    trace = Trace(start=start, actions=np.zeros((0, harness.spec.action.dim), np.float32))
    low, high = (np.asarray(bound, np.float32) for bound in harness.spec.action.bounds)
    harness.env.reset([0], [start])
    trace.observations.append(harness.observe(0))
    while not trace.any("done") and len(trace.results) * CHUNK_LENGTH < start.max_episode_steps:
        actions, result = harness.env.expert_chunk([0], CHUNK_LENGTH, noise=0.0)
        if not harness.expect_array(
            "expert_chunk: actions", actions, (1, CHUNK_LENGTH, harness.spec.action.dim), np.float32
        ):
            return trace
        outside = actions[~((low <= actions) & (actions <= high))].tolist()
        expected = f"numbers in {low.min():g}..{high.max():g}"
        if not harness.expect(not outside, "expert_chunk: actions", expected, next(iter(outside), None)):
            return trace
        trace.results.append(result)
        trace.observations.append(harness.observe(0))
        trace.actions = np.concatenate([trace.actions, actions[0, result.valid[0]]])
    return trace


@check("step")
def flags(harness: Harness) -> None:
    """Check that an episode is terminated or truncated, not both, and that no action after its end is executed."""
    traces = [_run_short_episode(harness)]
    harness.terminated_episode = harness.terminated_episode or _find_terminated_episode(harness)
    if harness.terminated_episode is not None:
        # One chunk that continues beyond the end: its later actions must not be executed.
        extended_actions = np.concatenate(
            [
                harness.terminated_episode.actions[: harness.terminated_episode.length],
                harness.sample_actions(CHUNK_LENGTH),
            ]
        )
        traces.append(
            harness.run_episode(0, harness.terminated_episode.start, extended_actions, chunk=len(extended_actions))
        )
    for result in (result for trace in traces for result in trace.results):
        _expect_one_end(harness, result)
    harness.note = (
        "terminated and truncated" if harness.terminated_episode else "truncated only: no episode ended by itself"
    )


def _run_short_episode(harness: Harness, *, ignore: bool = False) -> Trace:
    """Run random actions up to a time limit of `SHORT_EPISODE_STEPS`, or to an earlier end."""
    start = harness.make_first_start(limit=SHORT_EPISODE_STEPS, ignore=ignore)
    return harness.run_episode(0, start, harness.sample_actions(3 * SHORT_EPISODE_STEPS), chunk=SHORT_CHUNK_LENGTH)


def _expect_one_end(harness: Harness, result: ChunkResult) -> None:
    valid, done = result.valid[0], result.terminated[0] | result.truncated[0]
    has_both = bool((result.terminated & result.truncated).any())
    harness.expect(not has_both, "truncated", "false where terminated", _format_flags(result.truncated[0]))
    ends = np.flatnonzero(done)
    # The action that ends an episode was itself executed.
    num_valid = int(ends[0]) + 1 if len(ends) else len(valid)
    expected = np.arange(len(valid)) < num_valid
    harness.expect(
        np.array_equal(valid, expected), "valid", f"{_format_flags(expected)}, up to the end", _format_flags(valid)
    )
    harness.expect(len(ends) <= 1, "terminated, truncated", "one end per chunk", _format_flags(done))
    has_late_results = bool(result.reward[0, num_valid:].any() or result.success[0, num_valid:].any())
    harness.expect(not has_late_results, "reward, success", "0 after the end", result.reward[0].tolist())


def _format_flags(flags: BoolArray) -> str:
    return f"true at {np.flatnonzero(flags).tolist()} of {len(flags)}"


def _find_terminated_episode(harness: Harness) -> Trace | None:
    """Return an episode that terminates under random actions, or None."""
    ids = harness.get_reset_ids(harness.get_tasks()[0])
    traces = (
        harness.run_episode(
            0, harness.make_start(i, limit=harness.horizon), harness.sample_actions(SEARCH_STEPS, stream=i)
        )
        for i in ids
    )
    return next((trace for trace in traces if trace.any("terminated")), None)


@check("flags")
def time_limit(harness: Harness) -> None:
    """Check that episodes are truncated at `max_episode_steps`, even in the middle of a chunk."""
    trace = _run_short_episode(harness, ignore=True)
    truncated = trace.any("truncated")
    # Where the simulator may end the episode earlier, only the upper bound is checked.
    strict = trace.start.ignore_terminations and not harness.spec.simulator.may_truncate
    is_correct = (
        trace.any("done")
        and trace.length <= SHORT_EPISODE_STEPS
        and (not strict or (truncated and trace.length == SHORT_EPISODE_STEPS))
    )
    actual = f"{trace.length} steps, {'truncated' if truncated else 'not truncated'}"
    harness.expect(
        is_correct,
        f"episode with max_episode_steps={SHORT_EPISODE_STEPS}",
        f"{SHORT_EPISODE_STEPS} steps, truncated",
        actual,
    )


@check("time_limit")
def over(harness: Harness) -> None:
    """Check that a finished episode can be observed but not stepped."""
    _run_short_episode(harness, ignore=True)
    harness.observe(0)
    action = harness.sample_actions(1)[None]
    harness.expect_error(
        "step_chunk after the end", "EnvError", "another step", lambda: harness.env.step_chunk([0], action)
    )


@check("time_limit")
def ignore_terminations(harness: Harness) -> None:
    """Check that with `ignore_terminations`, an episode continues to its time limit."""
    if harness.terminated_episode is None or not harness.can_ignore_terminations:
        harness.note = (
            "not exercised: no episode ended by itself" if harness.can_ignore_terminations else "rejected by validate"
        )
        return
    steps = harness.terminated_episode.length
    start = harness.make_start(harness.terminated_episode.start.reset_id, limit=steps + CHUNK_LENGTH, ignore=True)
    trace = harness.run_episode(
        0, start, np.concatenate([harness.terminated_episode.actions[:steps], harness.sample_actions(2 * CHUNK_LENGTH)])
    )
    is_correct = not trace.any("terminated") and trace.length == steps + CHUNK_LENGTH
    expected, actual = f"{steps + CHUNK_LENGTH} steps, never terminated", f"{trace.length} steps"
    harness.expect(is_correct, "episode with ignore_terminations=true", expected, actual)


@check("time_limit")
def lasts(harness: Harness) -> None:
    """Find crashes, hangs and non-finite values in episodes with random actions in both environments.

    The first steps are observed one by one, because values may be non-finite only within a chunk.
    """
    started, num_steps, episodes, env_indices = time.perf_counter(), 0, 0, list(range(NUM_ENVS))
    ids = harness.spec.get_reset_ids(harness.get_tasks()[-1])

    def start_episode(env_index: int) -> None:
        harness.env.reset([env_index], [harness.make_start(ids[episodes % len(ids)], limit=harness.horizon)])

    for env_index in env_indices:
        start_episode(env_index)
        episodes += 1
    while num_steps < ENDURANCE_STEPS and time.perf_counter() - started < ENDURANCE_SECONDS and not harness.violations:
        length = 1 if num_steps < SINGLE_STEPS else ENDURANCE_CHUNK_LENGTH
        actions = harness.sample_actions(NUM_ENVS * length, stream=num_steps).reshape(NUM_ENVS, length, -1)
        result = harness.env.step_chunk(env_indices, actions)
        num_steps += int(result.valid.sum())
        for env_index in env_indices:
            harness.observe(env_index)
            if result.done[env_index]:
                start_episode(env_index)
                episodes += 1
    harness.note = f"{num_steps} steps in {episodes} episodes"


@check("reset_repeats", "step")
def repeatable(harness: Harness) -> None:
    """Check that reset id, seed and actions determine an episode bit for bit, even after other episodes."""
    start, actions = harness.make_first_start(), harness.sample_actions(MAX_STEPS)
    first = harness.run_episode(0, start, actions)
    for task in harness.get_tasks():
        harness.run_episode(
            0, harness.make_start(harness.get_reset_ids(task)[-1]), harness.sample_actions(MAX_STEPS, stream=1)
        )
    repeated = harness.run_episode(0, start, actions)
    harness.expect_repeat(first, repeated, f"episode of reset id {start.reset_id}", "the same again")


@check("repeatable")
def independent_envs(harness: Harness) -> None:
    """Check that an episode does not depend on its environment or on other environments."""
    # The time limit of `other` is longer, so that the other environment still runs when this episode ends.
    start, other = (
        harness.make_first_start(),
        harness.make_start(harness.get_reset_ids(harness.get_tasks()[0])[-1], limit=4 * MAX_STEPS, ignore=True),
    )
    actions = harness.sample_actions(MAX_STEPS)
    first = harness.run_episode(0, start, actions)
    harness.env.reset([1], [other])
    observation_before = harness.observe(1)
    repeated = harness.run_episode(0, start, actions)
    harness.expect_same(observation_before, harness.observe(1), "environment 1 while environment 0 runs", "unchanged")
    harness.env.reset([0], [other])

    def run_other_env() -> None:
        """Run some steps of a second episode in environment 0, and reset the environment when the episode ends."""
        if harness.env.step_chunk([0], harness.sample_actions(2, stream=2)[None]).done.any():
            harness.env.reset([0], [other])

    in_env_1 = harness.run_episode(
        1, start, actions, before_chunk=None if harness.spec.simulator.lockstep else run_other_env
    )
    for where, trace in (("in environment 0", repeated), ("in environment 1 next to a running environment", in_env_1)):
        harness.expect_repeat(first, trace, f"episode {where}", "the same as in environment 0 alone")


@check("repeatable", "expert", "flags")
def expert_replays(harness: Harness) -> None:
    """Check that executing the reported actions of the expert reproduces its episode."""
    if harness.expert_episode is None:
        harness.note = "none declared"
        return
    repeated = harness.run_episode(0, harness.expert_episode.start, harness.expert_episode.actions)
    harness.expect_repeat(harness.expert_episode, repeated, "expert_chunk: actions", "the actions that were executed")


@check("step")
def goals(harness: Harness) -> None:
    """Check that `compute_reward` returns the rewards of an episode if the goal is unchanged."""
    spec = harness.spec
    if spec.goal is None or getattr(harness.cfg, "use_rel_reward", False):
        harness.note = "none declared"
        return
    trace = harness.run_episode(0, harness.make_first_start(), harness.sample_actions(MAX_STEPS), chunk=1)
    states = np.stack([states.state for states in trace.observations[1:]])
    goal_reward = cast(GoalFactory[EnvSettings], harness.factory).make_goal_reward(harness.cfg)
    try:
        recomputed = (
            goal_reward(states[:, slice(*spec.goal.achieved)], states[:, slice(*spec.goal.desired)])[0]
            * spec.reward.factor
        )
    finally:
        goal_reward.close()
    rewards = np.concatenate([result.reward[0] for result in trace.results])
    for step in np.flatnonzero(~np.isclose(recomputed, rewards, rtol=1e-3, atol=1e-5))[:1].tolist():
        expected = f"{rewards[step]:g}, the reward of step {step + 1} (or no algorithm.hindsight_goals)"
        harness.warn_unless(False, "reward of the same goal", expected, f"{recomputed[step]:g}")
    harness.note = f"{len(rewards)} rewards compared"
