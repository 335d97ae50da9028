"""Videos of a report: each video is embedded once, or linked if the size budget is used up."""

import base64
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from embodyrl.errors import ConfigError
from embodyrl.monitor.history import EpisodeRow
from embodyrl.reports.history import History

EMBED_BYTES = 48 * 2**20
"""Maximum total size of the embedded videos, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoCard:
    """Video of an evaluation episode, with the results of the episode."""

    media: str
    """Key of the video in `VideoIndex.sources`."""
    run: str
    step: int
    episode: EpisodeRow


@dataclass(slots=True)
class VideoIndex:
    """Embedded or linked videos of a page, by key."""

    page: Path
    budget: int
    sources: dict[str, str] = field(default_factory=dict)
    _keys: dict[Path, str] = field(default_factory=dict)

    def add(self, video: Path) -> str:
        """Add a video to the page, unless the page already contains the video; return the key of the video."""
        if video not in self._keys:
            key = self._keys[video] = f"v{len(self._keys)}"
            size = video.stat().st_size
            if size <= self.budget:
                self.budget -= size
                self.sources[key] = "data:video/mp4;base64," + base64.b64encode(video.read_bytes()).decode("ascii")
            else:
                self.sources[key] = os.path.relpath(video, self.page.parent)
        return self._keys[video]


def build_cards(history: History, video_index: VideoIndex) -> list[VideoCard]:
    """Return the existing videos of the evaluations of a run, newest evaluation first."""
    cards = []
    for evaluation in reversed(history.evaluations):
        for episode in evaluation.episodes:
            video = history.find_video(episode.video) if episode.video else None
            if video is not None:
                cards.append(
                    VideoCard(media=video_index.add(video), run=history.name, step=evaluation.step, episode=episode)
                )
    return cards


def pair_cards(cards: Iterable[VideoCard]) -> list[tuple[VideoCard, VideoCard]]:
    """Return the first and last video of each episode with several videos; episodes with changed outcome come first."""
    by_episode: dict[tuple[str, int, int, int], list[VideoCard]] = {}
    for card in cards:
        key = (card.run, card.episode.episode, card.episode.reset_id, card.episode.seed)
        by_episode.setdefault(key, []).append(card)
    pairs = [
        (min(group, key=lambda x: x.step), max(group, key=lambda x: x.step))
        for group in by_episode.values()
        if len(group) > 1
    ]
    return sorted(pairs, key=lambda p: (p[0].episode.outcome == p[1].episode.outcome, p[0].run, p[0].episode.episode))


def animate_changes(history: History, out: Path) -> None:
    """Write a GIF of up to three episodes before and after training, each of a different task.

    Episodes with a changed outcome come first.

    Raises:
        ConfigError: no episode was recorded twice.
        OSError: a recording cannot be read, or `out` cannot be written.
    """
    from embodyrl.reports.side_by_side import animate

    video_index = VideoIndex(page=out, budget=0)
    cards_by_media = {card.media: card for card in build_cards(history, video_index)}
    selected: dict[str, tuple[Path, Path]] = {}
    for first, last in pair_cards(cards_by_media.values()):
        if len(selected) < 3 and (first.episode.outcome, last.episode.outcome) != ("success", "failure"):
            paths = [out.parent / video_index.sources[card.media] for card in (first, last)]
            selected.setdefault(first.episode.task, (paths[0], paths[1]))
    if not selected:
        raise ConfigError(
            f"{history.name}: no episode was recorded both before and after training. Fix: train with video=changed:6."
        )
    last_step = history.evaluations[-1].step
    animate([*selected.values()], out, labels=("before", f"after {last_step} steps"))
