"""Extract the training command of a shell script without running the script: variables, arrays, continued lines."""

import re
import shlex
from dataclasses import dataclass, field

from embodyrl_migrate.tables import number

_WORD = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@-]*=")
_ASSIGNED = re.compile(r"(?:export\s+|local\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\((.*)", re.DOTALL)
_SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?:(?P<op>:?[-=])(?P<else>(?:[^{}]|\{[^{}]*\})*))?\}|\$(?P<plain>\w+)")
_OPEN = re.compile(r"""(?:export\s+)?[A-Za-z_]\w*=(?:"[^"]*|'[^']*)""")
"""Pattern of an assignment whose quotation does not end on its line."""
_TEST = re.compile(r"(?:if|elif)\s+\[\[?\s(.*)\s\]\]?\s*(?:;\s*then)?")
_PROGRAMS = ("--config", "--config-path", "--config_path", "--config-name", "--config_name")


@dataclass(slots=True, kw_only=True)
class Script:
    """Training command of a script: the command with the most overrides."""

    program: str = ""
    """Module or file that Python runs."""
    overrides: list[str] = field(default_factory=list)
    """Overrides of the form key=value."""
    config: str | None = None
    """Config file of the command."""
    unclear: list[str] = field(default_factory=list)
    """Values that depend on arguments or on the machine."""


def read_shell(text: str) -> Script:
    r"""Find the training command and its arguments.

    >>> read_shell("N=4\npython -m verl.trainer.main_ppo a.b=$N c.d=$((N * 2)) $@").overrides
    ['a.b=4', 'c.d=8']
    """
    reader = _Reader()
    for line in _logical_lines(text):
        reader.read(line)
    best = max(reader.scripts, key=lambda script: len(script.overrides), default=Script())
    training = [script for script in reader.scripts if script.overrides]
    if len(training) > 1:
        best.unclear.append(f"the script starts {len(training)} commands with overrides; keep one of them")
    used = [name for name in dict.fromkeys(reader.changed) if re.search(rf"\$\{{?{name}\b", text)]
    if used:
        names = ", ".join(used)
        best.unclear.append(f"a condition on arguments or the machine sets {names}; give the values as overrides")
    return best


def _logical_lines(text: str) -> list[str]:
    """Return the lines without comments; continued lines, and arrays and quoted values of several lines, are joined."""
    uncommented = "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("#"))
    # What another program would print is not known; the innermost first, for they may be nested.
    while uncommented != (uncommented := re.sub(r"\$\((?!\()[^()`\n]*\)", "$COMMAND", uncommented)):
        pass
    lines: list[str] = []
    for line in re.sub(r"\\\n\s*", " ", uncommented).split("\n"):
        open_array = lines and _ARRAY.match(lines[-1]) and lines[-1].count("(") > lines[-1].count(")")
        if open_array or (lines and _OPEN.fullmatch(lines[-1])):
            lines[-1] += f"\n{line.strip()}"
        else:
            lines.append(line.strip())
    return lines


