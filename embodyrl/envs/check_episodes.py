"""The checks of `check-env` that play episodes."""

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from embodyrl.envs.check_harness import (
    CHUNK,
    LIMIT,
    SLOTS,
    Harness,
    Trace,
    Violation,
    seen_difference,
    shapes,
    trace_difference,
    unless,
)
from embodyrl.errors import EmbodyError, EnvError
from embodyrl.types import BoolArray, ChunkResult, EpisodeStart

SHORT = 5
"""Env steps of the episode that tests the time limit; no multiple of its chunk."""
SHORT_CHUNK = 3
MEASURED_STEPS = 64


def check_make(harness: Harness) -> Iterator[Violation]:
    """`make` builds the environment that `spec` describes."""
    started = time.perf_counter()
    env = harness.env
    harness.note = f"{SLOTS} slots in {time.perf_counter() - started:.1f} s"
    yield from unless(env.spec == harness.spec, "env.spec", "what the factory's spec says", f"{env.spec}"[:120])
    limit = env.task_limit
    yield from unless(limit is None or limit >= 1, "env.task_limit", "None or at least 1", limit)


def check_reset(harness: Harness) -> None:
    """First and last states of the tasks can be reached."""
    seconds = []
    for task in harness.tasks():
        for reset_id in harness.reset_ids(task):
            started = time.perf_counter()
            harness.env.reset([0], [harness.start(reset_id)])
            seconds.append(time.perf_counter() - started)
    harness.note = f"{len(seconds)} resets, median {1000 * float(np.median(seconds)):.1f} ms"


def check_observe(harness: Harness) -> Iterator[Violation]:
    """Every pixel and every state entry is written, and finite; looking twice shows the same."""
    harness.env.reset([0], [harness.first_start()])
    dark, bright = harness.observe(0, fill=0), harness.observe(0, fill=255)
    missing = np.flatnonzero(~np.isfinite(dark.state))
    if len(missing):
        yield Violation(f"observe: state[{missing[0]}]", "a finite number", f"{dark.state[missing[0]]}")
    untouched = (dark.images == 0) & (bright.images == 255)
    for camera, name in enumerate(harness.spec.cameras):
        if untouched[camera].any():
            kept = f"{int(untouched[camera].any(axis=-1).sum())} pixels keep what was there before"
            rule = "every pixel written, in place (out.images[...] = ...)"
            yield Violation(f"observe: image of camera '{name}'", rule, kept)
    if not untouched.any() and not len(missing) and (difference := seen_difference(dark, bright)):
        yield Violation("observe", "the same when asked twice without a step", difference)


def check_instruction(harness: Harness) -> Iterator[Violation]:
    """The instruction of an episode is the text of its task."""
    for task in harness.tasks():
        harness.env.reset([0], [harness.start(harness.reset_ids(task)[0])])
        text, expected = harness.env.instruction(0), harness.spec.tasks[task]
        yield from unless(text == expected, "instruction", f"spec.tasks[{task}], {expected!r}", repr(text))


def check_reset_repeats(harness: Harness) -> Iterator[Violation]:
    """Reset id and seed fix what is seen first, also after other episodes; the seed only where the spec says so."""
    start = harness.first_start()
    first = harness.play(0, start, harness.actions(0)).seen[0]
    for reset_id in harness.reset_ids(harness.tasks()[-1]):
        harness.play(0, harness.start(reset_id), harness.actions(CHUNK))
    if difference := seen_difference(first, harness.play(0, start, harness.actions(0)).seen[0]):
        yield Violation(f"reset {start.reset_id}", "the same first observation", difference)
    task = harness.spec.task_of(start.reset_id)[0]
    other = harness.play(0, replace(start, seed=start.seed + 1), harness.actions(0)).seen[0]
    if task not in harness.spec.seeded_tasks and (difference := seen_difference(first, other)):
        rule = f"the same first observation, or task {task} in spec.seeded_tasks"
        yield Violation(f"reset {start.reset_id} with another seed", rule, difference)


def check_reset_ids_differ(harness: Harness) -> Iterator[Violation]:
    """Different reset ids of a task show different things; not each pair has to."""
    for task in harness.tasks():
        ids = harness.reset_ids(task)
        seen = [harness.play(0, harness.start(reset_id), harness.actions(0)).seen[0] for reset_id in ids]
        if len(ids) > 1 and all(seen_difference(seen[0], other) is None for other in seen[1:]):
            yield Violation(f"reset ids {ids} of task {task}", "different initial states", "equal observations")


