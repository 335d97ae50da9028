"""The check of the sandbox in `embodyrl doctor`."""

from embodyrl.extensions.findings import Finding
from embodyrl.extensions.text.sandbox import confinement


def probe_sandbox() -> Finding:
    """Check the sandbox for generated programs (reward `code`, tool `python`)."""
    boxed, text = confinement()
    return Finding("sandbox", "ok", text) if boxed else Finding("sandbox", "warn", text, "apt-get install bubblewrap")