class _Reader:
    """Reader of a script, line by line."""

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}
        self.changed: list[str] = []
        """Variables whose value depends on a condition with an unknown result."""
        self.scripts: list[Script] = []
        self.branches: list[bool | None] = []
        """For each open condition, True if the branch is taken; None: unknown, and processed like a taken branch."""
        self.taken: list[bool | None] = []
        """For each open condition, True if one of its branches was taken."""

    def read(self, line: str) -> None:
        """Process a logical line."""
        if self._branch(line) or False in self.branches:
            return
        array = _ARRAY.fullmatch(line)
        if array and line.endswith(")"):
            arguments = [_expand(word, self.variables) for word in _split(array[3][:-1])]
            self.arrays[array[1]] = (self.arrays.get(array[1], []) if array[2] else []) + arguments
        elif any(map(_is_launch, arguments := _expand_words(line, self.variables, self.arrays))):
            self.scripts.append(_parse_command(arguments))
        elif match := _ASSIGNED.fullmatch(line):
            arguments = _split(match[2])
            value = _expand(arguments[0] if arguments else "", self.variables)
            if None in self.branches and self.variables.get(match[1], None) != value:
                self.changed.append(match[1])
            self.variables[match[1]] = value

    def _branch(self, line: str) -> bool:
        """Process a line of a condition; return False if the line is not part of a condition."""
        word = line.split(";")[0].split(" ")[0]
        if word == "if" and not line.endswith("fi"):
            self.branches.append(self._condition_is_met(line))
            self.taken.append(self.branches[-1])
        elif word in ("elif", "else") and self.branches:
            was_taken = self.taken[-1]
            is_taken = None if was_taken is None else not was_taken and (word == "else" or self._condition_is_met(line))
            self.branches[-1], self.taken[-1] = is_taken, None if is_taken is None else bool(was_taken or is_taken)
        elif word == "fi" and self.branches:
            self.branches.pop()
            self.taken.pop()
        else:
            return False
        return True

    def _condition_is_met(self, line: str) -> bool | None:
        condition = _TEST.fullmatch(line)
        match [_expand(word, self.variables) for word in _split(condition[1])] if condition else []:
            case ["-z", value] if "$" not in value:
                return not value
            case ["-n", value] if "$" not in value:
                return bool(value)
            case [one, "==" | "=" | "!=" as sign, other] if not re.search(r"[$*?\[]", one + other):
                return (one == other) is (sign != "!=")
        return None


def _split(text: str) -> list[str]:
    text = _SUM.sub(lambda match: re.sub(r"\s+", "", match[0]), text)
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quotation that does not end on this line
        return text.split()


def _is_launch(word: str) -> bool:
    return word in ("python", "python3", "torchrun", "cosmos-rl", "bash", "deepspeed") or word.endswith("/python")


def _expand(word: str, variables: dict[str, str]) -> str:
    """Substitute the values of variables; unknown variables are unchanged."""

    def total(match: re.Match[str]) -> str:
        inner = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda m: variables.get(m[1], m[0]), match[1])
        result = number(inner)
        return match[0] if result is None else f"{int(result)}"

    def value(match: re.Match[str]) -> str:
        name = match["name"] or match["plain"]
        current = variables.get(name)
        if match["op"] and (current is None or (current == "" and ":" in match["op"])):
            return _expand(match["else"], variables)
        return f"${name}" if current is None else current

    return _VARIABLE.sub(value, _SUM.sub(total, word))


def _expand_words(line: str, variables: dict[str, str], arrays: dict[str, list[str]]) -> list[str]:
    """Return the words of a command with arrays and variables substituted."""
    result: list[str] = []
    for word in _split(line):
        if array := re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", word):
            result += [_expand(item, variables) for item in arrays.get(array[1], [])]
        elif word not in ("$@", "$*", "\\"):
            value = _expand(word, variables)
            # What is not known is empty where the script runs.
            items = [item for item in value.split() if not re.fullmatch(r"\$\w+", item)]
            result += items if " " in value.strip() and all(_WORD.match(item) for item in items) else [value]
    return result


def _parse_command(arguments: list[str]) -> Script:
    """Parse the words of one command."""
    script = Script()
    start = next(i for i, word in enumerate(arguments) if _is_launch(word))
    options: dict[str, str] = {}
    for index, word in enumerate(arguments[start:], start=start):
        flag, separator, value = word.partition("=")
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        if flag in _PROGRAMS:
            options[flag.strip("-").replace("_", "-")] = value if separator else following
        elif not script.program and (arguments[index - 1] == "-m" or word.endswith((".py", ".sh"))) and not separator:
            script.program = word
        elif _WORD.match(word) and "." in flag + value and not flag.isupper():
            script.overrides.append(word)
    if "config" in options:
        script.config = options["config"]
    elif "config-name" in options:
        name = f"{options['config-name'].removesuffix('.yaml')}.yaml"
        script.config = f"{options['config-path']}/{name}" if options.get("config-path") else name
    return script
