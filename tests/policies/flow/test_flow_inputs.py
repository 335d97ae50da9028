"""Images, prompts and statistics of flow policies against formulas of the public code."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file
from test_vla_policy import settings
from tiny_vla import write_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers

from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies.flow.prompts import (
    PI0_PROMPT,
    PI05_PROMPT,
    SMOLVLA_PROMPT,
    FlowPromptEncoder,
    PromptFormat,
    format_state,
)
from embodyrl.policies.flow.vla.folder import from_deltas, pad_dims, read_side_files, to_deltas
from embodyrl.policies.flow.vla.network import compute_fitted_size, pad_centered, pad_left_top
from embodyrl.policies.flow.vla.statistics import LEROBOT_EPS, FlowStatistics, read_lerobot, read_openpi


def frames(height, width, count=2):
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


# --- images ---


def test_image_padding_is_centered():
    wide = pad_centered(frames(20, 40), 28)
    assert (wide.shape, wide.dtype) == ((2, 3, 28, 28), torch.float32)
    assert (wide[:, :, :7] == -1).all()
    assert (wide[:, :, 21:] == -1).all()
    assert (wide[:, :, 7:21].flatten(2) > -1).any(-1).all()
    tall = pad_centered(frames(30, 9), 28)  # 8.4 wide, cut to 8
    assert (tall[..., :10] == -1).all()
    assert (tall[..., 18:] == -1).all()


def test_centered_frames_match_pillow():
    given = frames(256, 256)
    expected = [np.asarray(Image.fromarray(frame).resize((224, 224), Image.Resampling.BILINEAR)) for frame in given]
    found = (pad_centered(given, 224) + 1) * 127.5
    np.testing.assert_allclose(found.permute(0, 2, 3, 1), np.stack(expected), atol=1e-3)


def test_images_are_padded_on_the_left_and_top():
    wide = pad_left_top(frames(20, 40), 32)
    assert (wide[:, :, :16] == -1).all()
    assert (wide[:, :, 16:].flatten(2) > -1).any(-1).all()
    assert (pad_left_top(frames(40, 20), 32)[..., :16] == -1).all()


def test_left_top_padding_resizes_bilinearly():
    """Scaled by two: the second output pixel is a quarter of the distance between the first two input pixels."""
    given = frames(4, 4, 1)
    row = (pad_left_top(given, 8)[0, 0, 0] + 1) * 127.5
    first, second = map(float, given[0, 0, :2, 0])
    assert row[:2].tolist() == pytest.approx([first, 0.75 * first + 0.25 * second], abs=1e-3)


@pytest.mark.parametrize("pad", [pad_centered, pad_left_top])
def test_frames_of_the_right_size_are_not_resized(pad):
    given = frames(28, 28)
    given.flags.writeable = False
    expected = torch.from_numpy(given.copy()).permute(0, 3, 1, 2) / 255.0 * 2 - 1
    torch.testing.assert_close(pad(given, 28), expected, atol=1e-6, rtol=0.0)
    assert (expected.min(), expected.max()) == (-1, 1)


def test_resized_image_sizes_match_the_reference():
    assert compute_fitted_size(frames(480, 640, 1), 224) == (168, 224)
    assert compute_fitted_size(frames(480, 640, 1), 512) == (384, 512)
    assert compute_fitted_size(frames(100, 33, 1), 28) == (28, 9)


# --- prompts ---


@pytest.fixture
def tokenizer_file(tmp_path):
    """Write a tokenizer with one token per character."""
    characters = "abcdefghijklmnopqrstuvwxyzTSA0123456789-,:; \n"
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<unk>", "<bos>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def spelled(prompts, ids):
    return "".join(prompts._tokenizer.id_to_token(i) for i in ids)


def test_pi0_prompt_matches_reference(tokenizer_file):
    prompts = FlowPromptEncoder(tokenizer_file, PI0_PROMPT)
    assert spelled(prompts, prompts.encode(" pick_up the\nbowl ")) == "<bos>pick up the bowl\n"


def test_pi05_prompt_matches_reference(tokenizer_file):
    prompts = FlowPromptEncoder(tokenizer_file, PI05_PROMPT)
    state = np.array([-1.0, 0.0, 1.0, -1.5, 2.0], np.float32)
    expected = "<bos>Task: open it, State: 0 128 255 -1 255;\nAction: "
    assert spelled(prompts, prompts.encode("open_it\n", state)) == expected
    with pytest.raises(AssertionError, match="need the state"):
        prompts.batch(["open it"])


def test_smolvla_prompt_matches_reference(tokenizer_file):
    """No start token, no cleaning, and one newline."""
    prompts = FlowPromptEncoder(tokenizer_file, SMOLVLA_PROMPT)
    for task in ("pick up", "pick up\n"):
        assert spelled(prompts, prompts.encode(task)) == "pick up\n"


def test_states_are_binned_as_text():
    """256 bins of width 1/128; an edge belongs to the upper bin."""
    assert format_state([-1.0, -1.0 + 1 / 128, -1e-4, 0.0, 0.999, 1.0, -1.0001]) == "0 1 127 128 255 255 -1"


def test_batches_are_padded_on_the_right(tokenizer_file):
    prompts = FlowPromptEncoder(tokenizer_file, SMOLVLA_PROMPT, tasks=["open", "close it"])
    ids, mask = prompts.batch(["open", "close it"])
    assert ids.shape == (2, 9)
    assert mask.sum(1).tolist() == [5, 9]
    assert not ids[0, 5:].any()
    assert mask[0, :5].all()
    wider, _ = prompts.batch(["a longer one"])
    assert wider.shape == (1, 16)


def test_prompts_beyond_the_token_limit_are_rejected(tokenizer_file):
    prompts = FlowPromptEncoder(tokenizer_file, PromptFormat(template="{task}", max_tokens=48))
    assert prompts.batch(["x" * 48])[0].shape == (1, 48)
    with pytest.raises(ConfigError, match="has 49 tokens, but this model supports 48"):
        prompts.batch(["x" * 49])


def test_unusable_tokenizers_are_rejected(tokenizer_file, tmp_path):
    with pytest.raises(CheckpointError, match="no token '<s>'"):
        FlowPromptEncoder(tokenizer_file, PromptFormat(template="{task}", max_tokens=48, bos="<s>"))
    with pytest.raises(CheckpointError, match="PaliGemma's"):
        FlowPromptEncoder(tmp_path / "none.json", PI0_PROMPT)


# --- statistics ---

NUMBERS = {"mean": [1.0, -2.0], "std": [0.5, 0.0], "q01": [-1.0, 3.0], "q99": [3.0, 3.0]}


@pytest.fixture
def statistics(tmp_path):
    path = tmp_path / "norm_stats.json"
    path.write_text(json.dumps({"norm_stats": {"state": NUMBERS, "actions": NUMBERS}}))
    return read_openpi(path)


def test_mean_std_normalization_matches_reference(statistics):
    affine = statistics["state"].mean_std()
    found = affine.normalize([[2.0, -2.0 + 1e-6, 9.0]])
    np.testing.assert_allclose(found, [[1.0 / 0.500001, 1.0, 9.0]], rtol=1e-5)
    np.testing.assert_allclose(affine.unnormalize(found), [[2.0, -2.0 + 1e-6, 9.0]], rtol=1e-6)


def test_quantile_normalization_matches_reference(statistics):
    """(x - q01) / (q99 - q01 + eps) * 2 - 1; further dimensions are unchanged, and a range of zero stays finite."""
    affine = statistics["actions"].quantiles()
    found = affine.normalize([[3.0, 3.0, 9.0], [1.0, 3.0, -9.0]])
    np.testing.assert_allclose(found, [[1.0 - 5e-7, -1.0, 9.0], [-5e-7, -1.0, -9.0]], atol=1e-6)
    np.testing.assert_allclose(affine.unnormalize(found)[:, :2], [[3.0, 3.0], [1.0, 3.0]], atol=1e-5)
    assert statistics["actions"].quantiles(LEROBOT_EPS).scale[0] == pytest.approx(2.0, abs=1e-7)


@pytest.mark.parametrize(
    "names",
    [
        ("observation.state.mean", "observation.state.std", "action.mean", "action.std"),
        (
            "normalize_inputs.buffer_observation_state.mean",
            "normalize_inputs.buffer_observation_state.std",
            "unnormalize_outputs.buffer_action.mean",
            "unnormalize_outputs.buffer_action.std",
        ),
    ],
    ids=["processor", "older model"],
)
def test_lerobot_statistics_are_read(names, tmp_path):
    rows = [[1.0, 2.0], [0.5, 0.25], [3.0], [4.0]]
    tensors = {name: torch.tensor(row) for name, row in zip(names, rows, strict=True)}
    tensors["observation.images.top.mean"] = torch.zeros(3, 1, 1)
    found = read_lerobot(tensors, tmp_path)
    assert found["state"].numbers == {"mean": (1.0, 2.0), "std": (0.5, 0.25)}
    assert found["actions"].numbers == {"mean": (3.0,), "std": (4.0,)}
    with pytest.raises(CheckpointError, match="no statistics of actions"):
        read_lerobot({names[0]: tensors[names[0]]}, tmp_path)


def test_unnorm_key_is_optional_if_all_statistics_are_equal(tmp_path):
    both = [f"normalize_inputs.{robot}_buffer_observation_state.mean" for robot in ("so100-blue", "so100-red")]
    tensors = {both[0]: torch.tensor([1.0, 2.0]), both[1]: torch.tensor([1.0, 2.0])}
    tensors |= {f"unnormalize_outputs.{r}_buffer_action.mean": torch.tensor([3.0]) for r in ("so100-blue", "so100-red")}
    assert read_lerobot(tensors, tmp_path)["state"].numbers == {"mean": (1.0, 2.0)}


def test_unusable_flow_statistics_are_rejected(tmp_path):
    with pytest.raises(CheckpointError, match="missing or malformed"):
        read_openpi(tmp_path / "norm_stats.json")
    with pytest.raises(CheckpointError, match="no usable q01 and q99; found only: mean"):
        FlowStatistics(numbers={"mean": (1.0,)}, where="here").quantiles()
    with pytest.raises(CheckpointError, match="no usable mean and std"):
        FlowStatistics(numbers={"mean": (1.0,), "std": (1.0, 2.0)}, where="here").mean_std()
    path = tmp_path / "norm_stats.json"
    path.write_text(json.dumps({"norm_stats": {part: {"mean": [float("nan")]} for part in ("state", "actions")}}))
    with pytest.raises(CheckpointError, match="not finite"):
        read_openpi(path)


def test_delta_actions_use_the_first_dimensions():
    """As in pi0_libero: six of seven dimensions, without the gripper."""
    state, actions = np.arange(8.0)[None], np.ones((1, 3, 7))
    deltas = to_deltas(actions, state, 6)
    assert deltas[0, 2].tolist() == [1, 0, -1, -2, -3, -4, 1]
    np.testing.assert_array_equal(from_deltas(deltas, state, 6), actions)


def test_dimensions_are_padded_with_zeros():
    assert pad_dims(np.ones((2, 3, 7)), 32).sum() == 42
    assert pad_dims([1.0, 2.0], 4).tolist() == [1, 2, 0, 0]
    with pytest.raises(AssertionError, match="do not fit"):
        pad_dims(np.ones(33), 32)


def test_sft_statistics_are_written_in_lerobot_format(tmp_path):
    """lerobot does not read dataset_statistics.json: old numbers in its own files would scale actions wrongly."""
    folder = write_checkpoint(tmp_path / "base", "smolvla", state_dim=8, action_dim=6, lerobot_statistics=True)
    config = json.loads((folder / "config.json").read_text())
    config["output_features"] = {"action": {"type": "ACTION", "shape": [6]}}
    (folder / "config.json").write_text(json.dumps(config))
    entry = {
        part: {name: [float(value)] * size for value, name in enumerate(("mean", "std", "q01", "q99"), 3)}
        for part, size in (("proprio", 8), ("action", 7))
    }
    (folder / "dataset_statistics.json").write_text(json.dumps({"table": entry}))
    (name,) = (path.name for path in folder.glob("policy_*"))
    written = read_side_files(folder, settings("smolvla", folder))
    (tmp_path / name).write_bytes(written[name])
    found = read_lerobot(load_file(tmp_path / name), tmp_path)
    assert found["actions"].numbers["mean"] == (3.0,) * 7
    assert found["state"].numbers["q99"] == (6.0,) * 8
    assert json.loads(written["config.json"])["output_features"]["action"]["shape"] == [7]


def test_published_quantiles_of_a_constant_column_are_kept():
    """openpi: (x - q01) / (q99 - q01 + 1e-6) * 2 - 1, also where q01 = q99; and the inverse."""
    units = FlowStatistics(numbers={"q01": (0.3, -1.0), "q99": (0.3, 1.0)}, where="file").quantiles()
    assert units.scale == pytest.approx((5e-7, 1.0000005), rel=1e-9)
    values = np.array([[0.3, -1.0], [0.3 + 1e-6, 0.0], [0.3 + 5e-7, 1.0]])
    wanted = (values - [0.3, -1.0]) / np.array([1e-6, 2 + 1e-6]) * 2 - 1
    np.testing.assert_allclose(units.normalize(values), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(units.unnormalize(wanted), values, rtol=1e-6, atol=1e-7)
