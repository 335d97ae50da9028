"""Sandbox check of `embodyrl doctor`."""

from embodyrl.findings import Finding
from embodyrl.text.sandbox import confinement


def probe_sandbox() -> Finding:
    """Check whether generated programs (reward `code`, tool `python`) run in a sandbox; return the finding."""
    boxed, text = confinement()
    return Finding("sandbox", "ok", text) if boxed else Finding("sandbox", "warn", text, "apt-get install bubblewrap")
