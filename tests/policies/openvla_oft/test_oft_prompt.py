import numpy as np
import pytest
from llama_tokenizer import write_tokenizer
from tokenizers import Tokenizer, models

from embodyrl.config.paths import assets_dir
from embodyrl.errors import CheckpointError
from embodyrl.policies.openvla_oft.inputs import PromptEncoder

HEAD = [1, 512, 29901, 1724, 3158, 881, 278, 19964, 2125, 304]
TAIL = [29973, 13, 3744, 29901, 29871]
# Recorded with Llama-2's own tokenizer.
RECORDED = {
    "put both the alphabet soup and the tomato sauce in the basket": [
        1925, 1716, 278, 22968, 22300, 322, 278, 6454, 1219, 12507, 346, 297, 278, 25972,
    ],
    "pick up the black bowl between the plate and the ramekin and place it on the plate": [
        5839, 701, 278, 4628, 12580, 29880, 1546, 278, 15284, 322, 278, 364, 420, 9089, 322, 2058, 372, 373, 278, 15284,
    ],
}  # fmt: skip


@pytest.fixture
def encoder(tmp_path):
    return PromptEncoder(write_tokenizer(tmp_path), bos_token_id=1, tasks=("put the", "pick up the black bowl"))


@pytest.mark.parametrize("instruction", RECORDED)
def test_token_ids_match_recorded_ids(encoder, instruction):
    assert list(encoder.encode(instruction)) == HEAD + RECORDED[instruction] + TAIL


def test_prompts_match_golden_ids(encoder, golden):
    for instruction, name in (("pick up the black bowl", "prompt_a"), ("put the", "prompt_b")):
        assert list(encoder.encode(instruction)) == golden("inputs")[name].tolist()


def test_prompts_are_lower_case(encoder):
    assert encoder.encode("Put The") == encoder.encode("put the")


def test_prompt_batch_is_padded_to_the_longest_task(encoder):
    ids, lengths = encoder.batch(["put the"])
    assert ids.shape == (1, 21)
    assert lengths.tolist() == [17]
    assert ids[0, 17:].tolist() == [0] * 4


def test_prompt_batch_width_is_a_multiple_of_16(encoder):
    ids, lengths = encoder.batch(["put the", *RECORDED])
    assert lengths.tolist() == [17, 29, 35]
    assert ids.shape == (3, 48)
    assert ids[1, :29].tolist() == list(encoder.encode(next(iter(RECORDED))))


def test_tokenizer_of_another_model_is_rejected(tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(path))
    with pytest.raises(CheckpointError, match="not a Llama tokenizer"):
        PromptEncoder(path, bos_token_id=1)


def test_error_names_the_broken_tokenizer_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        PromptEncoder(path, bos_token_id=1)


def test_tiny_tokenizer_has_one_token_per_task_word():
    encoder = PromptEncoder(assets_dir() / "openvla_oft_tiny" / "tokenizer.json", bos_token_id=1)
    instruction = "put the white mug on the plate and put the chocolate pudding to the right of the plate"
    # BOS, "In", ":", 7 words, the instruction, "?", newline, "Out", ":", empty piece
    ids = encoder.encode(instruction)
    assert len(ids) == 1 + 2 + 7 + len(instruction.split()) + 5
    assert ids[0] == 1
    assert ids[-1] == encoder.empty_token_id
    strange = encoder.encode("Zürich: 47.11 £ @~ 机器人")
    assert max(*ids, *strange) < 960 - 256
    assert np.all(np.array(strange) > 0), "bytes, not <unk>, for unknown characters"
