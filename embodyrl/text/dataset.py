"""Rows of text tasks, with optional images, from JSON Lines or Parquet files, folders, or user functions."""

import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.clock import raise_after
from embodyrl.config.paths import resolve_asset
from embodyrl.errors import ConfigError, format_error
from embodyrl.files import inside, read_json_lines, read_parquet, visible_files
from embodyrl.registry import load, takes
from embodyrl.text.chat import (
    ChatTemplate,
    RejectedMessages,
    count_turn_tokens,
    find_control_tokens,
    find_unknown_token_warnings,
    measure_prompts,
    remove_control_tokens,
)
from embodyrl.text.conversation import (
    TextRow,
    complete_messages,
    get_column_value,
    is_conversation,
    place_images,
    read_texts,
)
from embodyrl.text.images import read_images
from embodyrl.text.messages import IMAGE_PLACEHOLDER, join_messages, split_images
from embodyrl.text.settings import PairSettings, RowSettings, is_function
from embodyrl.types import IntArray

SUFFIXES = (".jsonl", ".parquet")
_COUNTED_ROWS = 1000
"""Maximum number of rows that are checked for unknown tokens."""
_PATTERN_S = 1.0
"""Maximum CPU time for data.answer_pattern in one row, in seconds."""

_CHANGE = (
    "since the start of the run, so validation rows could occur in training. Use a fixed seed in a function of rows, "
    "and do not edit files of rows during a run."
)


@dataclass(frozen=True)
class TextRows:
    """Rows of a training source and an optional validation source.

    Picklable: an unpickled copy reads the sources again, and raises a ConfigError if rows have changed.
    """

    cfg: RowSettings
    name: str
    held_out: int
    """Number of validation rows; these rows are the last rows."""
    repeated: int = 0
    """Number of validation rows whose prompt also occurs in training; rows with images are not compared."""
    prompt_bytes: int = 0
    """Length of the longest conversation, in UTF-8 bytes."""
    prompt_tokens: int = 0
    """Length of the longest prompt in tokens, with the chat template; 0: not counted, because there is no limit."""
    turn_tokens: int = 0
    """Number of tokens that the chat template adds around a reply and a tool's answer; 0 if prompts are not counted."""
    row_indices: IntArray | None = field(default=None, compare=False)
    """Indices of the rows within the length limit; None: all rows."""
    checksums: IntArray | None = field(default=None, compare=False)
    """CRC-32 of the texts of each row of the sources; None: not known yet."""
    pictures: int = 0
    """Maximum number of images per row."""
    image_size: tuple[int, int] = (0, 0)
    """Maximum height and maximum width of the images, in pixels."""
    roles: tuple[tuple[str, ...], ...] = ()
    """All distinct sequences of message roles in the rows."""
    warnings: tuple[str, ...] = ()
    """Warnings about the rows, one line each."""

    @cached_property
    def _raw(self) -> tuple[tuple[str, Sequence[Any]], ...]:
        sources = tuple((path, _read_rows(path, split, self.cfg)) for path, split in self.cfg.sources)
        if self.checksums is not None and sum(len(rows) for _, rows in sources) != len(self.checksums):
            raise ConfigError(f"{self.name}: the number of rows has changed {_CHANGE}")
        return sources

    def __getstate__(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.__dataclass_fields__}

    @property
    def total(self) -> int:
        """Number of rows of all sources, before filters."""
        return sum(len(rows) for _, rows in self._raw)

    def __len__(self) -> int:
        return self.total if self.row_indices is None else len(self.row_indices)

    def __getitem__(self, index: int) -> TextRow:
        return self.row(int(index if self.row_indices is None else self.row_indices[index]))

    def row(self, index: int) -> TextRow:
        """Return the row at an index into the concatenated sources.

        Raises:
            ConfigError: a column is missing or has a wrong type, or the row has changed; the message names the source
                and the row.
        """
        position = index
        for path, rows in self._raw:
            if position < len(rows):
                asset = None if is_function(path) else resolve_asset(path)
                folder = None if asset is None else asset if asset.is_dir() else asset.parent
                where = f"{path}, row {position + 1}"
                row = _parse_row(rows[position], self.cfg, where, folder)
                if self.checksums is not None and self.checksums[index] != _compute_checksum(row):
                    raise ConfigError(f"{where} has changed {_CHANGE}")
                return row
            position -= len(rows)
        raise IndexError(index)


