"""The command `completion`: what the shell needs to complete commands, flags, groups and keys."""

from __future__ import annotations

import argparse

from embodyrl.cli.commands import COMMANDS
from embodyrl.config import tree
from embodyrl.config.keys import all_keys
from embodyrl.errors import ConfigError

_SCRIPT = """_embodyrl() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words
    COMP_WORDBREAKS="${{COMP_WORDBREAKS//=/}}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}}:$word" in
{flags}
        *) words="{options} {keys}" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [[ ${{COMPREPLY[0]-}} == *= ]] && compopt -o nospace
    return 0
}}
complete -o default -F _embodyrl embodyrl
"""


def completion(args: argparse.Namespace) -> int:
    """Run `embodyrl completion bash|zsh`."""
    if args.words not in (["bash"], ["zsh"]):
        raise ConfigError('embodyrl completion takes bash or zsh: eval "$(embodyrl completion bash)".')
    options = [f"{g}={o}" for g in tree.default_options("train") for o in tree.options(g)]
    flags = [f'        {name}:-*) words="{" ".join([*c.flags, "--help"])}" ;;' for name, c in COMMANDS.items()]
    script = _SCRIPT.format(
        commands=" ".join(COMMANDS),
        flags="\n".join(flags),
        options=" ".join(options),
        keys=" ".join(f"{name}=" for name in all_keys()),
    )
    print(("autoload -U bashcompinit && bashcompinit\n" if args.words == ["zsh"] else "") + script, end="")
    return 0
