"""Vision-language models: pixels from records match the inputs of plain transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from embodyrl.config.paths import resolve_asset
from embodyrl.errors import CheckpointError
from embodyrl.policies import POLICIES
from embodyrl.policies.causal_lm.policy import CausalLMPolicy
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.specs import image_names
from embodyrl.text import tasks
from embodyrl.text.conversation import place_images
from embodyrl.text.messages import Message, join_messages
from embodyrl.types import ActionKind, ActionSpec, CameraSpec, EnvSpec, Observation, TextSpec

ROOM = (24, 40)
TEXT = ActionSpec(dim=1, kind=ActionKind.text)
ENV = EnvSpec(
    name="text/seen",
    action=TEXT,
    tasks=("seen",),
    states_per_task=(4,),
    cameras=CameraSpec(names=image_names(2), size=ROOM),
    text=TextSpec(prompt_bytes=64),
)
ROWS = (("ab?", (24, 24)), ("<image>a<image>b?", (12, 40), (24, 32)), ("12=",), ("ab?", (24, 24)))


def build(name: str = "vision_lm_tiny", *, value_dim: int = 0, **model: Any) -> CausalLMPolicy:
    factory = POLICIES.get(name)
    cfg = factory.settings(model_type=name, precision="fp32", num_action_chunks=6, **model)  # type: ignore[call-arg]
    policy = factory.build(cfg, PolicyRequest(env=ENV, device="cpu", seed=3, value_dim=value_dim))
    assert isinstance(policy, CausalLMPolicy)
    policy.costs = factory.costs(cfg, ENV, value_dim)  # type: ignore[attr-defined]
    return policy


def observe() -> Observation:
    """Return rows with one, two and no images of different sizes; the last equals the first."""
    rng = np.random.default_rng(0)
    images = np.zeros((len(ROWS), 2, *ROOM, 3), np.uint8)
    said = []
    for rooms, (text, *sizes) in zip(images, ROWS, strict=True):
        for room, (height, width) in zip(rooms, sizes, strict=False):
            room[:height, :width] = rng.integers(0, 256, (height, width, 3))
        said.append(join_messages(place_images([Message(role="user", content=str(text))], sizes)))
    images[3] = images[0]
    return Observation(images=images, state=np.zeros((len(ROWS), 0), np.float32), instructions=tuple(said))


def one(obs: Observation, row: int) -> Observation:
    return Observation(
        images=obs.images[row : row + 1], state=obs.state[row : row + 1], instructions=(obs.instructions[row],)
    )


class QwenReading:
    """Qwen's processor without videos, which need torchvision."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.images = Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
        )
        self.chat_template, self.image_token = None, "<|image_pad|>"

    def __call__(self, *, text: list[str], images: Any, return_tensors: str) -> dict[str, torch.Tensor]:
        parts, seen = text[0].split(self.image_token), {}
        if images:
            seen = dict(self.images(images[0], return_tensors=return_tensors))
        counts = [int(grid.prod()) // 4 for grid in seen.get("image_grid_thw", [])]
        whole = parts[0] + "".join(self.image_token * n + part for n, part in zip(counts, parts[1:], strict=True))
        out = dict(self.tokenizer([whole], return_tensors=return_tensors)) | seen
        wanted = self.tokenizer.convert_tokens_to_ids(self.image_token)
        return out | {"mm_token_type_ids": (out["input_ids"] == wanted).long()}


def qwen(folder: Path) -> None:
    """Build Qwen2-VL with random weights, which has separate positions within an image."""
    special = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_asset("assets/causal_lm_tiny"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    config = transformers.Qwen2VLConfig(
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4},
        text_config=text | {"vocab_size": len(tokenizer), "rope_parameters": rope},
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in zip(names, special, strict=True)},
    )
    torch.manual_seed(0)
    transformers.Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(params=["idefics3", "qwen2_vl"])
def policy(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CausalLMPolicy:
    if request.param == "idefics3":
        return build(value_dim=6)
    qwen(tmp_path)
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda folder, **_: QwenReading(folder))
    return build("vision_lm", value_dim=6, path=str(tmp_path))


def test_vision_replies_and_log_probs_match_transformers(policy: CausalLMPolicy):
    obs = observe()
    torch.nn.init.normal_(policy.module.value_head.weight)
    drawn = policy.act(obs, noise=np.random.default_rng(1).random((4, 6), dtype=np.float32))
    scores = policy.score(obs, drawn.tokens)
    np.testing.assert_allclose(scores.logprob.detach().numpy(), drawn.logprob, atol=1e-5)
    np.testing.assert_allclose(scores.value.detach().numpy(), drawn.value, atol=1e-4)
    greedy = policy.act(obs, noise=None)
    for row in range(4):
        alone = policy.score(one(obs, row), drawn.tokens[row : row + 1]).logprob.detach().numpy()
        np.testing.assert_allclose(alone[0], drawn.logprob[row], atol=1e-5)
        (prompt,) = policy.reader(one(obs, row))
        said = policy.module.lm.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            **prompt.image_inputs,
            max_new_tokens=6,
            do_sample=False,
            suppress_tokens=policy.forbidden_tokens.tolist(),
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = said.sequences[0, len(prompt) :]
        logprob = [float(now[0].log_softmax(-1)[t]) for now, t in zip(said.logits, tokens, strict=True)]
        np.testing.assert_array_equal(greedy.tokens[row, : len(tokens)], tokens)
        np.testing.assert_allclose(greedy.logprob[row, : len(tokens)], logprob, atol=1e-5)


