"""Config keys of the section `data`, for demonstrations, text rows and preference pairs."""

import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from embodyrl.config.settings import ChangesStateIds, Constraint, Count, Path, Settings, valid_if


def is_function(path: str) -> bool:
    """Return True if a path has the form package.module:function."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", path) is not None


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


class DataSettings(Settings):
    """Common config keys of all data sources."""

    keys_by_condition = {"val_path=null": "val_share"}

    path: Annotated[Path | None, ChangesStateIds] = None
    """Folder of demonstrations in the format of `embodyrl collect`.
    For text: a .jsonl or .parquet file, a folder of such files, or package.module:function."""
    val_path: Annotated[Path | None, ChangesStateIds] = None
    """Validation data; default: a fraction of data.path."""
    val_share: Annotated[float, Field(ge=0, lt=1), ChangesStateIds] = 0.1
    """Fraction of the episodes in data.path that is held out for validation; 0: no validation."""
    shuffle: bool = True
    """If true, rows are sampled in random order."""


class RowSettings(DataSettings):
    """Config keys for text rows."""

    kwargs: Annotated[dict[str, Any], ChangesStateIds] = {}
    """Keyword arguments for the function in data.path=package.module:function."""
    subset: Annotated[str | None, ChangesStateIds] = None
    """Subset of a Hugging Face data set: the subfolder that contains the rows."""
    split: Annotated[str | None, ChangesStateIds] = None
    """Training split of a folder or repository: name of files (train-00000-of-00002.parquet) or subfolder; default:
    all files."""
    val_split: Annotated[str | None, ChangesStateIds] = None
    """Validation split; default: the last rows of the data (fraction data.val_share)."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or a list of messages with role and content."""
    answer_key: str = "answer"
    """Column of the reference answer, also the target of `embodyrl sft`; a.b is field b of column a."""
    answer_pattern: Annotated[str, valid_if(_is_pattern), Constraint("a regular expression")] | None = None
    """Regular expression whose first group matches the reference in the answer column, for example '#### (.+)'."""
    prompt_template: Annotated[str, Field(pattern=r"\{prompt\}"), Constraint("text that contains {prompt}")] = (
        "{prompt}"
    )
    """Template of each prompt; {prompt} is replaced by the text of the prompt column, or of the last user message."""
    system_prompt: str | None = None
    """System message that precedes each prompt; rows that contain a system message are rejected."""
    image_key: str | None = None
    """Column of images for model=vision_lm: one image or a list, as files in the data folder or as bytes.
    `<image>` marks the position of an image in the prompt; without <image>, the images come first."""
    max_image_edge: Count | None = None
    """Maximum length of the longer image edge in pixels; larger images are scaled down. Memory for the largest image is
    reserved in each sample."""
    max_prompt_length: Annotated[Count | None, ChangesStateIds] = 512
    """Maximum prompt length in tokens, with the chat template and without images; longer prompts are dropped; null: no
    limit."""

    @property
    def sources(self) -> list[tuple[str, str | None]]:
        """Path and split of the training rows and, if separate, of the validation rows."""
        val = self.val_path or (self.path if self.val_split else None)
        return [(path, split) for path, split in ((self.path, self.split), (val, self.val_split)) if path is not None]

    def problems(self) -> Iterator[str]:
        """Yield an error for each invalid key, such as `val_split` with rows from a function."""
        yield from super().problems()
        if self.val_split is not None and is_function(self.val_path or self.path or ""):
            yield f"data.val_split={self.val_split}: only files have splits; use data.val_path or data.val_share."


class PairSettings(RowSettings):
    """Config keys for text rows with a chosen and a rejected answer."""

    answer_key: str = "chosen"
    """Column of the chosen answer: text, or a conversation that ends with the answer; a.b is field b of column a."""
    rejected_key: str = "rejected"
    """Column of the rejected answer, in the same format as the chosen answer (`answer_key`)."""
