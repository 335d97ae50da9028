"""Checks of `check-env` that run episodes."""

import time
from dataclasses import replace
from typing import cast

import numpy as np

from embodyrl.envs.check.harness import (
    CHUNK,
    LIMIT,
    SLOTS,
    Harness,
    Trace,
    check,
    seen_difference,
)
from embodyrl.envs.protocol import GoalFactory, instruction_for
from embodyrl.envs.settings import EnvSettings
from embodyrl.types import BoolArray, ChunkResult, EpisodeStart

SHORT = 5
"""Length of the episode that tests the time limit, in env steps; not a multiple of SHORT_CHUNK."""
SHORT_CHUNK = 3
FOUND_STEPS = 64
"""Maximum number of env steps with random actions to find an episode that terminates."""
LONG_STEPS = 1000
LONG_CHUNK = 25
CLOSE_STEPS = 200
LONG_SECONDS = 10.0
"""Time limit of the check `lasts`, in seconds."""


@check("spec")
def make(h: Harness) -> None:
    """Check that `make` builds the environment described by `spec`."""
    started = time.perf_counter()
    env = h.env
    h.note = f"{SLOTS} slots in {time.perf_counter() - started:.1f} s"
    h.expect(env.spec == h.spec, "env.spec", "the factory's spec", f"{env.spec}"[:120])
    h.expect(env.task_limit is None or env.task_limit >= 1, "env.task_limit", "None or at least 1", env.task_limit)


@check("make")
def reset(h: Harness) -> None:
    """Check that `reset` accepts several reset ids of each tested task."""
    seconds = []
    for reset_id in (reset_id for task in h.tasks() for reset_id in h.reset_ids(task)):
        started = time.perf_counter()
        h.env.reset([0], [h.start(reset_id)])
        seconds.append(time.perf_counter() - started)
    h.note = f"{len(seconds)} resets, median {1000 * float(np.median(seconds)):.1f} ms"


@check("reset")
def observe(h: Harness) -> None:
    """Check that all pixels and states are written and finite, and that observing twice gives equal values."""
    h.env.reset([0], [h.first_start()])
    # Observe twice, over black and over white: a pixel that is not written keeps both values.
    dark, bright = h.observe(0, fill=0), h.observe(0, fill=255)
    untouched = (dark.images == 0) & (bright.images == 255)
    for camera, name in enumerate(h.spec.cameras.names):
        kept = int(untouched[camera].any(axis=-1).sum())
        rule = "every pixel written, in place (out.images[...] = ...)"
        h.expect(not kept, f"observe: image of camera '{name}'", rule, f"{kept} pixels were not written")
    if not h.violations:
        h.expect_equal(seen_difference(dark, bright), "observe", "the same in two calls without a step")


@check("reset")
def instruction(h: Harness) -> None:
    """Check that the instruction is as declared; a text from the environment must be constant in an episode."""
    for task in h.tasks():
        first = h.start(h.reset_ids(task)[0])
        h.env.reset([0], [first])
        text, expected = h.env.instruction(0), instruction_for(h.spec, first.reset_id)
        if not h.spec.text.prompt_bytes:
            h.expect(text == expected, "instruction", f"spec.tasks[{task}], {expected!r}", repr(text))
            continue
        size = len(text.encode("utf-8", errors="replace"))
        h.expect(bool(text.strip()), "instruction", "a text", repr(text))
        h.expect(size <= h.spec.text.prompt_bytes, "instruction", f"at most {h.spec.text.prompt_bytes} bytes", size)
        h.play(0, first, h.actions(CHUNK))
        later = h.env.instruction(0)
        h.expect(later == text, "instruction", f"the same through an episode, {text!r}", repr(later))
    h.note = repr(h.env.instruction(0)) if h.spec.text.instructed else "none: the name is used"


@check("observe")
def reset_ids_differ(h: Harness) -> None:
    """Warn if all tested reset ids of a task give the same first observation."""
    for task in h.tasks():
        ids = h.reset_ids(task)
        first, *others = (h.first_seen(h.start(reset_id)) for reset_id in ids)
        differ = not others or any(seen_difference(first, other) for other in others)
        same = "equal first observations for all reset ids"
        h.prefer(differ, f"reset ids {ids} of task {task}", "different initial states", same)