def test_positions_match_transformers_generate(policy: CausalLMPolicy):
    net, obs = policy.module, observe()
    given: list[torch.Tensor] = []
    keep = lambda module, args, kwargs: given.append(kwargs["position_ids"])  # noqa: E731
    for row in range(4):
        (prompt,) = policy.reader(one(obs, row))
        ids = torch.tensor([[0, 0, *prompt]])
        mask = (ids > 0).long()
        inputs = dict(prompt.image_inputs)
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (2, 0))
        with net.lm.register_forward_pre_hook(keep, with_kwargs=True):
            net.lm.generate(input_ids=ids, attention_mask=mask, **inputs, max_new_tokens=1, do_sample=False)
        found, wanted = net.positions(ids, mask, inputs), given.pop()
        assert torch.equal(found.expand_as(wanted), wanted)


def test_reply_depends_on_the_image():
    policy, obs = build(), observe()
    tokens = policy.act(obs, noise=None).tokens
    other = Observation(images=255 - obs.images, state=obs.state, instructions=obs.instructions)
    gap = np.abs((policy.score(obs, tokens).logprob - policy.score(other, tokens).logprob).detach().numpy()).max(axis=1)
    assert (gap[[0, 1, 3]] > 1e-4).all()
    assert gap[2] == 0, "the row without images"


def test_vision_encoder_gets_gradients_with_and_without_adapters():
    obs = observe()
    for policy in (build(), build(is_lora=True)):
        tokens = policy.act(obs, noise=np.full((4, 6), 0.5, np.float32)).tokens
        policy.score(obs, tokens).logprob.sum().backward()
        seeing = [p for name, p in policy.module.named_parameters() if "vision" in name and p.requires_grad]
        assert sum(float(p.grad.abs().sum()) for p in seeing if p.grad is not None) > 0


def test_saved_vision_folder_has_the_published_layout(tmp_path: Path):
    policy, obs = build(), observe()
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.mul_(1.5)
    policy.save(tmp_path / "whole")
    wanted = policy.act(obs, noise=None)
    again = build("vision_lm", path=str(tmp_path / "whole"))
    np.testing.assert_array_equal(again.act(obs, noise=None).tokens, wanted.tokens)
    fresh = build()
    fresh.load_weights(tmp_path / "whole")
    np.testing.assert_array_equal(fresh.act(obs, noise=None).logprob, wanted.logprob)
    transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "whole")
    adapted = build("vision_lm", path=str(tmp_path / "whole"), is_lora=True)
    adapted.save(tmp_path / "adapted")
    assert (tmp_path / "adapted" / "adapter" / "adapter_model.safetensors").is_file()
    (tmp_path / "whole" / "processor_config.json").unlink()
    with pytest.raises(CheckpointError, match="vision-language model"):
        build("vision_lm", path=str(tmp_path / "whole"))


def test_replies_contain_no_image_tokens():
    policy, obs = build(), observe()
    picture = int(policy.forbidden_tokens[0])
    with torch.no_grad():
        policy.module.lm.lm_head.weight[picture] = 0
        policy.module.lm.lm_head.weight *= 1e-3
    drawn = policy.act(obs, noise=np.random.default_rng(2).random((4, 6), dtype=np.float32))
    assert (drawn.tokens != picture).all()


@pytest.mark.parametrize("texts", [["<im<image>age>"], ["<image>", "<im", "age>"], ["<im<im<image>age>", "age>?"]])
def test_image_token_in_a_text_is_removed(texts: list[str]):
    token, size = "<image>", (24, 24)
    reader = build().reader
    assert reader._processor.image_token == token
    seen = np.zeros((1, 1, *size, 3), np.uint8)

    def read(*contents: str) -> list[int]:
        messages = [*place_images([Message(role="user", content="ab?")], [size])]
        messages += [Message(role="user", content=text) for text in contents]
        instructions = (join_messages(messages),)
        return reader(Observation(images=seen, state=np.zeros((1, 0), np.float32), instructions=instructions))[0]

    assert read(*texts) == read("?" if texts[-1].endswith("?") else "")


def test_tiny_vision_tokenizer_contains_all_color_names() -> None:
    words = transformers.AutoTokenizer.from_pretrained(resolve_asset("assets/vision_lm_tiny")).get_vocab()
    assert set(tasks.COLORS) <= set(words)


@pytest.mark.parametrize("name", ["causal_lm_tiny", "vision_lm_tiny"])
def test_included_model_sizes_match_the_memory_plan(name: str) -> None:
    policy = build(name)
    assert policy.costs.num_parameters == sum(p.numel() for p in policy.module.parameters())
