"""Inputs of a language model: tokens, and image tensors of its processor."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodyrl.config.shared import SamplingSettings
from embodyrl.policies.causal_lm.sampling import find_stop
from embodyrl.policies.causal_lm.settings import CausalLMSettings
from embodyrl.policies.tensors import to_device
from embodyrl.text.chat import ChatTemplate, find_control_tokens, get_opened_tag, read_template, remove_control_tokens
from embodyrl.text.messages import MARK, Message, split_images, split_messages
from embodyrl.types import ROWS_AT_A_TIME, ByteArray, Observation

_CACHED_PROMPTS = 4096
_CACHED_PIXELS = 2**26


class Prompt(list[int]):
    """Token ids of one prompt, with the processor's additional tensors, such as images."""

    def __init__(self, ids: Sequence[int], image_inputs: dict[str, Tensor] | None = None) -> None:
        super().__init__(ids)
        self.image_inputs = image_inputs or {}
        """Image tensors by argument name of the model, and token types [1, T] (`..._type_ids`)."""


class PromptReader:
    """Converter of conversations and their images to prompts, with the chat template or by concatenation."""

    def __init__(
        self, processor: Any, cfg: CausalLMSettings, folder: Path, *, empty_prompt_token: int, pixels: int
    ) -> None:
        """Set up the reader from a tokenizer, or the processor of a vision-language model, and set its chat template.

        `folder` is the model's folder. A prompt without tokens becomes `empty_prompt_token`. The number of image values
        per observation, `pixels`, limits the number of cached prompts.
        """
        tokenizer = getattr(processor, "tokenizer", processor)
        if cfg.chat_template is not None:
            processor.chat_template = tokenizer.chat_template = read_template(cfg.chat_template)
        self._processor = processor
        self._reads_images, self._empty_prompt_token = hasattr(processor, "tokenizer"), empty_prompt_token
        special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        template = ChatTemplate.from_settings(cfg, folder)
        # The tokenizer also contains the default tokens of its class.
        self._template = template and replace(template, tokens=tokenizer.special_tokens_map)
        # Without chat, the folder's template still defines the tokens between turns, which a model may generate.
        removed_tokens = find_control_tokens(
            folder, template or ChatTemplate.read(folder), special, parts=self._reads_images
        )
        # The template writes these tokens between turns; inside a message, they would end the turn.
        self._removed_tokens = {} if template is None else removed_tokens
        self._hidden_tokens = {*removed_tokens.values()}
        self.opening_tag = "" if template is None else get_opened_tag(template, parts=self._reads_images)
        """Tag with which the generation prompt begins the reply, such as <think>; part of the text of the reply."""
        self._encode_cached = lru_cache(min(_CACHED_PROMPTS, 1 + _CACHED_PIXELS // max(1, pixels)))(self._encode)

    def __call__(self, obs: Observation) -> list[Prompt]:
        """Convert each conversation to a prompt; equal conversations share one `Prompt` object."""
        # Bytes and shape, because cache keys must be hashable.
        image_shapes = [image.shape if self._reads_images else () for image in obs.images]
        image_bytes = [image.tobytes() if self._reads_images else b"" for image in obs.images]
        return [
            self._encode_cached(*arguments)
            for arguments in zip(obs.instructions, image_bytes, image_shapes, strict=True)
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens of a reply without control tokens; other special tokens, such as tags, are text."""
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        return tokenizer.decode([token for token in tokens if token not in self._hidden_tokens])

    def strip_opening_tag(self, reply: str) -> str:
        """Return a target reply without the opening tag, which the generation prompt already contains."""
        tag = self.opening_tag.strip()
        if not tag or not reply.lstrip().startswith(tag):
            return reply
        rest = reply.lstrip().removeprefix(tag)
        return rest if tag == self.opening_tag else rest.lstrip()

    def get_end_token(self, end_tokens: Sequence[int]) -> int:
        """Return a reply's end token: from the chat template, else from the tokenizer, else the first of `end_tokens`.

        Llama-3 and Gemma have several end tokens, and their templates do not end a turn with the first token.
        """
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        candidates = [tokenizer.eos_token_id]
        if self._template is not None:
            text_after_reply = self._template.render_after_reply(parts=self._reads_images)
            candidates = [*tokenizer(text_after_reply, add_special_tokens=False)["input_ids"], *candidates]
        return next((token for token in candidates if token in end_tokens), end_tokens[0])

    def _encode(self, instruction: str, image_bytes: bytes, shape: tuple[int, ...]) -> Prompt:
        messages = [
            replace(m, content=remove_control_tokens(m.content, self._removed_tokens))
            for m in split_messages(instruction)
        ]
        if self._reads_images:
            return self._encode_images(messages, np.frombuffer(image_bytes, np.uint8).reshape(shape))
        if self._template is not None:
            text = self._template.render([{"role": m.role, "content": m.content} for m in messages])
            ids = self._processor(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self._processor("".join(map(_format_message, messages)))["input_ids"]
        return Prompt(ids or [self._empty_prompt_token])

    def _encode_images(self, messages: Sequence[Message], frames: ByteArray) -> Prompt:
        from PIL import Image

        token, remaining_frames = self._processor.image_token, iter(frames)
        # An image token in a text would be a placeholder without an image.
        turns = [
            [
                remove_control_tokens(part, [token]) if isinstance(part, str) else part
                for part in split_images(m.content)
            ]
            for m in messages
        ]
        images = [
            Image.fromarray(next(remaining_frames)[: part[0], : part[1]])
            for turn in turns
            for part in turn
            if not isinstance(part, str)
        ]
        if self._template is not None:
            remaining_images = iter(images)
            conversation = [
                {
                    "role": m.role,
                    "content": [
                        {"type": "text", "text": part}
                        if isinstance(part, str)
                        else {"type": "image", "image": next(remaining_images)}
                        for part in turn
                        if part
                    ],
                }
                for m, turn in zip(messages, turns, strict=True)
            ]
            without_images = [
                {**turn, "content": [{k: v for k, v in part.items() if k != "image"} for part in turn["content"]]}
                for turn in conversation
            ]
            inputs = self._processor.apply_chat_template(
                conversation,
                chat_template="{{ rendered }}",
                rendered=self._template.render(without_images),
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
        else:
            texts = ("".join(part if isinstance(part, str) else MARK for part in turn) for turn in turns)
            text = "".join(
                _format_message(Message(role=m.role, content=t)) for m, t in zip(messages, texts, strict=True)
            )
            text = remove_control_tokens(text, [token]).replace(MARK, token)
            inputs = self._processor(text=[text], images=[images] if images else None, return_tensors="pt")
        ids = inputs.pop("input_ids")[0].tolist()
        # The mask of a single prompt is all ones; `pad_left` builds the mask of a batch.
        inputs.pop("attention_mask")
        return Prompt(ids or [self._empty_prompt_token], dict(inputs))


def get_reply_text(reader: PromptReader, tokens: Sequence[int], sampling: SamplingSettings) -> str:
    """Return the text of a reply up to the stop string that ended it, after the opening tag of the prompt."""
    text, min_characters = reader.decode(tokens), 0
    if sampling.stop and sampling.min_new_tokens > 1:  # stop strings before the minimum length do not end a reply
        min_characters = len(reader.decode(tokens[: sampling.min_new_tokens - 1]))
    return reader.opening_tag + text[: find_stop(text, min_characters, sampling.stop)]


def _format_message(message: Message) -> str:
    return f"|{message.content}|" if message.role == "tool" else message.content


def pad_left(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad token id lists on the left; return ids and attention mask, both [B, longest]."""
    width = max(map(len, rows))
    ids = to_device([[pad] * (width - len(r)) + list(r) for r in rows], device)
    mask = to_device([[0] * (width - len(r)) + [1] * len(r) for r in rows], device)
    return ids, mask


def join_image_inputs(prompts: Sequence[Prompt], replies: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Return the additional tensors of a batch of prompts, extended for replies of the given lengths.

    Image tensors are concatenated along the first dimension, and padded with zeros in the other dimensions, which
    models treat as padding. Token types get zeros for padding and replies.
    """
    names = dict.fromkeys(name for prompt in prompts for name in prompt.image_inputs)
    joined = {}
    for name in names:
        if name.endswith("_type_ids"):
            # Token types are padded on the left like the prompts, and on the right for their replies.
            width = max(len(p) + n for p, n in zip(prompts, replies, strict=True))
            rows = [
                nn.functional.pad(
                    p.image_inputs[name][0] if name in p.image_inputs else torch.zeros(len(p), dtype=torch.int64),
                    (width - len(p) - n, n),
                )
                for p, n in zip(prompts, replies, strict=True)
            ]
            joined[name] = to_device(torch.stack(rows), device)
            continue
        parts = [p.image_inputs[name] for p in prompts if name in p.image_inputs]
        sizes = [max(part.shape[d] for part in parts) for d in range(1, parts[0].ndim)]
        padded = [
            nn.functional.pad(p, [x for d in range(p.ndim - 1, 0, -1) for x in (0, sizes[d - 1] - p.shape[d])])
            for p in parts
        ]
        joined[name] = to_device(torch.cat(padded), device)
    return joined


def split_observations(obs: Observation) -> list[tuple[slice, Observation]]:
    """Split observations into parts of at most `ROWS_AT_A_TIME` rows; return the slice and the rows of each part."""
    slices = [slice(start, start + ROWS_AT_A_TIME) for start in range(0, len(obs), ROWS_AT_A_TIME)]
    return [
        (rows, Observation(images=obs.images[rows], state=obs.state[rows], instructions=obs.instructions[rows]))
        for rows in slices
    ]
