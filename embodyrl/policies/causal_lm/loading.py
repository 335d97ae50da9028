"""Models and tokenizers: the small built-in one, and any folder in the Hugging Face layout."""

import logging
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from embodyrl.config.paths import resolve_asset
from embodyrl.errors import CheckpointError
from embodyrl.policies.causal_lm.settings import CausalLMSettings

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
_ADAPTER_CONFIG = "adapter_config.json"
CHARACTERS = "0123456789abcx=+-*/() .,:?|;"

logging.getLogger("transformers").setLevel(logging.ERROR)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of `CHARACTERS`, and a token that begins every text."""
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, UNK, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK
    )


def tiny_model(vocab_size: int, seed: int) -> LlamaForCausalLM:
    """A Llama of half a million parameters, random from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab_size,
                hidden_size=128,
                intermediate_size=512,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=512,
                tie_word_embeddings=False,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
            )
        )


def load(cfg: CausalLMSettings, *, seed: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return (model, tokenizer); the folder's own code is never run.

    Raises:
        CheckpointError: the folder holds no such model, or a file is damaged.
    """
    if cfg.path is None:
        tokenizer = tiny_tokenizer()
        return nn.Module.to(tiny_model(len(tokenizer), seed), dtype), tokenizer
    folder = resolve_asset(cfg.path)
    if not (folder / "config.json").is_file() or (folder / _ADAPTER_CONFIG).is_file():
        # The library would look for it, or for what the adapter names, in its cache of the hub.
        raise CheckpointError(f"{folder} is no folder of a whole model; an adapter goes to model.lora.path.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be loaded as a causal language model: {_line(error)}") from error
    model, info = loaded
    if wrong := sorted({*map(str, info["missing_keys"]), *map(str, info["mismatched_keys"])}):
        raise CheckpointError(f"{folder}: its weight files lack or misfit {', '.join(wrong[:5])}; fetch them again.")
    return model, tokenizer


def add_adapters(model: nn.Module, cfg: CausalLMSettings, *, trainable: bool) -> Any:
    """Wrap the model with low-rank adapters (new ones, or those in `model.lora.path`), or merge a given adapter."""
    from peft import LoraConfig, PeftModel, get_peft_model

    lora = cfg.lora
    if lora.path is not None:
        folder = resolve_asset(lora.path)
        for name in (_ADAPTER_CONFIG, "adapter_model.safetensors"):
            if not (folder / name).is_file():  # or the library would ask the hub, or take a pickle
                raise CheckpointError(f"{folder}: {name} is missing; it is no complete adapter folder.")
        adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=trainable)  # type: ignore[arg-type]
        return adapted if cfg.is_lora else adapted.merge_and_unload()  # type: ignore[operator]
    names = lora.target_modules if lora.target_modules == "all-linear" else lora.target_modules.split(",")
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        use_rslora=lora.use_rslora,
        target_modules=names,
        init_lora_weights="gaussian" if lora.init_lora_weights == "gaussian" else True,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)  # type: ignore[arg-type]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