def check_step(harness: Harness) -> Iterator[Violation]:
    """A chunk in all slots gives arrays [n, K] of the right kinds, finite rewards, and one `after_step` per step."""
    start = harness.first_start()
    slots = list(range(SLOTS))
    harness.env.reset(slots, [start] * SLOTS)
    called: list[int] = []
    actions = np.stack([harness.actions(CHUNK)] * SLOTS)
    result = harness.env.step_chunk(slots, actions, after_step=lambda slot, _: called.append(slot))
    problems = [*shapes("step_chunk: reward", result.reward, (SLOTS, CHUNK), np.float32)]
    for name in ("terminated", "truncated", "valid", "success"):
        problems += shapes(f"step_chunk: {name}", getattr(result, name), (SLOTS, CHUNK), np.bool_)
    yield from problems
    if problems:
        return
    finite = bool(np.isfinite(result.reward).all())
    yield from unless(finite, "step_chunk: reward", "finite numbers", result.reward.tolist())
    executed = [slot for row, slot in enumerate(slots) for _ in range(int(result.valid[row].sum()))]
    yield from unless(sorted(called) == executed, "after_step", f"calls for slots {executed}", called)


def check_flags(harness: Harness) -> Iterator[Violation]:
    """An episode ends terminated or truncated, never both, and nothing is executed after its end."""
    traces = [harness.play(0, harness.first_start(limit=SHORT), harness.actions(2 * SHORT), chunk=SHORT_CHUNK)]
    harness.ending = harness.ending or _find_ending(harness)
    if harness.ending is not None:
        longer = np.concatenate([harness.ending.actions[: harness.ending.length], harness.actions(CHUNK)])
        traces.append(harness.play(0, harness.ending.start, longer, chunk=len(longer)))
    for trace in traces:
        for result in trace.results:
            yield from _flag_problems(result)
    harness.note = "terminated and truncated" if harness.ending else "truncated only: no episode ended by itself"


def _flag_problems(result: ChunkResult) -> Iterator[Violation]:
    valid, done = result.valid[0], result.terminated[0] | result.truncated[0]
    both = bool((result.terminated & result.truncated).any())
    yield from unless(not both, "truncated", "false where terminated", _at(result.truncated[0]))
    ends = np.flatnonzero(done)
    count = int(ends[0]) + 1 if len(ends) else len(valid)
    expected = np.arange(len(valid)) < count
    yield from unless(np.array_equal(valid, expected), "valid", f"{_at(expected)}, up to the end", _at(valid))
    yield from unless(len(ends) <= 1, "terminated, truncated", "one end per chunk", _at(done))
    late = bool(result.reward[0, count:].any() or result.success[0, count:].any())
    yield from unless(not late, "reward, success", "0 after the end", result.reward[0].tolist())


def _at(flags: BoolArray) -> str:
    return f"true at {np.flatnonzero(flags).tolist()} of {len(flags)}"


def _find_ending(harness: Harness) -> Trace | None:
    """An episode that chance brings to its own end."""
    for reset_id in harness.reset_ids(harness.tasks()[0]):
        start = harness.start(reset_id, limit=harness.horizon)
        trace = harness.play(0, start, harness.actions(MEASURED_STEPS, stream=reset_id))
        if trace.any("terminated"):
            return trace
    return None


def check_time_limit(harness: Harness) -> Iterator[Violation]:
    """An episode that does not end by itself is truncated at `max_episode_steps`, in the middle of a chunk too."""
    start = harness.first_start(limit=SHORT, ignore=True)
    trace = harness.play(0, start, harness.actions(3 * SHORT), chunk=SHORT_CHUNK)
    truncated = trace.any("truncated")
    # Where the simulator may end the episode before, only the bound itself can be asked for.
    strict = start.ignore_terminations and not harness.spec.may_truncate
    fits = trace.any("done") and trace.length <= SHORT and (not strict or (truncated and trace.length == SHORT))
    found = f"{trace.length} steps, {'truncated' if truncated else 'not truncated'}"
    yield from unless(fits, f"episode with max_episode_steps={SHORT}", f"{SHORT} steps, truncated", found)


