"""What the program does: each module is one command."""


def command_module(name: str) -> str:
    """Return the module of a command; those of extensions live in their folders."""
    extension = {"sft": "demonstrations", "collect": "demonstrations", "dagger": "demonstrations"}.get(name)
    return f"embodyrl.extensions.{extension}.{name}" if extension else f"embodyrl.commands.{name}"
