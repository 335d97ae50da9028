"""Code that config values refer to: checks of untrusted configs, and source files of the user."""

import functools
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from embodyrl.config.compose import conf_dir, format_override
from embodyrl.config.paths import HUB_NAME
from embodyrl.config.settings import Settings, is_key_or_subkey
from embodyrl.errors import shorten
from embodyrl.registry import find_entry_points, get_current_path

TRUST = "trust=true"
_ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)\\\$\{")
"""Pattern of `\\${`, which is the text `${`."""
_ENV_VALUE = re.compile(r"\$\{oc\.env:(\w+)\}")
_IMPORT_PATH = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_]\S*")
_CODE_OR_ADDRESS = re.compile(r"[\w.-]+:.*", re.DOTALL)
"""Pattern of values that import code (package.module:attr, package:Id-v0) or are addresses of servers."""
_SAFE_KEYS = (
    "video",
    "runner.experiment_name",
    "runner.logger.project_name",
    "algorithm.sampling_params.stop",
    "data.prompt_template",
    "data.system_prompt",
    "data.answer_pattern",
)
"""Keys whose values are texts, never code or addresses."""
_PROGRAM_KEYS = ("env.id",)
"""Keys whose value may be a hub repository (owner/name@revision) or a module with code that the run executes."""
_FILE_KEYS = ("env.python", "model.python", "model.chat_template")
"""Keys whose value is the path of a program that a run starts, or of a text that a run copies into checkpoints."""


_MAX_PROBLEMS = 20
_MAX_SHOWN = 1000


def find_untrusted_values(saved: Mapping[str, Any], overrides: Mapping[str, Any], file: Path) -> list[str]:
    """Return one line for each of the first values of a saved config that could run code, call a server or copy a file.

    Accepted values: names of registered components, module paths that an installed package registers or the included
    conf/ uses, and values of keys that are also on the command line. With `trust=true` on the command line all values
    are accepted.

    Args:
        saved: leaves of the file by dotted name, unresolved.
        overrides: leaves of the command line.
        file: path of the config, for messages.
    """
    if overrides.get("trust") is True:
        return []
    texts = {
        key: next((text for text in (key, *_iter_texts(value)) if _is_untrusted(key, value, text)), None)
        for key, value in saved.items()
        if key not in overrides
    }
    return [
        f"{file}: {shorten(key)}: {shorten(text)} runs code, calls a server or copies a file, and is not on the "
        f"command line. If you trust the author of this run, add {TRUST}; to allow only this value, add "
        f"{_suggest(key, saved[key])}."
        for key, text in islice(((key, text) for key, text in texts.items() if text is not None), _MAX_PROBLEMS)
    ]


def _suggest(key: str, value: Any) -> str:
    # Formatting a long list takes minutes.
    return format_override(key, value) if len(str(value)) <= _MAX_SHOWN else f"{shorten(key)}=..."


def _is_untrusted(key: str, value: Any, text: str) -> bool:
    if is_key_or_subkey(key, _SAFE_KEYS):  # interpolations of other keys could have any length
        return "${" in _ENV_VALUE.sub("x", _ESCAPED.sub("$(", text))
    return (
        (key in _FILE_KEYS and text == value)
        or (key in _PROGRAM_KEYS and _may_import(text))
        or (_may_execute_code_or_connect(text) and not _is_known(text))
    )


