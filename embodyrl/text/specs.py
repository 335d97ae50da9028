"""Environment spec of language models without a text task."""

from embodyrl.types import ActionKind, ActionSpec, EnvSpec

ANY_TEXT = EnvSpec(name="text", action=ActionSpec(dim=1, kind=ActionKind.text), tasks=("text",), states_per_task=(1,))
"""Environment spec for the SFT or export of a language model without a text task."""