@check("observe")
def step(h: Harness) -> None:
    """Check shapes, dtypes and finite rewards of a chunk's results, and the calls of `after_step`."""
    slots, called = list(range(SLOTS)), []
    h.env.reset(slots, [h.first_start()] * SLOTS)
    actions = np.stack([h.actions(CHUNK)] * SLOTS)
    result = h.env.step_chunk(slots, actions, after_step=lambda slot, _: called.append(slot))
    h.expect_array("step_chunk: reward", result.reward, (SLOTS, CHUNK), np.float32)
    for name in ("terminated", "truncated", "valid", "success"):
        h.expect_array(f"step_chunk: {name}", getattr(result, name), (SLOTS, CHUNK), np.bool_)
    if h.violations:
        return
    finite = bool(np.isfinite(result.reward).all())
    h.expect(finite, "step_chunk: reward", "finite numbers", result.reward.tolist())
    executed = [slot for row, slot in enumerate(slots) for _ in range(int(result.valid[row].sum()))]
    h.expect(sorted(called) == executed, "after_step", f"calls for slots {executed}", called)


@check("step")
def reset_repeats(h: Harness) -> None:
    """Check that reset id and seed determine the first observation, even after other episodes."""
    start = h.first_start()
    first = h.first_seen(start)
    for reset_id in h.reset_ids(h.tasks()[-1]):
        h.play(0, h.start(reset_id), h.actions(CHUNK))
    same = "the same first observation (fix: use only generators that the reset seeds)"
    h.expect_same(first, h.first_seen(start), f"reset {start.reset_id}", same)
    task = h.spec.task_of(start.reset_id)[0]
    if task not in h.spec.seeded_tasks:
        rule = f"{same}, or task {task} in EnvSpec.seeded_tasks"
        other = h.first_seen(replace(start, seed=start.seed + 1))
        h.expect_same(first, other, f"reset {start.reset_id} with another seed", rule)


@check("step")
def expert(h: Harness) -> None:
    """Check that the expert solves at least one task in `spec.expert.tasks`, and raises an error in all other tasks."""
    declared = [task for task in h.tasks() if task in h.spec.expert.tasks]
    successes = 0
    for task in declared:
        demo = _play_expert(h, h.start(h.reset_ids(task)[0], limit=h.horizon))
        if h.violations:
            return
        successes += demo.any("success")
        h.demo = h.demo or demo
        if demo.any("terminated"):
            h.ending = h.ending or demo
    found = f"none within {h.horizon} steps"
    wanted = bool(declared) and h.spec.reward.reports_success
    h.expect(not wanted or successes > 0, "expert_chunk", f"a success in tasks {declared}", found)
    h.note = f"{successes} of {len(declared)} episodes succeed" if declared else "none declared"
    for task in [t for t in h.tasks() if t not in h.spec.expert.tasks][:1]:
        h.env.reset([0], [h.start(h.reset_ids(task)[0])])
        h.expect_refusal(
            f"expert_chunk, task {task}",
            "EnvError: not declared",
            "an action",
            lambda: h.env.expert_chunk([0], 1, noise=0.0),
        )


def _play_expert(h: Harness, start: EpisodeStart) -> Trace:
    """Run the expert to the end of the episode, or to the first violation."""
    trace = Trace(start=start, actions=np.zeros((0, h.spec.action.dim), np.float32))
    low, high = (np.asarray(bound, np.float32) for bound in h.spec.action.bounds)
    h.env.reset([0], [start])
    trace.seen.append(h.observe(0))
    while not trace.any("done") and len(trace.results) * CHUNK < start.max_episode_steps:
        actions, result = h.env.expert_chunk([0], CHUNK, noise=0.0)
        if not h.expect_array("expert_chunk: actions", actions, (1, CHUNK, h.spec.action.dim), np.float32):
            return trace
        outside = actions[~((low <= actions) & (actions <= high))].tolist()
        expected = f"numbers in {low.min():g}..{high.max():g}"
        if not h.expect(not outside, "expert_chunk: actions", expected, next(iter(outside), None)):
            return trace
        trace.results.append(result)
        trace.seen.append(h.observe(0))
        trace.actions = np.concatenate([trace.actions, actions[0, result.valid[0]]])
    return trace


