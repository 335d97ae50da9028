"""Config keys for causal language models."""

from typing import Annotated

from pydantic import Field

from embodyrl.policies.settings import AdapterSettings, LoraSettings


class TextLoraSettings(LoraSettings):
    """Config keys for low-rank adapters of a language model."""

    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the inputs of adapters during SFT."""
    modules_to_save: list[str] = []
    """Suffixes of the names of modules that are fully trained and saved with the adapters (lm_head, embed_tokens)."""


class CausalLMSettings(AdapterSettings):
    """Config keys for a causal language model; K is the maximum length of a reply."""

    chat: bool | None = None
    """Language models: apply the tokenizer's chat template; null: apply a template if the tokenizer has one."""
    lora: TextLoraSettings = TextLoraSettings()
