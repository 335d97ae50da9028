"""Lookup of reward functions: registered names, import paths, HTTP services and reward models."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from embodyrl.config.paths import resolve_asset
from embodyrl.errors import CheckpointError, UnknownNameError
from embodyrl.registry import REWARDS, takes
from embodyrl.text.chat import ChatTemplate, find_control_tokens, remove_control_tokens
from embodyrl.text.model_folder import SAFE_OPTIONS, load_safely, read_config


class Reward(Protocol):
    """Interface of reward functions; an exception counts as reward 0 and is reported."""

    def __call__(self, prompt: str, response: str, reference: str) -> float | Mapping[str, float]:
        """Return the reward of a response: one number, ideally in 0..1, or numbers by component name."""
        ...


COMPARING_REWARDS = ("exact", "overlap", "math", "gsm8k", "gsm8k_flexible", "choice", "countdown")
"""Built-in rewards that compare a reply with one text."""


def find_reward(name: str) -> Reward:
    """Return the reward function of a registered name, package.module:function, http(s) address or model folder.

    Raises:
        UnknownNameError: there is no reward with this name.
    """
    if name.startswith(("http://", "https://")):
        return RemoteReward(name)
    folder = resolve_asset(name)
    if "/" in name and (folder / "config.json").is_file():
        return RewardModel(folder)
    function = REWARDS.get(name)
    if isinstance(function, type) or not takes(3)(function):
        raise UnknownNameError(f"reward '{name}' is {function!r:.80}, not a function of (prompt, response, reference).")
    return function


_MAX_RESPONSE_BYTES = 1 << 16
"""Maximum size of the HTTP response of a reward service, in bytes."""


@dataclass(frozen=True)
class RemoteReward:
    """HTTP reward service: POST {prompt, response, reference}; the reply is a number or {"reward": number}."""

    url: str
    components = ("remote",)

    def __call__(self, prompt: str, response: str, reference: str) -> float:
        import urllib.request

        body = json.dumps({"prompt": prompt, "response": response, "reference": reference}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:  # the alarm of the reward process limits the time
            text = reply.read(_MAX_RESPONSE_BYTES + 1)
        if len(text) > _MAX_RESPONSE_BYTES:
            raise ValueError(f"The reply of {self.url} has more than {_MAX_RESPONSE_BYTES} bytes.")
        value = json.loads(text)
        return float(value["reward"] if isinstance(value, dict) else value)


VALUE_FILE = "value_head/model.safetensors"
"""Path of the value head in a model folder written by `embodyrl sft objective.name=preference`."""


@dataclass
class RewardModel:
    """Reward model: a sequence classifier with one output, or a language model with a value head.

    The input is the conversation in the model's chat template, without control tokens in the texts of prompt and reply.
    A value head is evaluated at the end of the reply.
    """

    folder: Path
    components = ("model",)

    def prepare(self) -> None:
        """Load the model in advance, so that loading does not count towards the time limit.

        Raises:
            CheckpointError: the folder contains no reward model, or names weights or models outside.
            ValueError: the model needs its own programs, or a file is malformed.
        """
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

        self._head: Any = None
        kind: Any = AutoModelForSequenceClassification
        if (self.folder / VALUE_FILE).is_file():
            from safetensors.torch import load_file

            kind, self._head = AutoModelForCausalLM, load_file(self.folder / VALUE_FILE)
        with load_safely(self.folder):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(self.folder, **SAFE_OPTIONS)
            config = read_config(self.folder)
            model: Any = kind.from_pretrained(
                self.folder, config=config, use_safetensors=True, dtype=torch.float32, **SAFE_OPTIONS
            )
        if self._head is None and model.config.num_labels != 1:
            raise CheckpointError(
                f"{self.folder}: a reward model must have 1 output, not {model.config.num_labels}. Use another model."
            )
        special = {token.content: i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        source = self._tokenizer.chat_template and self._tokenizer.get_chat_template()
        self._template = ChatTemplate(source, self._tokenizer.special_tokens_map) if source else None
        self._removed_tokens = find_control_tokens(self.folder, self._template, special)
        self._model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def __call__(self, prompt: str, response: str, reference: str) -> float:
        import torch

        prompt, response = (remove_control_tokens(text, self._removed_tokens) for text in (prompt, response))
        if plain := self._template is None:
            text = prompt + response
        else:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            text = self._template.render(turns, reply=self._head is not None)
        ids = self._tokenizer(text, add_special_tokens=plain, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            ids = ids.to(self._model.device)
            if self._head is None:
                return float(self._model(input_ids=ids).logits)
            last = self._model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1].cpu()
            return float(last @ self._head["weight"][0] + self._head["bias"][0])
