"""Sandbox check of `embodyrl doctor`."""

from embodyrl.findings import Finding
from embodyrl.text.sandbox import describe_confinement


def probe_sandbox() -> Finding:
    """Check whether generated programs (reward `code`, tool `python`) run in a sandbox; return the finding."""
    is_isolated, text = describe_confinement()
    return (
        Finding("sandbox", "ok", text)
        if is_isolated
        else Finding("sandbox", "warn", text, "apt-get install bubblewrap")
    )
