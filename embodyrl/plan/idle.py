"""Keys that have no effect in some command or beside others, each with the reason; refused where typed."""

from collections.abc import Iterable, Iterator, Set

from embodyrl.plan.settings import GreedySettings, SupervisedRunSettings
from embodyrl.policies.settings import ModelSettings

Idle = Iterator[tuple[str, str]]


def not_drawn(how: GreedySettings) -> Idle:
    """What is about drawing, where nothing but the most probable is chosen."""
    if not how.do_sample:
        reason = "the policy chooses greedily; set eval.sampling_params.do_sample=true"
        yield from ((f"algorithm.sampling_params.{key}", reason) for key in ("temperature", "top_k", "top_p"))


def not_filmed(reason: str, *looks: str) -> Idle:
    """What is about films, where there are none."""
    yield "faults.on_video_error", reason
    yield from ((f"video_cfg.{key}", reason) for key in ("base_dir", *looks))


def untrained(keys: Iterable[str], *, but: Set[str], all_parts: Set[str]) -> Idle:
    """What is about learning, in a training that only evaluates: all `but` what an evaluation reads.

    `keys` are those of the chosen parts, too, of which only an algorithm is about learning.
    """
    reason = "runner.only_eval is true, nothing is trained; set it to false"
    for key in keys:
        if key not in but and (key in all_parts or key.startswith("algorithm.")) and key != "runner.only_eval":
            yield key, reason


def unvalidated(keys: Iterable[str], *, filmed: bool) -> Idle:
    """What only validations read, in a training without any; an evaluation of its run goes by its eval and env.eval."""
    reason = "runner.val_check_interval is -1, nothing is validated; set it to a number of steps"
    more = ("runner.val_suites", "checkpoint.keep_best", "faults.on_video_error")
    yield from ((key, reason) for key in keys if key.startswith("video_cfg.") or key in more)
    if filmed:
        yield "video", reason


def unmeasured(runner: SupervisedRunSettings) -> Idle:
    """The same of supervised training."""
    if runner.val_check_interval == -1:
        reason = "runner.val_check_interval is -1, nothing is measured; set it to a number of steps"
        yield from ((key, reason) for key in ("data.val_path", "data.val_split", "checkpoint.keep_best"))


def unspared(model: ModelSettings) -> Idle:
    """Sparing the memory of activations that are few."""
    if not model.recomputes:
        reason = f"model_type '{model.model_type}' keeps its few activations; choose a larger model"
        yield "actor.gradient_checkpointing", reason