def open_rows(
    cfg: RowSettings,
    *,
    tokenizer: Path | None,
    template: ChatTemplate | None = None,
    vocabulary: Path | None = None,
    json_answers: bool = False,
) -> TextRows:
    """Open the rows of a run and check every row of a file.

    Args:
        cfg: the section `data`, with `data.path` set.
        tokenizer: folder of the tokenizer.json that measures prompts; None: prompts are measured in characters, for the
            small vocabulary with one token per character.
        template: chat template of prompts; None: prompts are concatenated messages.
        vocabulary: folder of the tokenizer that is checked for unknown tokens; None: no check.
        json_answers: accept lists and objects as answers, as JSON text.

    Raises:
        ConfigError: a source cannot be read, a row is malformed, or no row is left.
    """
    assert cfg.path is not None
    name = cfg.path.rpartition(":")[2] if is_function(cfg.path) else Path(cfg.path).stem
    rows = TextRows(cfg=cfg, name=name, held_out=0)
    all_rows = _load_rows(rows, json_answers)
    row_indices, prompt_tokens, turn_tokens = np.arange(rows.total), 0, 0
    removed_tokens = {} if tokenizer is None or template is None else find_control_tokens(tokenizer, template)
    if cfg.max_prompt_length is not None:
        prompts = [render_prompt(row, template, removed_tokens) for row in all_rows]
        lengths = measure_prompts(prompts, tokenizer, template=template)
        row_indices = row_indices[np.asarray(lengths) <= cfg.max_prompt_length]
        prompt_tokens = max((length for length in lengths if length <= cfg.max_prompt_length), default=0)
        turn_tokens = count_turn_tokens(tokenizer, template=template)
    remaining = [all_rows[i] for i in row_indices]
    if len(rows._raw) == 1:
        held_out = _shrink_to_whole_groups(remaining, round(cfg.val_share * len(remaining)))
    else:  # rows of a separate validation source are last and are the held-out rows
        held_out = int((row_indices >= len(rows._raw[0][1])).sum())
    if held_out >= len(remaining):
        raise ConfigError(
            f"data.path={cfg.path}: none of the {rows.total} rows remains for training; raise data.max_prompt_length "
            "or lower data.val_share."
        )
    first_held_out = len(remaining) - held_out
    training_prompts = {row.messages for row in remaining[:first_held_out]}
    image_sizes = [[picture.size for picture in row.pictures] for row in remaining]
    sizes = [size for row in image_sizes for size in row] or [(0, 0)]
    return replace(
        rows,
        row_indices=row_indices if len(row_indices) < rows.total else None,
        checksums=np.array([_compute_checksum(row) for row in all_rows]),
        held_out=held_out,
        repeated=sum(row.messages in training_prompts and not row.pictures for row in remaining[first_held_out:]),
        prompt_bytes=max(len(join_messages(row.messages).encode()) for row in remaining),
        prompt_tokens=prompt_tokens,
        turn_tokens=turn_tokens,
        pictures=max(map(len, image_sizes)),
        image_size=(max(height for height, _ in sizes), max(width for _, width in sizes)),
        roles=tuple(dict.fromkeys(tuple(m.role for m in row.messages) for row in remaining)),
        warnings=tuple(_find_warnings(remaining, row_indices, removed_tokens, vocabulary, template)),
    )


def _compute_checksum(row: TextRow) -> int:
    return zlib.crc32("\0".join((join_messages(row.messages), row.reference, row.rejected or "")).encode())


def _load_rows(rows: TextRows, json_answers: bool) -> list[TextRow]:
    cfg = rows.cfg
    if empty := [path for path, raw_rows in rows._raw if not len(raw_rows)]:
        raise ConfigError(f"{empty[0]} contains no rows. Correct the path, the split or the function.")
    loaded = [rows.row(i) for i in range(rows.total)]
    if not json_answers and cfg.answer_pattern is None:
        for key in (cfg.answer_key, *([cfg.rejected_key] if isinstance(cfg, PairSettings) else [])):
            _require_text(rows, key)
    return loaded


