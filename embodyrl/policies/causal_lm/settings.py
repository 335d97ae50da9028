"""Keys of causal language models."""

from typing import Annotated

from pydantic import Field

from embodyrl.policies.settings import AdapterSettings, LoraSettings


class TextLoraSettings(LoraSettings):
    """Low-rank adapters of a language model."""

    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the inputs of adapters that is dropped while `embodyrl sft` imitates."""
    modules_to_save: list[str] = []
    """Last parts of names of modules that are trained and saved whole beside the adapters (lm_head, embed_tokens)."""


class CausalLMSettings(AdapterSettings):
    """A causal language model; K is the length of a reply."""

    chat: bool | None = None
    """Language models: apply the tokenizer's chat template; null: if it has one."""
    lora: TextLoraSettings = TextLoraSettings()