@check("step")
def flags(h: Harness) -> None:
    """Check that an episode ends terminated or truncated, not both, and that no later action is executed."""
    traces = [h.play(0, h.first_start(limit=SHORT), h.actions(2 * SHORT), chunk=SHORT_CHUNK)]
    h.ending = h.ending or _find_ending(h)
    if h.ending is not None:
        # One chunk that continues beyond the end: its later actions must not be executed.
        longer = np.concatenate([h.ending.actions[: h.ending.length], h.actions(CHUNK)])
        traces.append(h.play(0, h.ending.start, longer, chunk=len(longer)))
    for result in (result for trace in traces for result in trace.results):
        _expect_one_end(h, result)
    h.note = "terminated and truncated" if h.ending else "truncated only: no episode ended by itself"


def _expect_one_end(h: Harness, result: ChunkResult) -> None:
    valid, done = result.valid[0], result.terminated[0] | result.truncated[0]
    both = bool((result.terminated & result.truncated).any())
    h.expect(not both, "truncated", "false where terminated", _at(result.truncated[0]))
    ends = np.flatnonzero(done)
    # The action that ends an episode was itself executed.
    count = int(ends[0]) + 1 if len(ends) else len(valid)
    expected = np.arange(len(valid)) < count
    h.expect(np.array_equal(valid, expected), "valid", f"{_at(expected)}, up to the end", _at(valid))
    h.expect(len(ends) <= 1, "terminated, truncated", "one end per chunk", _at(done))
    late = bool(result.reward[0, count:].any() or result.success[0, count:].any())
    h.expect(not late, "reward, success", "0 after the end", result.reward[0].tolist())


def _at(flags: BoolArray) -> str:
    return f"true at {np.flatnonzero(flags).tolist()} of {len(flags)}"


def _find_ending(h: Harness) -> Trace | None:
    """Return an episode that terminates under random actions, or None."""
    ids = h.reset_ids(h.tasks()[0])
    played = (h.play(0, h.start(i, limit=h.horizon), h.actions(FOUND_STEPS, stream=i)) for i in ids)
    return next((trace for trace in played if trace.any("terminated")), None)


@check("flags")
def time_limit(h: Harness) -> None:
    """Check that episodes are truncated at `max_episode_steps`, even in the middle of a chunk."""
    start = h.first_start(limit=SHORT, ignore=True)
    trace = h.play(0, start, h.actions(3 * SHORT), chunk=SHORT_CHUNK)
    truncated = trace.any("truncated")
    # Where the simulator may end the episode earlier, only the upper bound is checked.
    strict = start.ignore_terminations and not h.spec.simulator.may_truncate
    fits = trace.any("done") and trace.length <= SHORT and (not strict or (truncated and trace.length == SHORT))
    found = f"{trace.length} steps, {'truncated' if truncated else 'not truncated'}"
    h.expect(fits, f"episode with max_episode_steps={SHORT}", f"{SHORT} steps, truncated", found)


@check("time_limit")
def over(h: Harness) -> None:
    """Check that a finished episode can be observed but not stepped."""
    h.play(0, h.first_start(limit=SHORT, ignore=True), h.actions(2 * SHORT), chunk=SHORT_CHUNK)
    h.observe(0)
    another = h.actions(1)[None]
    h.expect_refusal("step_chunk after the end", "EnvError", "another step", lambda: h.env.step_chunk([0], another))


@check("time_limit")
def ignore_terminations(h: Harness) -> None:
    """Check that with `ignore_terminations`, an episode continues to its time limit."""
    if h.ending is None or not h.can_ignore:
        h.note = "not exercised: no episode ended by itself" if h.can_ignore else "rejected by validate"
        return
    steps = h.ending.length
    start = h.start(h.ending.start.reset_id, limit=steps + CHUNK, ignore=True)
    trace = h.play(0, start, np.concatenate([h.ending.actions[:steps], h.actions(2 * CHUNK)]))
    lasts = not trace.any("terminated") and trace.length == steps + CHUNK
    expected, found = f"{steps + CHUNK} steps, never terminated", f"{trace.length} steps"
    h.expect(lasts, "episode with ignore_terminations=true", expected, found)


