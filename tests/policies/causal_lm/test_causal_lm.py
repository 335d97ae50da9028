"""The language-model policy: sampling, log-probabilities and checkpoints."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from settings import model_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from embodyrl.config.shared import Precision, SamplingSettings
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.policies import POLICIES
from embodyrl.policies.causal_lm import _count_parameters
from embodyrl.policies.causal_lm.policy import CausalLMPolicy
from embodyrl.policies.causal_lm.sampling import choose, truncate
from embodyrl.policies.causal_lm.settings import TextLoraSettings
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.settings import ModelSettings
from embodyrl.text.messages import Message, join_messages
from embodyrl.types import ActionKind, ActionSpec, EnvSpec, Observation

ENV = EnvSpec(name="text/toy", action=ActionSpec(dim=1, kind=ActionKind.text), tasks=("toy",), states_per_task=(4,))
TINY = model_of(model_type="causal_lm_tiny", precision=Precision.fp32, num_action_chunks=6)
PROMPTS = ("12=", "abc=", "12=", "1+2+3+4+5=", "a=")


def build(cfg: ModelSettings = TINY, *, value_dim: int = 0, **request) -> CausalLMPolicy:
    settings = {"temperature": 1.0, "device": "cpu", "seed": 3} | request
    policy = POLICIES.get(cfg.model_type).build(cfg, PolicyRequest(env=ENV, value_dim=value_dim, **settings))
    assert isinstance(policy, CausalLMPolicy)
    return policy


def observe(*prompts: str) -> Observation:
    n = len(prompts)
    empty = np.zeros((n, 0, 0, 0, 3), np.uint8)
    return Observation(images=empty, state=np.zeros((n, 0), np.float32), instructions=prompts)


def noise(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((rows, 6), dtype=np.float32)


@pytest.fixture(scope="module")
def policy() -> CausalLMPolicy:
    return build()


@pytest.mark.parametrize(
    ("fields", "place", "match"),
    [
        ({"alora_invocation_tokens": [3]}, ".", "alora_invocation_tokens=.* is not supported"),
        ({"layer_replication": [[0, 2], [0, 2]]}, ".", "layer_replication=.* is not supported"),
        ({}, "adapter", "contains full weights, into which its adapter is already merged"),
    ],
)
def test_adapter_that_cannot_be_merged_is_rejected(fields: dict, place: str, match: str, tmp_path: Path):
    (folder := tmp_path / place).mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2} | fields))
    (folder / "adapter_model.safetensors").touch()
    if place != ".":
        (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=match):
        build(TINY.updated({"lora.path": str(folder)}))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_causal_lm_sampled_and_recomputed_log_probs_agree(temperature: float):
    policy = build(temperature=temperature, value_dim=6)
    torch.nn.init.normal_(policy.module.value_head.weight)
    out = policy.act(observe(*PROMPTS), noise=noise(5))
    said = out.tokens >= 0
    assert said[:, 0].all()
    assert not (said[:, 1:] & ~said[:, :-1]).any(), "a reply is one run of tokens"
    scores = policy.score(observe(*PROMPTS), out.tokens)
    np.testing.assert_allclose(scores.logprob.detach().numpy(), out.logprob, atol=2e-5)
    np.testing.assert_allclose(scores.value.detach().numpy()[said], out.value[said], atol=2e-4)
    entropy = scores.entropy.detach().numpy()
    assert (entropy[said] > 0).all()
    assert (entropy[~said] == 0).all()
    np.testing.assert_array_equal(
        out.cost, np.array([len(policy.reader(observe(p))[0]) for p in PROMPTS]) + said.sum(1)
    )
    final = policy.values(observe(*PROMPTS))
    np.testing.assert_allclose(final[:, 0], out.value[:, 0], atol=2e-4)


def test_log_probs_and_gradients_match_a_plain_forward_pass(policy: CausalLMPolicy):
    out = policy.act(observe(*PROMPTS), noise=noise(5))
    scores = policy.score(observe(PROMPTS[1]), out.tokens[1:2])
    reply = out.tokens[1][out.tokens[1] >= 0]
    ids = torch.tensor([[*policy.reader(observe(PROMPTS[1]))[0], *reply]])
    logprobs = policy.module.lm(ids).logits[0].log_softmax(-1).detach()
    start = ids.shape[1] - len(reply)
    wanted = [float(logprobs[start - 1 + t, token]) for t, token in enumerate(reply)]
    np.testing.assert_allclose(scores.logprob[0, : len(reply)].detach().numpy(), wanted, atol=1e-5)


def test_log_probs_without_gradients_are_computed_in_chunks(policy: CausalLMPolicy):
    """All environments of a run at once would need more memory than an update."""
    prompts, tokens = tuple(f"{i}+1=" for i in range(70)), np.random.default_rng(0).integers(4, 12, (70, 6))
    whole = policy.score(observe(*prompts), tokens).logprob.detach().numpy()
    rows: list[int] = []
    hook = policy.module.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    with hook, torch.no_grad():
        parts = policy.score(observe(*prompts), tokens).logprob.numpy()
    assert rows == [32, 32, 6]
    np.testing.assert_allclose(parts, whole, atol=1e-5)


def test_forward_length_equals_the_longest_row(policy: CausalLMPolicy):
    """Long prompt with short reply, and short prompt with long reply: values and gradients equal those alone."""
    prompts, tokens = ("length of 1234567890=", "1="), np.full((2, 8), -1, np.int64)
    tokens[0, :1], tokens[1, :8] = [7], range(4, 12)
    shapes: list[torch.Size] = []
    hook = policy.module.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))

    def gradients(rows: list[int]) -> tuple[np.ndarray, list[torch.Tensor]]:
        policy.module.zero_grad()
        scores = policy.score(observe(*(prompts[i] for i in rows)), tokens[rows])
        (scores.logprob.sum() + scores.entropy.sum()).backward()
        given = [p.grad.clone() for p in policy.module.parameters() if p.grad is not None]
        return scores.logprob.detach().numpy(), given

    together, grads = gradients([0, 1])
    apart = [gradients([i]) for i in range(2)]
    hook.remove()
    policy.module.zero_grad()
    assert shapes[0] == (2, max(shape[1] for shape in shapes[1:]))
    np.testing.assert_allclose(together, np.concatenate([logprob for logprob, _ in apart]), atol=1e-5)
    for whole, first, second in zip(grads, apart[0][1], apart[1][1], strict=True):
        torch.testing.assert_close(whole, first + second, atol=1e-5, rtol=1e-4)


def test_greedy_matches_transformers_generate(policy: CausalLMPolicy):
    out = policy.act(observe(*PROMPTS), noise=None)
    for prompt, tokens in zip(PROMPTS, out.tokens, strict=True):
        ids = torch.tensor([policy.reader(observe(prompt))[0]])
        wanted = policy.module.lm.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
        assert tokens[tokens >= 0].tolist() == wanted


def test_replies_are_batch_independent(policy: CausalLMPolicy):
    together = policy.act(observe(*PROMPTS), noise=noise(5))
    alone = [policy.act(observe(p), noise=noise(5)[i : i + 1]) for i, p in enumerate(PROMPTS)]
    np.testing.assert_array_equal(together.tokens, np.concatenate([a.tokens for a in alone]))


def test_long_replies_are_batch_independent():
    """Three of five replies end at once; the others keep their noise, positions, and tokens of penalties."""
    kept = {"repetition_penalty": 100.0}
    first = build(sampling=SamplingSettings(**kept)).act(observe(*PROMPTS), noise=noise(5)).tokens[:, 0]
    ended = [int(token) for row, token in enumerate(first) if row in (0, 1, 2)]
    assert not np.isin(first[3:], ended).any()
    policy = build(sampling=SamplingSettings(stop_token_ids=ended, **kept))
    together = policy.act(observe(*PROMPTS), noise=noise(5))
    assert (together.tokens >= 0).sum(1)[:3].tolist() == [1, 1, 1]
    assert (together.tokens >= 0).sum(1)[3:].tolist() == [4, 2]
    alone = [policy.act(observe(p), noise=noise(5)[i : i + 1]) for i, p in enumerate(PROMPTS)]
    np.testing.assert_array_equal(together.tokens, np.concatenate([a.tokens for a in alone]))
    np.testing.assert_allclose(together.logprob, np.concatenate([a.logprob for a in alone]), atol=1e-5)


def test_deterministic_rows_are_bit_identical(policy: CausalLMPolicy):
    """Prompts of other lengths in the batch must not pad a prompt."""
    batches = [
        (*PROMPTS,),
        ("9=", *PROMPTS[1:4], "aaaa="),
        ("12=", PROMPTS[1], "12=", PROMPTS[3], "1+2+3+4+5+6+7+8+9="),
    ]
    torch.use_deterministic_algorithms(True)
    try:
        found = [policy.act(observe(*batch), noise=noise(5)) for batch in batches]
        lengths = [len(policy.reader(observe(prompt))[0]) for prompt in PROMPTS]
        alone = [policy.act(observe(*[prompt] * 5), noise=noise(5)) for prompt in PROMPTS[1:4]]
    finally:
        torch.use_deterministic_algorithms(False)
    assert len({*lengths}) > 2
    for out in found:
        np.testing.assert_array_equal(out.logprob[1:4], found[0].logprob[1:4])
        np.testing.assert_array_equal(out.logprob[1:4], [one.logprob[i] for i, one in enumerate(alone, start=1)])


def test_reply_without_end_token_is_truncated(policy: CausalLMPolicy):
    plain = policy.act(observe(*PROMPTS), noise=noise(5, 1))
    assert plain.cut_off is not None
    full, last = plain.tokens[:, -1] >= 0, plain.tokens[:, -1]
    np.testing.assert_array_equal(plain.cut_off, full & (last != int(policy.end_tokens[0])))
    row = int(np.flatnonzero(plain.cut_off)[0])
    stop = policy.tokenizer.decode([last[row]])
    stopped = build(sampling=SamplingSettings(stop=[stop])).act(observe(*PROMPTS), noise=noise(5, 1))
    assert stopped.cut_off is not None
    assert not stopped.cut_off[row]


def test_replies_end_with_stop_texts_and_end_tokens(policy: CausalLMPolicy):
    plain = policy.act(observe(*PROMPTS), noise=noise(5, 1))
    row = int(np.argmax([len(r) for r in plain.replies]))
    stop = plain.replies[row][1]
    stopped = build(sampling=SamplingSettings(stop=[stop])).act(observe(*PROMPTS), noise=noise(5, 1))
    assert stopped.replies[row] == plain.replies[row].split(stop)[0]
    assert (stopped.tokens[row] >= 0).sum() == plain.replies[row].index(stop) + 1
    policy.end_tokens, kept = torch.tensor([int(plain.tokens[row, 2])]), policy.end_tokens
    try:
        assert (policy.act(observe(*PROMPTS), noise=noise(5, 1)).tokens[row] >= 0).sum() <= 3
    finally:
        policy.end_tokens = kept


def test_stop_tokens_apply_after_the_minimum_length(policy: CausalLMPolicy):
    plain = policy.act(observe(*PROMPTS), noise=noise(5, 1))
    row = int(np.argmax((plain.tokens >= 0).sum(1)))
    token = int(plain.tokens[row, 1])
    params = {"stop_token_ids": [token]}
    stopped = build(sampling=SamplingSettings(**params)).act(observe(*PROMPTS), noise=noise(5, 1))
    first = int(np.flatnonzero(plain.tokens[row] == token)[0])
    assert (stopped.tokens[row] >= 0).sum() == first + 1
    assert stopped.tokens[row, first] == token
    longer = build(sampling=SamplingSettings(**params, min_new_tokens=4))
    tokens = longer.act(observe(*PROMPTS), noise=noise(5, 1)).tokens
    assert ((tokens >= 0).sum(1) >= 4).all()
    assert not np.isin(tokens[:, :4], longer.end_tokens.numpy()).any()
    # A stop string at the second token ends no reply of at least four tokens, and does not cut its text.
    first_four = (
        build(sampling=SamplingSettings(min_new_tokens=4)).act(observe(*PROMPTS), noise=noise(5, 1)).tokens[:, :4]
    )
    row = next(i for i, four in enumerate(first_four) if four[1] not in four[2:])
    stop = policy.tokenizer.decode([first_four[row, 1]])
    out = build(sampling=SamplingSettings(stop=[stop], min_new_tokens=4)).act(observe(*PROMPTS), noise=noise(5, 1))
    assert out.tokens[row, :4].tolist() == first_four[row].tolist()
    assert out.replies[row].startswith(policy.reader.decode(first_four[row]))
    # Nor does a stop token end it with the last of n tokens, where it would be the most probable one.
    greedy = policy.act(observe(*PROMPTS), noise=None).tokens
    new = [(r, n) for r in range(len(greedy)) for n in range(1, 5) if greedy[r, n] not in (-1, *greedy[r, :n])]
    row, count = new[-1]
    params = {"stop_token_ids": [int(greedy[row, count])], "min_new_tokens": count + 1}
    barred = build(sampling=SamplingSettings(**params)).act(observe(*PROMPTS), noise=None).tokens[row]
    assert barred[:count].tolist() == greedy[row, :count].tolist()
    assert barred[count] not in (greedy[row, count], -1)
    # What is scored is the probability among all tokens, those that were barred included.
    out = longer.act(observe(*PROMPTS), noise=noise(5, 1))
    scored = longer.score(observe(*PROMPTS), out.tokens).logprob.detach().numpy()
    np.testing.assert_allclose(out.logprob, scored, atol=1e-5)


def test_top_k_top_p_and_penalties_match_reference():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    assert truncate(logits, SamplingSettings(top_k=2)).isfinite().tolist() == [[True, True, False, False]]
    # Probabilities 0.644, 0.237, 0.087, 0.032: the nucleus of 0.8 is the first two.
    assert truncate(logits, SamplingSettings(top_p=0.8)).isfinite().tolist() == [[True, True, False, False]]
    assert truncate(logits, SamplingSettings(top_p=0.6)).isfinite().tolist() == [[True, False, False, False]]
    seen = torch.tensor([[True, False, False, True]])
    assert int(choose(logits, None, 1.0, SamplingSettings(repetition_penalty=4.0), seen)) == 1
    said = torch.tensor([[0, 0, -1]])
    gap = float(logits[0, 0] - logits[0, 1])
    for params, first in (
        (SamplingSettings(frequency_penalty=0.4 * gap), 0),
        (SamplingSettings(frequency_penalty=0.6 * gap), 1),  # said twice
        (SamplingSettings(presence_penalty=0.6 * gap), 0),
        (SamplingSettings(presence_penalty=1.2 * gap), 1),
    ):
        assert int(choose(logits, None, 1.0, params, seen, said)) == first
    draws = torch.linspace(0, 1 - 1e-7, 10001)
    drawn = choose(logits.expand(10001, -1), draws, 2.0, SamplingSettings(), seen)
    np.testing.assert_allclose(np.bincount(drawn.numpy()) / 10001, (logits[0] / 2.0).softmax(-1).numpy(), atol=2e-4)


def test_published_layout_round_trips(tmp_path: Path, policy: CausalLMPolicy, capfd: pytest.CaptureFixture[str]):
    policy.save(tmp_path)
    assert capfd.readouterr() == ("", ""), "no bar of the library's in the lines of a run"
    wanted = policy.act(observe(*PROMPTS), noise=noise(5))
    other = build(seed=9)
    assert not np.array_equal(other.act(observe(*PROMPTS), noise=noise(5)).tokens, wanted.tokens)
    other.load_weights(tmp_path)
    assert capfd.readouterr() == ("", ""), "nor of what is read"
    np.testing.assert_array_equal(other.act(observe(*PROMPTS), noise=noise(5)).logprob, wanted.logprob)
    again = build(model_of("causal_lm", precision=Precision.fp32, num_action_chunks=6, path=str(tmp_path)))
    np.testing.assert_array_equal(again.act(observe(*PROMPTS), noise=noise(5)).logprob, wanted.logprob)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        other.load_weights(tmp_path)


def test_tied_embeddings_stay_tied(tmp_path: Path, policy: CausalLMPolicy):
    policy.save(tmp_path / "plain")
    config = LlamaConfig.from_pretrained(tmp_path / "plain", tie_word_embeddings=True)
    shutil.copytree(tmp_path / "plain", tmp_path / "tied")
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tied")

    def read(name: str) -> CausalLMPolicy:
        return build(model_of("causal_lm", precision=Precision.fp32, num_action_chunks=6, path=str(tmp_path / name)))

    tied, matrix = read("tied"), config.vocab_size * config.hidden_size
    sizes = [sum(p.numel() for p in one.module.parameters()) for one in (read("plain"), tied)]
    assert sizes[0] - sizes[1] == matrix
    tied.save(tmp_path / "again")
    with torch.no_grad():
        tied.module.lm.get_input_embeddings().weight.add_(1)
    tied.load_weights(tmp_path / "again")
    inner, outer = tied.module.lm.get_input_embeddings().weight, tied.module.lm.get_output_embeddings().weight
    assert inner is outer
    tied.score(observe(*PROMPTS), np.zeros((5, 6), np.int64)).logprob.sum().backward()
    assert (inner.grad.abs().sum(1) > 0).all(), "every token's row is an output too"


@pytest.mark.parametrize(
    ("targets", "tied"),
    [("q_proj,v_proj", True), ("lm_head", True), ("embed_tokens", True), ("q_proj,lm_head,embed_tokens", False)],
)
def test_adapters_are_restored_merged_and_exported(tmp_path: Path, policy: CausalLMPolicy, targets: str, tied: bool):
    """With tied embeddings, merged factors of one matrix must not change the other."""
    policy.save(tmp_path / "base")
    config = LlamaConfig.from_pretrained(tmp_path / "base", tie_word_embeddings=tied)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    plain = model_of("causal_lm", precision=Precision.fp32, num_action_chunks=6, path=str(tmp_path / "base"))
    cfg = plain.updated({"is_lora": True, "lora": TextLoraSettings(r=4, target_modules=targets)})
    adapted = build(cfg)
    trained = {name: p for name, p in adapted.module.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    obs, tokens = observe(*PROMPTS), adapted.act(observe(*PROMPTS), noise=noise(5)).tokens
    np.testing.assert_allclose(*(_log_probs(one, obs, tokens) for one in (adapted, build(plain))), atol=1e-5)
    with torch.no_grad():
        for i, p in enumerate(trained.values()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)), alpha=0.3)
    wanted = _log_probs(adapted, obs, tokens)
    adapted.save(tmp_path / "run")
    for other in (build(cfg), build(plain)):
        other.load_weights(tmp_path / "run")
        np.testing.assert_allclose(_log_probs(other, obs, tokens), wanted, atol=1e-4)
    merged = build(plain.updated({"lora": TextLoraSettings(path=str(tmp_path / "run" / "adapter"))}))
    merged.save(tmp_path / "export")
    exported = build(plain.updated({"path": str(tmp_path / "export")}))
    np.testing.assert_allclose(_log_probs(exported, obs, tokens), wanted, atol=1e-4)


def test_target_modules_may_contain_spaces():
    adapted = build(TINY.updated({"is_lora": True, "lora": TextLoraSettings(r=4, target_modules="q_proj, v_proj")}))
    names = [name for name, _ in adapted.module.named_parameters() if "lora_A" in name]
    assert {name.split(".")[-4] for name in names} == {"q_proj", "v_proj"}


@pytest.mark.parametrize("keys", [{"target_modules": "q_proj,nope"}, {"modules_to_save": ["nope"]}])
def test_unknown_names_of_adapted_modules_are_rejected(keys: dict):
    with pytest.raises(ConfigError, match=r"'nope' matches no layer\. Known names: .*q_proj"):
        build(TINY.updated({"is_lora": True, "lora": TextLoraSettings(**keys)}))


def test_initial_adapter_determines_all_adapter_settings(tmp_path: Path):
    cfg = TINY.updated({"is_lora": True, "lora": TextLoraSettings(r=4, target_modules="q_proj")})
    build(cfg).save(tmp_path)
    factory, path = POLICIES.get("causal_lm_tiny"), str(tmp_path / "adapter")
    (problem,) = factory.validate(cfg.updated({"lora.path": path, "lora.modules_to_save": ["lm_head"]}))
    assert problem.endswith("Remove model.lora.r, model.lora.target_modules, model.lora.modules_to_save.")
    loaded = TINY.updated({"is_lora": True, "lora": TextLoraSettings(path=path)})
    assert factory.validate(loaded) == []
    of_rank_4 = TINY.updated({"is_lora": True, "lora.r": 4})
    assert factory.costs(loaded, ENV, 0).num_trained == factory.costs(of_rank_4, ENV, 0).num_trained


def test_adapter_files_with_frozen_embeddings_are_read(tmp_path: Path):
    """Files of earlier versions contain the matrix below the adapters."""
    cfg = TINY.updated({"is_lora": True, "lora": TextLoraSettings(r=4, target_modules="lm_head")})
    policy = build(cfg)
    policy.module.lm.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    build(cfg).load_weights(tmp_path)


def _log_probs(policy: CausalLMPolicy, obs: Observation, tokens: np.ndarray) -> np.ndarray:
    return policy.score(obs, tokens).logprob.detach().numpy()


def test_value_head_with_adapters_is_restored(tmp_path: Path):
    """The head is loaded into another run's model: random weights below adapters are equal for every seed."""
    cfg = TINY.updated({"is_lora": True, "lora": TextLoraSettings(r=4, target_modules="q_proj,v_proj")})
    policy = build(cfg, value_dim=6)
    torch.nn.init.normal_(policy.module.value_head.weight)
    for name, p in policy.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(0))
    policy.save(tmp_path)
    wanted = policy.values(observe(*PROMPTS))
    assert np.abs(wanted[:, 0]).min() > 0
    for other in (build(cfg, value_dim=6, seed=9), build(value_dim=6)):
        other.load_weights(tmp_path)
        np.testing.assert_allclose(other.values(observe(*PROMPTS)), wanted, atol=1e-3)


