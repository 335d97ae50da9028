"""Models and tokenizers: the small built-in one, and any folder in the Hugging Face layout."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from embodyrl.config.paths import resolve_asset
from embodyrl.errors import CheckpointError, MissingDependencyError, one_line
from embodyrl.policies.causal_lm.settings import CausalLMSettings
from embodyrl.policies.causal_lm.sizes import TINY, TINY_VISION

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
_ADAPTER_CONFIG = "adapter_config.json"
COLOURS = ("black", "red", "green", "blue", "yellow", "magenta", "cyan", "white")
_PICTURE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_TINY: dict[str, Any] = {
    **TINY,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CHARACTERS = "0123456789abcx=+-*/() .,:?|;"

logging.getLogger("transformers").setLevel(logging.ERROR)


def tiny_tokenizer(words: Sequence[str] = (), special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per character of `CHARACTERS` and per word, and a token that begins every text."""
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, UNK, *CHARACTERS, *special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    pieces = Regex("|".join([*words, r"[\s\S]"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=list(special),
    )


def tiny_model(vocab_size: int, seed: int) -> LlamaForCausalLM:
    """A Llama of half a million parameters, random from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**_TINY, "vocab_size": vocab_size}))


def tiny_vision(seed: int) -> tuple[Any, Any]:
    """The same behind a vision tower of one layer (Idefics3), four tokens for a picture, colours as further words."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = tiny_tokenizer(COLOURS, _PICTURE_TOKENS)
    edge, patch = TINY_VISION["image_size"], TINY_VISION["patch_size"]
    image = Idefics3ImageProcessorPil(
        size={"longest_edge": edge}, max_image_size={"longest_edge": edge}, do_image_splitting=False
    )
    processor = Idefics3Processor(image, tokenizer, image_seq_len=(edge // patch) ** 2)
    text = _TINY | {"model_type": "llama", "vocab_size": len(tokenizer)}
    config = Idefics3Config(
        vision_config=dict(TINY_VISION),  # type: ignore[arg-type]
        text_config=text,  # type: ignore[arg-type]
        image_token_id=tokenizer.get_vocab()[_PICTURE_TOKENS[0]],
        scale_factor=1,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Idefics3ForConditionalGeneration(config), processor


def load(cfg: CausalLMSettings, *, seed: int, dtype: torch.dtype, sees: bool = False) -> tuple[Any, Any]:
    """Return (model, tokenizer), of a model that sees pictures (model, processor); the folder's own code is never run.

    Raises:
        CheckpointError: the folder holds no such model, or a file is damaged.
        MissingDependencyError: its processor needs a package that is not installed.
    """
    if cfg.path is None:
        if sees:
            model, processor = tiny_vision(seed)
        else:
            model, processor = tiny_model(len(tokenizer := tiny_tokenizer()), seed), tokenizer
        return nn.Module.to(model, dtype), processor
    folder = resolve_asset(cfg.path)
    if not (folder / "config.json").is_file() or (folder / _ADAPTER_CONFIG).is_file():
        # The library would look for it, or for what the adapter names, in its cache of the hub.
        raise CheckpointError(f"{folder} is no folder of a whole model; an adapter goes to model.lora.path.")
    try:
        kind, model_kind = (
            (AutoProcessor, AutoModelForImageTextToText) if sees else (AutoTokenizer, AutoModelForCausalLM)
        )
        processor = kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        loaded: Any = model_kind.from_pretrained(
            folder,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        kind = "vision-language" if sees else "causal language"
        raise CheckpointError(f"{folder} cannot be loaded as a {kind} model: {one_line(error)}") from error
    except (ImportError, AttributeError) as error:
        # Without torchvision the library's table of video processors is an empty shell, even where none is asked for.
        raise MissingDependencyError(
            f"The processor in {folder} needs a package that is not installed: {one_line(error)}. Most that also take "
            "videos (Qwen-VL, SmolVLM) want `pip install torchvision num2words`, torchvision from where torch is from."
        ) from error
    model, info = loaded
    if wrong := sorted({*map(str, info["missing_keys"]), *map(str, info["mismatched_keys"])}):
        raise CheckpointError(f"{folder}: its weight files lack or misfit {', '.join(wrong[:5])}; fetch them again.")
    return model, processor


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
        lora_dropout=lora.lora_dropout,
        modules_to_save=lora.modules_to_save or None,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config)  # type: ignore[arg-type]
    for name, parameter in adapted.named_parameters():
        if ".modules_to_save." in name:  # AdamW's steps would be lost in bfloat16
            parameter.data = parameter.data.float()
    return adapted
