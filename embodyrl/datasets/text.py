"""Rows of text tasks from JSON lines, Parquet, a folder of either, or a function of the user's; their pictures."""

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodyrl.config.paths import resolve_asset
from embodyrl.conversation import PICTURE, Message, TextRow, join_messages, place_pictures
from embodyrl.datasets.settings import PairSettings, RowSettings, is_function
from embodyrl.errors import ConfigError
from embodyrl.files import available_bytes
from embodyrl.registry import Registry, takes
from embodyrl.types import ByteArray, IntArray

if TYPE_CHECKING:
    from PIL.Image import Image

_ORIENTATION = 0x0112  # of EXIF; from 5 on height and width are exchanged


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of a row."""

    source: Path | bytes | ByteArray
    where: str
    """Source and row, for messages."""
    longest: int | None = None
    """Pixels of the longer edge, where it would be longer."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, of which a file's header tells.

        Raises:
            ConfigError: it is no picture.
        """
        if isinstance(self.source, np.ndarray):
            return self._fitted(*self.source.shape[:2])
        with self._open() as image:
            turned = image.getexif().get(_ORIENTATION, 1) >= 5
            return self._fitted(*((image.width, image.height) if turned else (image.height, image.width)))

    def pixels(self) -> ByteArray:
        """Return the picture [H, W, 3].

        Raises:
            ConfigError: it is no picture, or damaged.
        """
        from PIL import Image, ImageOps

        if isinstance(self.source, np.ndarray) and self.size == self.source.shape[:2]:
            return self.source
        height, width = self.size
        with self._open() as image:
            shown = ImageOps.exif_transpose(image).convert("RGB")
            return np.asarray(shown.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0))

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        scale = min(1.0, (self.longest or max(height, width)) / max(height, width))
        return max(1, round(height * scale)), max(1, round(width * scale))

    @contextmanager
    def _open(self) -> "Iterator[Image]":
        from PIL import Image

        try:
            if isinstance(self.source, np.ndarray):
                yield Image.fromarray(self.source)
                return
            with Image.open(io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source) as image:
                yield image
        except (OSError, Image.DecompressionBombError) as error:
            raise ConfigError(f"{self.where}: its picture cannot be read: {error}.") from error


def pictures_of(value: Any, folder: Path, where: str, longest: int | None) -> tuple[Picture, ...]:
    """The pictures that a column holds: one or a list of files (relative to `folder`), bytes, or pixels.

    A picture may also be a mapping with `bytes` or `path`, as Hugging Face data sets store it.

    Raises:
        ConfigError: it holds something else.
    """
    values = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    return tuple(Picture(_source(v, folder, where), where, longest) for v in values)


def _source(value: Any, folder: Path, where: str) -> Path | bytes | ByteArray:
    if isinstance(value, Picture):
        return value.source
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if isinstance(value, (str, Path)) and "://" not in str(value):
        return folder / value
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3:
        return value
    raise ConfigError(
        f"{where}: a picture is a file of this machine, the bytes of one, or an array [H, W, 3] of uint8; found "
        f"{str(value)[:60]!r}."
    )


SOURCES: Registry[Any] = Registry(
    "data.path", group="embodyrl.text_tasks", wants="a function of yours that returns rows", fits=takes(0)
)
"""Functions that return rows: package.module:function, or the entry point of an installed package."""
SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class TextRows:
    """Rows of one or two sources; implements `Rows`. Another process reads the sources again."""

    cfg: RowSettings
    name: str
    held_out: int
    repeated: int = 0
    """Rows held out that ask what a row to learn from asks too; those with pictures are not compared."""
    prompt_bytes: int = 0
    keep: IntArray | None = field(default=None, compare=False)
    """Rows that are not too long; None: all."""
    pictures: int = 0
    """Of the row that has most."""
    image_size: tuple[int, int] = (0, 0)
    """Height and width that have room for each of them."""

    @cached_property
    def _raw(self) -> tuple[tuple[str, Sequence[Any]], ...]:
        return tuple((path, _read(path, split, self.cfg)) for path, split in self.cfg.sources)

    def __getstate__(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.__dataclass_fields__}

    @property
    def total(self) -> int:
        """Rows before any was left out."""
        return sum(len(rows) for _, rows in self._raw)

    def __len__(self) -> int:
        return self.total if self.keep is None else len(self.keep)

    def __getitem__(self, index: int) -> TextRow:
        return self.row(int(index if self.keep is None else self.keep[index]))

    def row(self, index: int) -> TextRow:
        """Row by its place in the sources.

        Raises:
            ConfigError: a column is missing or of the wrong kind; names the source and the row.
        """
        for path, rows in self._raw:
            if index < len(rows):
                found = None if is_function(path) else resolve_asset(path)
                folder = Path() if found is None else found if found.is_dir() else found.parent
                return _row(rows[index], self.cfg, f"{path}, row {index + 1}", folder)
            index -= len(rows)
        raise IndexError(index)


def open_rows(cfg: RowSettings, *, tokenizer: Path | None) -> TextRows:
    """Open the rows of a run; every row of a file is checked once, here.

    Args:
        cfg: `data.path` must be set.
        tokenizer: folder with tokenizer.json that measures prompts; None: the small vocabulary has one token per
            character.

    Raises:
        ConfigError: a source cannot be read, a row is malformed, or nothing is left.
    """
    assert cfg.path is not None
    name = cfg.path.rpartition(":")[2] if is_function(cfg.path) else Path(cfg.path).stem
    rows = TextRows(cfg=cfg, name=name, held_out=0)
    try:
        all_rows = [rows.row(i) for i in range(rows.total)]
    except (TypeError, ValueError, LookupError) as error:
        if isinstance(error, ConfigError) or not cfg.kwargs:
            raise
        raise ConfigError(f"data.path={cfg.path} gives no rows with data.kwargs={cfg.kwargs}: {error}.") from error
    conversations = [row.messages for row in all_rows]
    keep = np.arange(rows.total)
    if cfg.max_prompt_length is not None and rows.total:
        lengths = _lengths([" ".join(m.content for m in conversation) for conversation in conversations], tokenizer)
        keep = keep[lengths <= cfg.max_prompt_length]
    # With a source of its own for validation, its rows come last and are the held-out ones.
    own = len(rows._raw[0][1])
    held_out = round(cfg.val_share * len(keep)) if len(rows._raw) == 1 else int((keep >= own).sum())
    if len(keep) - held_out < 1:
        raise ConfigError(
            f"data.path={cfg.path}: no row is left for training out of {rows.total}; raise data.max_prompt_length or "
            "lower data.val_share."
        )
    border = len(keep) - held_out
    asked = {conversations[i] for i in keep[:border]}
    longest = max(len(join_messages(conversations[i]).encode()) for i in keep)
    shown = [[picture.size for picture in all_rows[i].pictures] for i in keep]
    sizes = [size for row in shown for size in row] or [(0, 0)]
    return replace(
        rows,
        keep=keep if len(keep) < rows.total else None,
        held_out=held_out,
        repeated=sum(conversations[i] in asked and not all_rows[i].pictures for i in keep[border:]),
        prompt_bytes=longest,
        pictures=max(map(len, shown)),
        image_size=(max(height for height, _ in sizes), max(width for _, width in sizes)),
    )


def holds_text(path: str) -> bool:
    """Whether data.path names rows of text and not the demonstrations that `embodyrl collect` writes."""
    found = resolve_asset(path)
    if found.is_dir():
        return not (found / "meta").exists() and any(f.suffix in SUFFIXES for f in found.rglob("*"))
    return is_function(path) or found.suffix in SUFFIXES


def _read(path: str, split: str | None, cfg: RowSettings) -> Sequence[Any]:
    if is_function(path):
        try:
            return SOURCES.get(path)(**cfg.kwargs)
        except TypeError as error:
            raise ConfigError(f"data.path={path} refuses data.kwargs={cfg.kwargs}: {error}.") from error
    found = resolve_asset(path) / (cfg.subset or "")
    files = sorted(f for f in found.rglob("*") if f.suffix in SUFFIXES) if found.is_dir() else [found]
    if not files or not files[0].is_file():
        raise ConfigError(
            f"data.path={path}: no such file, or a folder without {' or '.join(SUFFIXES)} files: {found}."
        )
    if split is not None:
        names = {f: (f.name, *f.relative_to(found).parent.parts) for f in files}
        parts = {f: {re.split(r"[-._]", name)[0] for name in some} for f, some in names.items()}
        files = [f for f in files if split in parts[f]]
        if not files:
            known = ", ".join(sorted(set().union(*parts.values())))
            raise ConfigError(f"data.path={path} has no split '{split}'; its files and folders begin with {known}.")
    return [row for file in files for row in _read_file(file)]


def _read_file(file: Path) -> list[Any]:
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"{file}: rows are read from {' and '.join(SUFFIXES)} files, not '{file.suffix}'.")
    if file.suffix == ".parquet":
        from pyarrow import ArrowInvalid, parquet

        try:
            return _read_packed(parquet.ParquetFile(file), file)
        except (ArrowInvalid, OSError) as error:
            raise ConfigError(f"{file} is no readable Parquet file: {error}.") from error
    rows = []
    # Not `splitlines`: a text may hold U+2028 and other characters that are line ends elsewhere.
    # Some editors begin a file with a mark of its encoding.
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{file}, line {number}: not JSON ({error}): {line[:60]!r}.") from error
    return rows


def _read_packed(source: Any, file: Path) -> list[Any]:
    """Rows of a Parquet file, a few at a time: some kilobytes can be packed to fill any memory."""
    limit = available_bytes() // 4  # as Python objects they take a multiple
    size = sum(source.metadata.row_group(i).total_byte_size for i in range(source.num_row_groups))
    rows: list[Any] = []
    batches = source.iter_batches(64)
    while size <= limit:
        batch = next(batches, None)
        if batch is None:
            return rows
        rows += batch.to_pylist()
        size += batch.nbytes
    raise ConfigError(f"{file} unpacks to more than {limit >> 20} MiB, a quarter of the free memory; split it.")


def _row(raw: Any, cfg: RowSettings, where: str, folder: Path) -> TextRow:
    if isinstance(raw, TextRow):
        if isinstance(cfg, PairSettings) and raw.rejected is None:
            raise ConfigError(f"{where}: has no worse answer; give TextRow(..., rejected=...).")
        return _shown(raw, pictures_of(raw.pictures, folder, where, cfg.max_image_edge), where)
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: expected an object with columns, found {str(raw)[:60]!r}.")
    columns = [(cfg.prompt_key, "prompt_key"), (cfg.answer_key, "answer_key")]
    columns += [(cfg.rejected_key, "rejected_key")] if isinstance(cfg, PairSettings) else []
    columns += [(cfg.image_key, "image_key")] if cfg.image_key is not None else []
    for key, option in columns:
        if _column(raw, key) is None:
            if key in raw:
                raise ConfigError(f"{where}: column '{key}' is empty (null); fill it or leave the row out.")
            raise ConfigError(
                f"{where}: no column '{key}'. It has {', '.join(map(str, raw))}; set data.{option} to one of them."
            )
    reference = _answer(_column(raw, cfg.answer_key))
    if cfg.answer_pattern is not None:
        match = re.search(cfg.answer_pattern, reference)
        found = match and match[1 if match.re.groups else 0]
        if found is None:
            raise ConfigError(
                f"{where}: column '{cfg.answer_key}' does not fit data.answer_pattern={cfg.answer_pattern!r}: "
                f"{reference[-60:]!r}. Correct the row or the pattern."
            )
        reference = found.strip()
    system = () if cfg.system_prompt is None else (Message(role="system", content=cfg.system_prompt),)
    rejected = _answer(_column(raw, cfg.rejected_key)) if isinstance(cfg, PairSettings) else None
    messages = system + _messages(_column(raw, cfg.prompt_key), cfg, where)
    row = TextRow(messages=messages, reference=reference, rejected=rejected)
    if cfg.image_key is None:
        return row
    return _shown(row, pictures_of(_column(raw, cfg.image_key), folder, where, cfg.max_image_edge), where)


def _shown(row: TextRow, pictures: tuple[Picture, ...], where: str) -> TextRow:
    """The row with these pictures, whose sizes its messages tell."""
    try:
        messages = place_pictures(row.messages, [picture.size for picture in pictures])
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; one stands for each picture, or none: then they come first.") from error
    return replace(row, messages=messages, pictures=pictures)


def _answer(value: Any) -> str:
    """A text, the last message of a conversation, or anything else as JSON."""
    if isinstance(value, list) and value and isinstance(value[-1], Mapping) and "content" in value[-1]:
        value = value[-1]["content"]
    return value if isinstance(value, str) else json.dumps(value)


def _column(raw: Mapping[str, Any], key: str) -> Any:
    """Value of a column, or of a part of one: a.b is b within a."""
    if key in raw or "." not in key:
        return raw.get(key)
    head, _, rest = key.partition(".")
    inner = raw.get(head)
    return _column(inner, rest) if isinstance(inner, Mapping) else None


def _messages(prompt: Any, cfg: RowSettings, where: str) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        return (Message(role="user", content=cfg.prompt_template.replace("{prompt}", prompt)),)
    try:
        return tuple(Message(role=str(m["role"]), content=_content(m["content"])) for m in prompt)
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"{where}: column '{cfg.prompt_key}' is neither text nor a list of messages with role and content: "
            f"{str(prompt)[:60]!r}."
        ) from error


def _content(content: Any) -> str:
    """A text, or the list of texts and pictures that processors take."""
    if not isinstance(content, list):
        return str(content)
    return "".join(PICTURE if part["type"] == "image" else part["text"] for part in content)


def _lengths(prompts: Sequence[str], tokenizer: Path | None) -> IntArray:
    if tokenizer is None:
        return np.asarray([len(p) for p in prompts])
    from tokenizers import Tokenizer

    file = tokenizer / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{file} is missing, so the rows' prompts cannot be measured. Fix: a language model, for example "
            "model=causal_lm with the folder of one, or data.max_prompt_length=null."
        )
    encoded = Tokenizer.from_file(str(file)).encode_batch(list(prompts))
    return np.asarray([len(e.ids) for e in encoded])