@check("time_limit")
def lasts(h: Harness) -> None:
    """Run episodes with random actions until they end, in both slots, to find crashes, hangs and non-finite values.

    The first steps are observed one by one: a chunk hides values that are non-finite in one step only.
    """
    started, played, episodes, slots = time.perf_counter(), 0, 0, list(range(SLOTS))
    ids = h.spec.reset_ids_of(h.tasks()[-1])

    def begin(slot: int) -> None:
        h.env.reset([slot], [h.start(ids[episodes % len(ids)], limit=h.horizon)])

    for slot in slots:
        begin(slot)
        episodes += 1
    while played < LONG_STEPS and time.perf_counter() - started < LONG_SECONDS and not h.violations:
        length = 1 if played < CLOSE_STEPS else LONG_CHUNK
        actions = h.actions(SLOTS * length, stream=played).reshape(SLOTS, length, -1)
        result = h.env.step_chunk(slots, actions)
        played += int(result.valid.sum())
        for slot in slots:
            h.observe(slot)
            if result.done[slot]:
                begin(slot)
                episodes += 1
    h.note = f"{played} steps in {episodes} episodes"


@check("reset_repeats", "step")
def repeatable(h: Harness) -> None:
    """Check that reset id, seed and actions determine an episode bit for bit, even after other episodes."""
    start, actions = h.first_start(), h.actions(LIMIT)
    first = h.play(0, start, actions)
    for task in h.tasks():
        h.play(0, h.start(h.reset_ids(task)[-1]), h.actions(LIMIT, stream=1))
    again = h.play(0, start, actions)
    h.expect_repeat(first, again, f"episode of reset id {start.reset_id}", "the same again")


@check("repeatable")
def slots(h: Harness) -> None:
    """Check that an episode does not depend on its slot or on other slots."""
    # Long enough that the other slot still runs when this episode ends.
    start, other = h.first_start(), h.start(h.reset_ids(h.tasks()[0])[-1], limit=4 * LIMIT, ignore=True)
    actions = h.actions(LIMIT)
    first = h.play(0, start, actions)
    h.env.reset([1], [other])
    before = h.observe(1)
    again = h.play(0, start, actions)
    h.expect_same(before, h.observe(1), "slot 1 while slot 0 runs", "unchanged")
    h.env.reset([0], [other])

    def keep_busy() -> None:
        """Run some steps of a second episode in slot 0, and reset the slot when the episode ends."""
        if h.env.step_chunk([0], h.actions(2, stream=2)[None]).done.any():
            h.env.reset([0], [other])

    moved = h.play(1, start, actions, between=None if h.spec.simulator.lockstep else keep_busy)
    for where, trace in (("in slot 0", again), ("in slot 1 next to a running slot", moved)):
        h.expect_repeat(first, trace, f"episode {where}", "the same as in slot 0 alone")


@check("repeatable", "expert", "flags")
def expert_replays(h: Harness) -> None:
    """Check that executing the reported actions of the expert reproduces its episode."""
    if h.demo is None:
        h.note = "none declared"
        return
    again = h.play(0, h.demo.start, h.demo.actions)
    h.expect_repeat(h.demo, again, "expert_chunk: actions", "the actions that were executed")


@check("step")
def goals(h: Harness) -> None:
    """Check that `compute_reward` returns the rewards of an episode if the goal is unchanged."""
    spec = h.spec
    if spec.goal is None or getattr(h.cfg, "use_rel_reward", False):
        h.note = "none declared"
        return
    trace = h.play(0, h.first_start(), h.actions(LIMIT), chunk=1)
    seen = np.stack([seen.state for seen in trace.seen[1:]])
    judge = cast(GoalFactory[EnvSettings], h.factory).judge(h.cfg)
    try:
        said = judge(seen[:, slice(*spec.goal.achieved)], seen[:, slice(*spec.goal.desired)])[0] * spec.reward.factor
    finally:
        judge.close()
    earned = np.concatenate([result.reward[0] for result in trace.results])
    for step in np.flatnonzero(~np.isclose(said, earned, rtol=1e-3, atol=1e-5))[:1].tolist():
        expected = f"{earned[step]:g}, the reward of step {step + 1} (or no algorithm.hindsight_goals)"
        h.prefer(False, "reward of the same goal", expected, f"{said[step]:g}")
    h.note = f"{len(earned)} rewards compared"
