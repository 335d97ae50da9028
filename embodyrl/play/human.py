"""Human-in-the-loop DAgger: a person corrects failed episodes of the policy in the browser."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from embodyrl.api.acting import LoadedPolicy, build_policy_of_config
from embodyrl.api.environment import SingleEnv
from embodyrl.clock import RunClock
from embodyrl.commands.collect import collect
from embodyrl.data.reader import Demonstrations, load_demonstrations
from embodyrl.data.settings import EpisodeFilter
from embodyrl.data.writer import read_episodes
from embodyrl.envs.settings import EnvSplit
from embodyrl.errors import EmbodyError, clean_text
from embodyrl.plan.config import apply_overrides
from embodyrl.plan.initial_states import get_selected_states
from embodyrl.plan.schema import Config
from embodyrl.play.recording import Recording
from embodyrl.play.request_handlers import RequestHandlers, get_page
from embodyrl.play.scene import Scene
from embodyrl.web_pages.loopback import LoopbackServer

_NO_LIMIT = 100_000
"""Time limit of a corrected episode, in env steps: effectively none, because the person ends the episode."""
_SAMPLES = 4
"""Number of chunks sampled per observation to estimate the uncertainty of the policy."""
_POLL_S = 0.2
"""Interval at which signals are checked while a person corrects episodes, in seconds."""
_CLOSING_S = 30.0
"""Maximum time that `close` waits for the current request, in seconds; a simulator may hang."""


class HumanExpert:
    """DAgger expert that lets a person correct failed episodes on a web page; all rounds use the same address."""

    scripted: ClassVar[bool] = False
    target_actors: ClassVar[tuple[str, ...]] = ("person", "expert", "unknown")

    def __init__(self, cfg: Config) -> None:
        """Start the web server, and print the address of the page."""
        self._cfg = cfg.dagger
        self._steps = cfg.runner.max_steps
        self._round = 0
        self.handlers = RequestHandlers(cfg.runner.experiment_name or "dagger")
        self.server = LoopbackServer(cfg.dagger.port, {"/": get_page}, self.handlers.posts)
        # This thread also creates the simulators, because an OpenGL context belongs to one thread.
        self._thread = threading.Thread(target=self.server.process_requests, name="play-server", daemon=True)
        self._thread.start()
        print(f"corrections: {self.server.url}", flush=True)

    def collect(self, cfg: Config) -> None:
        """Run the policy without corrections, then collect corrections of failed episodes, the most uncertain first.

        Raises:
            EmbodyError: the simulator or the policy failed.
        """
        self._round += 1
        self._show_status("the policy runs without corrections")
        out = Path(str(cfg.collect.out))
        uncorrected = out.with_name(f"{out.name}_alone")
        collect(apply_overrides(cfg, {"collect.out": str(uncorrected), "collect.filter": EpisodeFilter.all}))
        demos = load_demonstrations(uncorrected)
        failed = [e for e in range(demos.num_episodes) if not demos.success[demos.start[e] : demos.stop[e]].any()]
        solved = demos.num_episodes - len(failed)
        self._show_status(f"without corrections, the policy solves {solved} of {demos.num_episodes} episodes")
        if failed:
            self._collect_corrections(cfg, demos, failed, out)
        self._show_status("training starts")

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Show the progress of the training on the page."""
        loss = metrics.get("actor/loss")
        self._show_status(
            f"training, step {step} of {self._steps}" + (f", loss {loss:.3g}" if loss is not None else "")
        )

    def close(self) -> None:
        """Stop the web server; idempotent."""
        self.handlers.status_text = "all rounds are done"
        self.server.stop()
        self._thread.join(_CLOSING_S)
        self.server.server_close()

    def _show_status(self, text: str) -> None:
        self.handlers.status_text = f"round {self._round} of {self._cfg.rounds}: {text}"
        if "step" not in text:
            print(clean_text(f"  {self.handlers.status_text}"), flush=True)

    def _collect_corrections(self, cfg: Config, demos: Demonstrations, failed: Sequence[int], out: Path) -> None:
        policy = build_policy_of_config(cfg)
        ranked = sorted(failed, key=lambda e: (-compute_uncertainty(policy, demos, e), e))
        recorded_ids = {row["embodyrl/reset_id"] for row in read_episodes(out)}
        state_ids = dict.fromkeys(int(demos.reset_id[e]) for e in ranked[: self._cfg.corrections])
        remaining_ids = [reset_id for reset_id in state_ids if reset_id not in recorded_ids]
        recording = Recording(out, policy.run_plan, cfg, get_selected_states(policy.run_plan.env, cfg.env.train))
        try:
            if remaining_ids:
                self._show_status(
                    f"{self.handlers.status_text.partition(': ')[2]}; correct {len(remaining_ids)} failed episodes"
                )
                self._correct(policy, recording, remaining_ids)
        finally:
            recording.close()

    def _correct(self, policy: LoadedPolicy, recording: Recording, reset_ids: Sequence[int]) -> None:
        """Show the episodes `reset_ids` on the page, and wait until a person has finished all of them.

        Raises:
            EmbodyError: the server has stopped, or no person has used the page for `dagger.correction_timeout_s`.
        """

        def open_scene() -> None:
            plan = policy.run_plan
            env = SingleEnv(plan.cfg, plan.env_settings, plan.context, EnvSplit(max_episode_steps=_NO_LIMIT))
            self.handlers.scene = Scene(policy, env, recording, reset_ids=reset_ids)

        def close_scene() -> None:
            scene, self.handlers.scene = self.handlers.scene, None
            if scene is not None:
                if scene.has_ended:  # an interrupted correction would count as corrected
                    scene.finish_episode()
                scene.env.close()

        clock, num_executed, last_used, limit_s = RunClock(), -1, 0.0, self._cfg.correction_timeout_s
        try:
            self.server.call(open_scene)
            while (scene := self.handlers.scene) is not None and scene.remaining:
                self._thread.join(_POLL_S)
                now = clock.now()
                if self.handlers.num_executed != num_executed:
                    num_executed, last_used = self.handlers.num_executed, now
                if now - last_used > limit_s:
                    raise EmbodyError(
                        f"No person has used the correction page for {limit_s:g} s (dagger.correction_timeout_s), and "
                        f"{scene.remaining} episodes are not corrected. The corrected episodes are saved; to resume, "
                        "run the same command again."
                    )
                if not self._thread.is_alive():
                    raise EmbodyError("The server of the correction page has stopped. Run the same command again.")
        finally:
            self.server.call(close_scene)


def compute_uncertainty(policy: LoadedPolicy, demos: Demonstrations, episode: int) -> float:
    """Return the standard deviation of sampled actions, averaged over an episode; 0 for a deterministic policy."""
    spec = policy.policy.spec
    if not spec.is_stochastic:
        return 0.0
    steps = np.arange(demos.start[episode], demos.stop[episode], spec.num_action_chunks)
    observation = demos.observations(steps)
    noise = np.random.default_rng(episode).random((_SAMPLES, len(steps), spec.tokens_per_chunk), np.float32)
    return float(np.stack([policy.decide(observation, noise=sample).actions for sample in noise]).std(axis=0).mean())