def test_modules_to_save_are_trained_and_restored(tmp_path: Path):
    lora = TextLoraSettings(r=4, target_modules="q_proj,v_proj", modules_to_save=["lm_head"], lora_dropout=0.5)
    cfg = TINY.updated({"is_lora": True, "lora": lora})
    policy = build(cfg)
    whole = [p for name, p in policy.module.named_parameters() if p.requires_grad and "lora_" not in name]
    assert [p.numel() for p in whole] == [32 * 128]
    tokens = policy.act(observe(*PROMPTS), noise=noise(5)).tokens
    with torch.no_grad():
        for name, p in policy.module.named_parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))), alpha=0.1)
    wanted = policy.score(observe(*PROMPTS), tokens).logprob.detach()
    policy.save(tmp_path)
    for other in (build(cfg), build()):
        other.load_weights(tmp_path)
        found = other.score(observe(*PROMPTS), tokens).logprob.detach()
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    # Inputs of adapters are dropped where answers are imitated, and nowhere else.
    policy.module.train()
    replies = tokens[:, :, None].astype(np.float32)
    dropped = [policy.imitate(observe(*PROMPTS), replies).loss.detach() for _ in range(2)]
    assert not torch.equal(*dropped)
    torch.testing.assert_close(policy.score(observe(*PROMPTS), tokens).logprob.detach(), wanted)