def _require_text(rows: TextRows, key: str) -> None:
    for path, raw_rows in rows._raw:
        for number, raw in enumerate(raw_rows, start=1):
            answer = get_column_value(raw, key) if isinstance(raw, Mapping) else None
            if isinstance(answer, list | Mapping) and not is_conversation(answer):
                raise ConfigError(
                    f"{path}, row {number}: column '{key}' is a list or an object, but must be one text. Set another "
                    "column (data.answer_key), reward.name=code, or a reward function of your own."
                )


def _shrink_to_whole_groups(rows: Sequence[TextRow], held_out: int) -> int:
    """Return the number of validation rows, reduced so that no group has rows in training and validation."""
    while 0 < held_out < len(rows):
        group = rows[-held_out].group
        if group is None or group != rows[-held_out - 1].group:
            break
        held_out -= 1
    return held_out


def _find_warnings(
    rows: Sequence[TextRow],
    row_indices: IntArray,
    removed_tokens: Collection[str],
    vocabulary: Path | None,
    template: ChatTemplate | None,
) -> Iterator[str]:
    matches = [
        (index, token)
        for index, row in zip(row_indices.tolist(), rows, strict=True)
        for token in removed_tokens
        if any(token in message.content for message in row.messages)
    ]
    checked_rows = rows[:_COUNTED_ROWS]
    if vocabulary is not None:
        texts = [render_prompt(row, template, removed_tokens) for row in checked_rows]
        texts += [row.reference for row in checked_rows]
        yield from find_unknown_token_warnings(texts, vocabulary, template=template)
    if matches:
        index, token = matches[0]
        first, count = f"row {index + 1}, {token}", len({row for row, _ in matches})
        yield f"{count} rows contain control tokens of the model, which are removed (first: {first})"


def contains_text_rows(path: str) -> bool:
    """Return True if data.path refers to text rows, False for demonstrations."""
    asset = resolve_asset(path)
    if asset.is_dir():
        return not (asset / "meta").exists() and bool(visible_files(asset, *SUFFIXES))
    return is_function(path) or asset.suffix in SUFFIXES


def _read_rows(path: str, split: str | None, cfg: RowSettings) -> Sequence[Any]:
    if is_function(path):
        function = load(path, "data.path", wants="a function that returns rows", fits=takes(0))
        try:
            rows = function(**cfg.kwargs)
            if isinstance(rows, Mapping):
                raise TypeError("the function must return a list of rows, but returns a dictionary")
            return list(rows)
        except Exception as error:
            arguments = f" with data.kwargs={cfg.kwargs}" if cfg.kwargs else ""
            raise ConfigError(
                f"data.path={path} fails{arguments}: {format_error(error)}. Correct the function or its arguments."
            ) from error
    source = resolve_asset(path) / (cfg.subset or "")
    files = [source] if source.is_file() else visible_files(source, *SUFFIXES)
    if not files:
        raise ConfigError(
            f"data.path={path}: {source} does not exist, or contains no "
            f"{' or '.join(SUFFIXES)} files. Correct the path."
        )
    try:
        for file in files if source.is_dir() else ():
            inside(source, file.relative_to(source))
    except ValueError as error:
        raise ConfigError(f"data.path={path}: {error}. Copy the file into the folder.") from error
    if split is not None:
        files = _select_split(files, source, split, f"data.path={path}")
    return [row for file in files for row in _read_file(file)]


def _select_split(files: Sequence[Path], source: Path, split: str, where: str) -> list[Path]:
    """Return the files of a split, which is the name of a file without part numbers, or of a folder.

    Without such a name, `split` selects the only name that begins with it, such as train_prefs for `train`.

    Raises:
        ConfigError: no name or several names begin with `split`.
    """
    names = {file: {re.split(r"-|[._]\d", file.stem)[0], *file.relative_to(source).parent.parts} for file in files}
    selected = [file for file in files if split in {file.stem, *names[file]}]
    known = set().union(*names.values())
    similar = {name for name in known if re.split(r"[-._]", name)[0] == split}
    if not selected and len(similar) == 1:
        selected = [file for file in files if similar <= names[file]]
    if not selected:
        raise ConfigError(f"{where} has no split '{split}'. Set one of {', '.join(sorted(similar or known))}.")
    return selected


