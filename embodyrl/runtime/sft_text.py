"""Supervised training on rows of text: what it starts from, in the shape that demonstrations have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from embodyrl.config.schema import Config
from embodyrl.conversation import join_messages
from embodyrl.datasets.text import TextRows, open_rows
from embodyrl.errors import ConfigError
from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import PolicyRequest, TextPolicy
from embodyrl.runtime.sft_setup import Samples
from embodyrl.runtime.texts import tokenizer_folder
from embodyrl.types import ActionKind, ActionSpace, EnvSpec, IntArray, Observation


@dataclass(frozen=True)
class Prompts:
    """What is asked in some rows; in place of `Demonstrations`."""

    texts: Sequence[str]

    def observe(self, steps: IntArray) -> Observation:
        """Conversations of the given rows."""
        none = np.zeros((len(steps), 0), np.float32)
        images = np.zeros((len(steps), 0, 0, 0, 3), np.uint8)
        return Observation(images=images, state=none, instructions=tuple(self.texts[int(i)] for i in steps))


def build_text_policy(cfg: Config, device: str) -> TextPolicy:
    """Build the language model.

    Raises:
        ConfigError: the model does not speak.
    """
    env = EnvSpec(
        name="text",
        action_dim=1,
        tasks=("text",),
        states_per_task=(1,),
        action_space=ActionSpace(kind=ActionKind.text),
    )
    factory = POLICIES.get(cfg.model.model_type)
    if ActionKind.text not in factory.spec(cfg.model, env, 0).action_kinds:
        raise ConfigError(
            f"data.path={cfg.data.path} holds text, model '{cfg.model.model_type}' gives actions; use model=causal_lm, "
            "or a folder that `embodyrl collect` wrote."
        )
    request = PolicyRequest(
        env=env,
        value_dim=0,
        temperature=1.0,
        device=device,
        seed=cfg.seed,
        gradient_checkpointing=cfg.actor.gradient_checkpointing,
    )
    policy = factory.build(replace(cfg.model, num_action_chunks=1), request)
    assert isinstance(policy, TextPolicy)
    return policy


def load_text(cfg: Config, policy: TextPolicy) -> tuple[Samples, Samples | None]:
    """Rows for training and for validation; what is imitated is the reference and the token that ends it.

    Raises:
        ConfigError: a source or a row is wrong.
    """
    rows = open_rows(cfg.data, tokenizer=tokenizer_folder(cfg))
    split = len(rows) - rows.held_out
    training = _samples(rows, range(split), policy)
    return training, _samples(rows, range(split, len(rows)), policy) if rows.held_out else None


def _samples(rows: TextRows, part: range, policy: TextPolicy) -> Samples:
    chosen = [rows[i] for i in part]
    tokens = policy.encode_replies([row.reference for row in chosen])
    texts = [join_messages(row.messages) for row in chosen]
    return Samples(demos=Prompts(texts), steps=np.arange(len(part)), actions=tokens[:, :, None].astype(np.float32))


def text_facts(cfg: Config) -> list[tuple[str, str]]:
    """Name and text of the lines that describe a run before it starts."""
    rows = open_rows(cfg.data, tokenizer=tokenizer_folder(cfg))
    return [
        ("data", f"{cfg.data.path}: {len(rows)} rows of text, {rows.held_out} held out"),
        ("model", f"{cfg.model.path or cfg.model.model_type} · {cfg.model.precision.value}"),
        ("training", f"{cfg.runner.max_steps} steps of {cfg.actor.global_batch_size} samples"),
    ]
