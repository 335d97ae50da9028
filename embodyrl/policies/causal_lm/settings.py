"""Keys of causal language models."""

from embodyrl.policies.settings import AdapterSettings


class CausalLMSettings(AdapterSettings):
    """A causal language model; K is the length of a reply."""

    chat: bool | None = None
    """Language models: apply the tokenizer's chat template; null: if it has one."""
