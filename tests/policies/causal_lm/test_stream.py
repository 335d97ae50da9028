"""Text of a reply, token by token."""

import random
from functools import partial

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from embodyrl.policies.causal_lm.stream import ReplyText


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and an end token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")


def parts_of(tokenizer: PreTrainedTokenizerFast, said: str, *stops: str) -> tuple[list[str], bool]:
    text, tokens = ReplyText(partial(tokenizer.decode, skip_special_tokens=True), stops), tokenizer(said)["input_ids"]
    parts = []
    for i, token in enumerate(tokens):
        parts.append(text.add(token, last=i + 1 == len(tokens)))
        if text.stopped:
            break
    return parts, text.stopped


def test_streamed_pieces_are_whole_characters_and_join_to_the_reply(tokenizer: PreTrainedTokenizerFast):
    parts, _ = parts_of(tokenizer, "a é 漢 🎉 z")
    assert [part for part in parts if part] == ["a", " ", "é", " ", "漢", " ", "🎉", " ", "z"]


def test_random_replies_join_to_the_text_before_the_first_stop_string(tokenizer: PreTrainedTokenizerFast):
    draw = random.Random(0)
    for _ in range(300):
        said = "".join(draw.choice("ab🎉é") for _ in range(draw.randint(1, 12)))
        stops = ["".join(draw.choice("ab🎉é") for _ in range(draw.randint(1, 3))) for _ in range(draw.randint(0, 3))]
        parts, stopped = parts_of(tokenizer, said, *stops)
        # Generation ends with the first token that completes a stop string, which is removed with all after it.
        ends = [said.find(stop) + len(stop) for stop in stops if stop in said]
        read = said[: min(ends)] if ends else said
        expected = read[: min((read.find(stop) for stop in stops if stop in read), default=len(read))]
        assert ("".join(parts), stopped) == (expected, bool(ends)), (said, stops)


def test_incomplete_last_character_is_shown_as_replacement(tokenizer: PreTrainedTokenizerFast):
    text = ReplyText(partial(tokenizer.decode, skip_special_tokens=True), ())
    first, second, *_ = tokenizer("🎉")["input_ids"]
    assert text.add(first, last=False) == ""
    assert text.add(second, last=True) == "\ufffd"