def _read_file(file: Path) -> list[Any]:
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"{file} has the unsupported suffix '{file.suffix}'. Use a {' or '.join(SUFFIXES)} file.")
    if file.suffix == ".parquet":
        from pyarrow import ArrowException

        try:
            return read_parquet(file).to_pylist()
        except (ArrowException, OSError) as error:
            raise ConfigError(f"{file} cannot be read: {error}. Download the file again, or split it.") from error
    try:
        return [row for _, row in read_json_lines(file)]
    except ValueError as error:
        raise ConfigError(f"{file}, {error}. Correct or remove the line.") from error


def _parse_row(raw: Any, cfg: RowSettings, where: str, folder: Path | None) -> TextRow:
    if isinstance(raw, TextRow):
        row, pictures = raw, raw.pictures
        if isinstance(cfg, PairSettings) and row.rejected is None:
            raise ConfigError(f"{where}: the rejected answer is missing. Set TextRow(..., rejected=...).")
    elif isinstance(raw, Mapping):
        row = _read_columns(raw, cfg, where)
        pictures = None if cfg.image_key is None else get_column_value(raw, cfg.image_key)
    else:
        raise ConfigError(f"{where}: a row must be an object with columns, but is {str(raw)[:60]!r}.")
    images = read_images(pictures, folder, where, cfg.max_image_edge)
    try:
        messages = complete_messages(row.messages, cfg)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}. Correct the rows, or set data.prompt_key.") from error
    try:
        messages = place_images(messages, [image.size for image in images])
    except ValueError as error:
        raise ConfigError(
            f"{where}: {error}. Use one {IMAGE_PLACEHOLDER} per image, or none to place the images first."
        ) from error
    return replace(row, messages=messages, pictures=images)


def _read_columns(raw: Mapping[str, Any], cfg: RowSettings, where: str) -> TextRow:
    """Return the row in the columns of a data set, without its images."""
    columns = [(cfg.prompt_key, "prompt_key"), (cfg.answer_key, "answer_key")]
    columns += [(cfg.rejected_key, "rejected_key")] if isinstance(cfg, PairSettings) else []
    columns += [(cfg.image_key, "image_key")] if cfg.image_key is not None else []
    for key, option in columns:
        if get_column_value(raw, key) is None:
            if key in raw:
                raise ConfigError(f"{where}: column '{key}' is empty (null). Fill in a value, or remove the row.")
            raise ConfigError(
                f"{where}: there is no column '{key}'. Set data.{option} to one of {', '.join(map(str, raw))}."
            )
    row = read_texts(raw, cfg, where)
    if cfg.answer_pattern is None:
        return row
    # The pattern may come from an untrusted config. In workers, the limit does not apply: all rows were checked before.
    error = ConfigError(f"{where}: data.answer_pattern={cfg.answer_pattern!r} takes too long. Simplify the pattern.")
    with raise_after(_PATTERN_S, error, counts_cpu_time=True):
        match = re.search(cfg.answer_pattern, row.reference)
    matched = match and match[1 if match.re.groups else 0]
    if matched is None:
        raise ConfigError(
            f"{where}: column '{cfg.answer_key}' does not match data.answer_pattern={cfg.answer_pattern!r}: "
            f"{row.reference[-60:]!r}. Correct the row or the pattern."
        )
    return replace(row, reference=matched.strip())


def render_prompt(row: TextRow, template: ChatTemplate | None, removed_tokens: Collection[str]) -> str:
    """Return the rendered prompt of a row, without its images."""
    texts = ["".join(p for p in split_images(m.content) if isinstance(p, str)) for m in row.messages]
    texts = [remove_control_tokens(text, removed_tokens) for text in texts]
    if template is not None:
        turns = [{"role": m.role, "content": text} for m, text in zip(row.messages, texts, strict=True)]
        for parts in (True,) if row.pictures else (False, True):
            with suppress(RejectedMessages):  # the check of the policy reports invalid roles
                return template.render(turns, parts=parts)
    return "".join(texts)