def check_over(harness: Harness) -> Iterator[Violation]:
    """A finished episode can be looked at but not continued."""
    harness.play(0, harness.first_start(limit=SHORT, ignore=True), harness.actions(2 * SHORT), chunk=SHORT_CHUNK)
    harness.observe(0)
    try:
        harness.env.step_chunk([0], harness.actions(1)[None])
    except EmbodyError:
        return
    yield Violation("step_chunk after the end", "EnvError", "another step")


def check_ignore_terminations(harness: Harness) -> Iterator[Violation]:
    """With `ignore_terminations` an episode goes on to its time limit."""
    if harness.ending is None or not harness.can_ignore:
        harness.note = "not exercised: no episode ended by itself" if harness.can_ignore else "refused by validate"
        return
    steps = harness.ending.length
    start = harness.start(harness.ending.start.reset_id, limit=steps + CHUNK, ignore=True)
    trace = harness.play(0, start, np.concatenate([harness.ending.actions[:steps], harness.actions(2 * CHUNK)]))
    lasts = not trace.any("terminated") and trace.length == steps + CHUNK
    expected, found = f"{steps + CHUNK} steps, never terminated", f"{trace.length} steps"
    yield from unless(lasts, "episode with ignore_terminations=true", expected, found)


def check_image_range(harness: Harness) -> Iterator[Violation]:
    """Pixels use 0..255."""
    found = f"nothing above {harness.brightest}; floats in 0..1 that were cut to integers?"
    yield from unless(not harness.spec.cameras or harness.brightest > 1, "observe: images", "uint8 in 0..255", found)


def check_repeatable(harness: Harness) -> Iterator[Violation]:
    """The same reset id, seed and actions give the same episode to the last bit, also after other episodes."""
    start, actions = harness.first_start(), harness.actions(LIMIT)
    first = harness.play(0, start, actions)
    for task in harness.tasks():
        harness.play(0, harness.start(harness.reset_ids(task)[-1]), harness.actions(LIMIT, stream=1))
    if difference := trace_difference(first, harness.play(0, start, actions)):
        yield Violation(f"episode of reset id {start.reset_id}", "the same again", difference)


def check_slots(harness: Harness) -> Iterator[Violation]:
    """A slot does not depend on which one it is, nor on what the others do meanwhile."""
    task = harness.tasks()[0]
    start, other = harness.first_start(), harness.start(harness.reset_ids(task)[-1], limit=4 * LIMIT, ignore=True)
    actions = harness.actions(LIMIT)
    first = harness.play(0, start, actions)
    harness.env.reset([1], [other])
    before = harness.observe(1)
    again = harness.play(0, start, actions)
    if difference := seen_difference(before, harness.observe(1)):
        yield Violation("slot 1 while slot 0 runs", "unchanged", difference)
    harness.env.reset([0], [other])
    busy = None if harness.spec.lockstep else lambda: _keep_busy(harness, 0, other)
    moved = harness.play(1, start, actions, between=busy)
    for where, trace in (("in slot 0", again), ("in slot 1 beside a running slot", moved)):
        if difference := trace_difference(first, trace):
            yield Violation(f"episode {where}", "the one of slot 0 alone", difference)


def _keep_busy(harness: Harness, slot: int, start: EpisodeStart) -> None:
    """Run a little of an episode; begin it anew where it ends."""
    if harness.env.step_chunk([slot], harness.actions(2, stream=2)[None]).done.any():
        harness.env.reset([slot], [start])


def check_render(harness: Harness) -> Iterator[Violation]:
    """`render` returns an upright frame and changes nothing."""
    harness.play(0, harness.first_start(), harness.actions(CHUNK))
    before = harness.observe(0)
    try:
        frame = harness.env.render(0)
    except EnvError as error:
        if harness.spec.cameras:
            raise
        harness.note = str(error)  # without cameras there may be nothing to show
        return
    shape = frame.shape if isinstance(frame, np.ndarray) else ()
    if len(shape) != 3 or shape[2] != 3 or frame.dtype != np.uint8:
        found = f"{frame.dtype} {shape}" if shape else type(frame).__name__
        yield Violation("render", "uint8 (H, W, 3)", found)
        return
    if difference := seen_difference(before, harness.observe(0)):
        yield Violation("render", "no change of the observation", difference)
    for camera, image in zip(harness.spec.cameras, before.images, strict=True):
        upside_down = image if harness.spec.image_rotation_deg == 180 else image[::-1]
        upright = upside_down[::-1]
        wrong = np.array_equal(frame, upside_down) and not np.array_equal(frame, upright)
        expected = f"upright (spec.image_rotation_deg={harness.spec.image_rotation_deg})"
        yield from unless(not wrong, "render", expected, f"the image of camera '{camera}' upside down")
    harness.note = f"{shape[0]}x{shape[1]}"


