"""Keys of causal language models."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from embodyrl.policies.settings import AdapterSettings, LoraSettings
from embodyrl.types import EnvSpec


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

    def idle_in(self, env: EnvSpec) -> Iterator[tuple[str, str]]:
        """What acted is what is trained."""
        yield from super().idle_in(env)
        if self.lora.lora_dropout:
            yield "model.lora.lora_dropout", "replies come from the weights that are trained; it is for `embodyrl sft`"
