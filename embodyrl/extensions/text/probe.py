"""The line of `embodyrl doctor` about the sandbox."""

from embodyrl.extensions.text.sandbox import confinement
from embodyrl.findings import Finding


def probe_sandbox() -> Finding:
    """What holds programs that a language model wrote (the reward `code`, the tool `python`)."""
    boxed, text = confinement()
    return Finding("sandbox", "ok", text) if boxed else Finding("sandbox", "warn", text, "apt-get install bubblewrap")
