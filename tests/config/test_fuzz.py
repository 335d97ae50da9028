"""Random overrides give a valid config or a readable error."""

from __future__ import annotations

import random

import pytest

from embodyrl.config import compose
from embodyrl.config.settings import format_value
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.plan.checks import check_components, validate_config
from embodyrl.plan.command_sections import COMMANDS
from embodyrl.plan.config import load_config
from embodyrl.plan.keys import all_keys

pytestmark = pytest.mark.integration

VALUES = (
    *("", "null", "true", "yes", "0", "-1", "1", "3", "2.5", "1e-4", "1e10", "1e308", "-1e400", "nan", "inf", "-inf"),
    *(
        "9" * 30,
        "9" * 3000,
        "9" * 6000,
        "0x10",
        "1_000",
        "١٢",
        "½",
        "abc",
        "a b",
        "'quoted'",
        '"',
        "'",
        "\\",
        "a=b",
        "=",
        "===",
    ),
    *(
        "[]",
        "[1]",
        "[[1]]",
        "[1,1]",
        "[-1]",
        "[1,",
        "]",
        "{}",
        "{a:1}",
        "{a:{b:[1,{c:2}]}}",
        "{1:2}",
        "[null]",
        "[true]",
    ),
    *(
        "[" * 40 + "]" * 40,
        "{a:" * 30 + "1" + "}" * 30,
        "x" * 300,
        "x" * 5000,
        "\0",
        "a\nb",
        "../../etc/passwd",
        "/dev/null",
    ),
    *(
        "os:system",
        "os:getcwd",
        "sys:exit",
        "builtins:eval",
        "no_such_module:x",
        "json:",
        ":x",
        "a:b:c",
        "os.path:join",
    ),
    *(
        "${seed}",
        "${oc.env:HOME}",
        "${nowhere}",
        "${",
        "${oc.env:",
        "???",
        "range(0,3)",
        "choice(1,2)",
        "interval(0,1)",
        "*",
        "&a",
    ),
    *(
        "🤖",
        "a,b",
        "1,2",
        "glob(*)",
        "int('3')",
        "first:3",
        "first:99999999",
        "auto",
        "bf16",
        "grpo",
        "gae",
        "pg",
        "libero",
        "mlp",
    ),
)


def word(rng: random.Random) -> str:
    keys = sorted(all_keys())
    name = rng.choice(keys)
    kind = rng.random()
    if kind < 0.15:  # a slip of the finger
        at = rng.randrange(len(name))
        name = rng.choice([name[:at] + name[at + 1 :], name[:at] + rng.choice("xyz._ ") + name[at:], name[::-1]])
    elif kind < 0.25:
        group = rng.choice(sorted(compose.default_options("train")))
        return f"{group}={rng.choice([*compose.options(group), *VALUES])}"
    elif kind < 0.3:
        return rng.choice(VALUES)
    elif kind < 0.35:
        name = rng.choice(["+", "++", "~", "@", "."]) + name
    elif kind < 0.4:
        name = name.rpartition(".")[0] or "env"
    elif kind < 0.6:  # what the key is anyway; where the command reads it, that is fine
        return f"{name}={format_value(all_keys()[name].default)}"
    return f"{name}={rng.choice(VALUES)}"


@pytest.mark.parametrize("part", range(5))
def test_random_overrides_give_a_config_or_a_config_error(part: int) -> None:
    rng = random.Random(part)
    accepted = 0
    for _ in range(120):
        command = rng.choice(COMMANDS)
        words = [word(rng) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
        problems: list[str] = []
        try:
            cfg = load_config(command, words)
        except ConfigError as error:
            problems, cfg = error.problems, None
        odd = [line for line in problems if "\n" in line or len(line) > 1500]
        assert not odd, (command, words, odd)
        assert (cfg is None) == bool(problems), (command, words)
        if cfg is None:
            continue
        accepted += 1
        wrong: list[str] = []
        assert validate_config(cfg.schema, dict(cfg.leaves()), wrong) == cfg, (command, words, wrong)
        try:
            check_components(cfg)
        except EmbodyError:
            continue
    assert accepted > 0