def split_trust(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into `trust=true` arguments and all others."""
    return [argument for argument in arguments if argument == TRUST], [
        argument for argument in arguments if argument != TRUST
    ]


def trust_overrides(cfg: Settings, extra_values: Mapping[str, Any] | None = None) -> list[str]:
    """Return ["trust=true"] if a command that loads the run's config needs this argument, else an empty list.

    The argument is needed if the config, or the values in `extra_values`, name code to import.
    """
    values = {key: value for key, value in cfg.leaves() if not is_key_or_subkey(key, _SAFE_KEYS)}
    return [TRUST] if find_untrusted_values({**values, **(extra_values or {})}, {}, Path()) else []


def find_user_modules(cfg: Settings) -> dict[str, Path]:
    """Return the source file of each user module that a value `package.module:attr` refers to, by module name.

    Modules of embodyrl, of the standard library and of installed packages are left out.
    """
    names = {
        match[1]
        for key, value in cfg.leaves()
        if not is_key_or_subkey(key, _SAFE_KEYS)
        for text in _iter_texts(value)
        if (match := _IMPORT_PATH.fullmatch(text))
    }
    files = ((name, _find_source(name)) for name in sorted(names))
    return {name: file for name, file in files if file is not None}


def python_path(cfg: Settings) -> list[str]:
    """Return the folders with user code that PYTHONPATH must contain for a command of this config.

    Installed packages need no entry, including packages that are installed from a folder (`pip install -e`).
    """
    current = [os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    start_folders = os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0]))  # found by `python -m` and `python FILE`
    depths = {file: name.count(".") + (file.name == "__init__.py") for name, file in find_user_modules(cfg).items()}
    module_folders = [os.path.abspath(file.parents[depth]) for file, depth in depths.items()]
    if not any(folder in (*current, *start_folders) for folder in module_folders):
        return []
    return list(dict.fromkeys([*current, *(folder for folder in module_folders if folder in start_folders)]))


def format_shell_command(arguments: Sequence[str], cfg: Settings) -> str:
    """Return a command of embodyrl as one shell line, with the PYTHONPATH that the code named in `cfg` needs."""
    return f"{path_prefix(python_path(cfg))}{shlex.join(['embodyrl', *arguments])}"


def path_prefix(folders: Sequence[str]) -> str:
    """Return the beginning of a shell line that sets PYTHONPATH to these folders; empty without folders."""
    return f"PYTHONPATH={shlex.quote(os.pathsep.join(folders))} " if any(folders) else ""


def _find_source(module: str) -> Path | None:
    """Return the source file of a module of the user, without importing the module."""
    top, *submodules = module.split(".")
    if top == "embodyrl" or top in sys.stdlib_module_names:
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a module without a spec, for example __main__
        return None
    if spec is None:
        return None
    paths = [Path(path, *submodules) for path in spec.submodule_search_locations or ()]
    files = [file for path in paths for file in (path.with_name(f"{path.name}.py"), path / "__init__.py")]
    files += [Path(spec.origin)] if spec.origin and not submodules else []
    source = next((file for file in files if file.is_file()), None)
    return None if source is None or {"site-packages", "dist-packages"} & set(source.parts) else source


def _may_import(env_id: str) -> bool:
    """Return True for a hub program, a `module:Id-v0`, and a `namespace/Id-v0` with a module of the user."""
    namespace, slash, _ = env_id.partition("/")
    is_local = slash != "" and namespace.isidentifier() and _find_source(namespace) is not None
    return (
        is_local or (":" in env_id and not _is_known(env_id)) or (HUB_NAME.fullmatch(env_id) and "@" in env_id) is True
    )


def _may_execute_code_or_connect(text: str) -> bool:
    # This user's environment variables may contain a colon (DISPLAY=:0); other interpolations could hide a path.
    escaped = _ESCAPED.sub("$(", text)
    variants = (_ENV_VALUE.sub(value, escaped) for value in ("x", lambda match: os.environ.get(match[1], "")))
    return any("${" in variant or _CODE_OR_ADDRESS.fullmatch(variant) is not None for variant in variants)


def _is_known(path: str) -> bool:
    if any(entry.group.startswith("embodyrl.") for entry in find_entry_points(value=path)):
        return True
    return get_current_path(path) in _read_words(conf_dir())


@functools.cache
def _read_words(folder: Path) -> frozenset[str]:
    return frozenset(word for file in folder.rglob("*.yaml") for word in file.read_text(encoding="utf-8").split())


def _iter_texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        for item in value:
            yield from _iter_texts(item)
    elif isinstance(value, str):
        yield value