def check_expert(harness: Harness) -> Iterator[Violation]:
    """Tasks in `spec.expert_tasks` have an expert that succeeds, others refuse."""
    declared = [task for task in harness.tasks() if task in harness.spec.expert_tasks]
    successes = 0
    for task in declared:
        demo, problems = _play_expert(harness, harness.start(harness.reset_ids(task)[0], limit=harness.horizon))
        yield from problems
        if problems:
            return
        successes += demo.any("success")
        harness.demo = harness.demo or demo
        if demo.any("terminated"):
            harness.ending = harness.ending or demo
    found = f"none within {harness.horizon} steps"
    yield from unless(not declared or successes > 0, "expert_chunk", f"a success in tasks {declared}", found)
    harness.note = f"{successes} of {len(declared)} episodes succeed" if declared else "none declared"
    for task in [t for t in harness.tasks() if t not in harness.spec.expert_tasks][:1]:
        harness.env.reset([0], [harness.start(harness.reset_ids(task)[0])])
        try:
            harness.env.expert_chunk([0], 1, noise=0.0)
        except EmbodyError:
            continue
        yield Violation(f"expert_chunk, task {task}", "EnvError: not declared", "an action")


def _play_expert(harness: Harness, start: EpisodeStart) -> tuple[Trace, list[Violation]]:
    """Let the expert act to the end."""
    trace = Trace(start=start, actions=np.zeros((0, harness.spec.action_dim), np.float32))
    low, high = harness.bounds()
    harness.env.reset([0], [start])
    trace.seen.append(harness.observe(0))
    while not trace.any("done") and len(trace.results) * CHUNK < start.max_episode_steps:
        actions, result = harness.env.expert_chunk([0], CHUNK, noise=0.0)
        problems = list(shapes("expert_chunk: actions", actions, (1, CHUNK, harness.spec.action_dim), np.float32))
        outside = [] if problems else actions[~((low <= actions) & (actions <= high))].tolist()
        if outside:
            expected = f"numbers in {low.min():g}..{high.max():g}"
            problems = [Violation("expert_chunk: actions", expected, str(outside[0]))]
        if problems:
            return trace, problems
        trace.results.append(result)
        trace.seen.append(harness.observe(0))
        trace.actions = np.concatenate([trace.actions, actions[0, result.valid[0]]])
    return trace, []


def check_expert_replays(harness: Harness) -> Iterator[Violation]:
    """What the expert says it chose is what it did: executing its actions gives the same episode."""
    if harness.demo is None:
        harness.note = "none declared"
    elif difference := trace_difference(harness.demo, harness.play(0, harness.demo.start, harness.demo.actions)):
        yield Violation("expert_chunk: actions", "the actions that were executed", difference)


def check_speed(harness: Harness) -> None:
    """Measure; nothing can fail here."""
    start = harness.first_start(limit=MEASURED_STEPS, ignore=True)
    harness.env.reset([0], [start])
    started = time.perf_counter()
    steps = int(harness.env.step_chunk([0], harness.actions(MEASURED_STEPS)[None]).valid.sum())
    stepped = time.perf_counter()
    for _ in range(CHUNK):
        harness.observe(0)
    seen = time.perf_counter()
    harness.env.reset([0], [start])
    harness.note = (
        f"{steps / (stepped - started):.0f} steps/s without observing, "
        f"{1000 * (seen - stepped) / CHUNK:.2f} ms per observation, "
        f"{1000 * (time.perf_counter() - seen):.2f} ms per reset (one slot)"
    )


def check_close(harness: Harness) -> None:
    """`close` may be called twice."""
    harness.env.close()
    harness.env.close()