def test_gradient_checkpointing_keeps_gradients(policy: CausalLMPolicy):
    out = policy.act(observe(*PROMPTS), noise=noise(5))
    grads = []
    for checkpointing in (False, True):
        twin = build(gradient_checkpointing=checkpointing)
        twin.score(observe(*PROMPTS), out.tokens).logprob.sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in twin.module.parameters() if p.grad is not None]))
    torch.testing.assert_close(*grads)


def test_a_chat_template_is_applied(tmp_path: Path, policy: CausalLMPolicy):
    policy.save(tmp_path)
    template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    cfg = model_of("causal_lm", precision=Precision.fp32, num_action_chunks=6, path=str(tmp_path))
    talk = join_messages([Message(role="user", content="1+1"), Message(role="assistant", content="2")])
    plain = policy.tokenizer
    chatty = build(cfg)
    assert plain.decode(chatty.reader(observe(talk))[0]) == plain.decode(
        plain("u:1+1|a:2|a:", add_special_tokens=False)["input_ids"]
    )
    assert plain.decode(build(cfg.updated({"chat": False})).reader(observe(talk))[0]) == plain.decode(
        plain("1+12")["input_ids"]
    )


@pytest.mark.parametrize(
    ("template", "own", "end"), [(True, "<eos>", "?"), (False, "<eos>", "<eos>"), (False, "x", "|")]
)
def test_end_token_comes_from_the_chat_template(
    tmp_path: Path, policy: CausalLMPolicy, template: bool, own: str, end: str
):
    """The folders of Llama-3 and Gemma have several end tokens, and the first one does not end a turn."""
    policy.save(tmp_path)
    ids = policy.tokenizer.get_vocab()
    several = {"eos_token_id": [ids["|"], ids["<eos>"], ids["?"]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(several))
    told = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"eos_token": own}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    if template:
        turn = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}?{% endfor %}"
        (tmp_path / "chat_template.jinja").write_text(turn)
    found = build(model_of("causal_lm", precision=Precision.fp32, num_action_chunks=6, path=str(tmp_path)))
    assert found.encode_replies(["12"])[0].tolist() == [ids["1"], ids["2"], ids[end]]


