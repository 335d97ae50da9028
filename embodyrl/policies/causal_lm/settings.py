"""Config keys for causal language models."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from embodyrl.config.settings import Path
from embodyrl.policies.settings import AdapterSettings, LoraSettings

RESERVED_ARGUMENTS = frozenset(
    {"messages", "conversation", "add_generation_prompt", "continue_final_message", "tokenize"}
)
RESERVED_ARGUMENTS |= {"tools", "documents", "return_dict", "return_tensors", "padding", "truncation", "max_length"}
RESERVED_ARGUMENTS |= {"chat_template", "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs"}
"""Arguments of `apply_chat_template` that are set by the run, or are not passed to the template."""


class TextLoraSettings(LoraSettings):
    """Config keys for low-rank adapters of a language model."""

    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the inputs of adapters during SFT."""
    modules_to_save: list[str] = []
    """Suffixes of the names of modules that are fully trained and saved with the adapters (lm_head, embed_tokens)."""


class CausalLMSettings(AdapterSettings):
    """Config keys for a causal language model; num_action_chunks (K) is the maximum length of a reply."""

    chat: bool | None = None
    """Language models: apply the tokenizer's chat template; null: apply the template if the tokenizer has one."""
    chat_template: Path | None = None
    """Language models: file with a chat template (Jinja); default: the tokenizer's template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Language models: arguments of the chat template, for example {enable_thinking: false}."""
    lora: TextLoraSettings = TextLoraSettings()

    def problems(self) -> Iterator[str]:
        """Yield config errors, including arguments of the chat template that are reserved or have no effect."""
        yield from super().problems()
        if self.chat is False and (self.chat_template or self.chat_template_kwargs):
            yield "model.chat=false: model.chat_template and model.chat_template_kwargs have no effect; remove them."
        if reserved := sorted(RESERVED_ARGUMENTS & {*self.chat_template_kwargs}):
            yield f"model.chat_template_kwargs: {', '.join(reserved)} cannot be set; remove it."