def test_sft_learns_the_end_of_a_reply():
    """Otherwise a fine-tuned model would never stop."""
    policy, prompts = build(), observe("12=", "abc=")
    tokens = policy.encode_replies(["1", "abc"])
    length = (tokens >= 0).sum(axis=1)
    assert np.isin(tokens[[0, 1], length - 1], policy.end_tokens.numpy()).all()
    logprob = policy.score(prompts, tokens).logprob.detach().numpy()
    assert (logprob[[0, 1], length - 1] < -0.1).all(), "an untrained model would go on"
    scores = policy.imitate(prompts, tokens[:, :, None].astype(np.float32))
    np.testing.assert_allclose(scores.loss.detach().numpy(), -logprob.sum(axis=1) / length, rtol=1e-5)
    optimizer = torch.optim.AdamW(policy.module.parameters(), lr=3e-3)
    for _ in range(8):
        optimizer.zero_grad()
        policy.imitate(prompts, tokens[:, :, None].astype(np.float32)).loss.sum().backward()
        optimizer.step()
    after = policy.score(prompts, tokens).logprob.detach().numpy()
    assert (after[[0, 1], length - 1] > logprob[[0, 1], length - 1] + 1.0).all()


class CountsCasts(TorchDispatchMode):
    """Context that counts bfloat16 copies of matrices."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and func is torch.ops.aten._to_copy.default and out.numel() == self.size:
            self.count += out.dtype is torch.bfloat16
        return out


def test_weights_are_cast_once_per_reply():
    policy = build(TINY.updated({"precision": Precision.bf16}))
    head = policy.module.lm.get_output_embeddings().weight
    assert head.dtype is torch.float32
    with CountsCasts(head.numel()) as casts:
        out = policy.act(observe(*PROMPTS), noise=noise(5))
    assert (out.tokens >= 0).sum(1).max() > 2
    assert casts.count == 1


@pytest.mark.parametrize("size", [2**63 - 1, 2**40, 10], ids=["largest", "terabyte", "not JSON"])
def test_hostile_weight_header_is_a_checkpoint_error(tmp_path, size):
    (tmp_path / "model.safetensors").write_bytes(size.to_bytes(8, "little") + b"x" * 100)
    with pytest.raises(CheckpointError, match=r"model.safetensors is missing or malformed"):
        _count_parameters(tmp_path)
