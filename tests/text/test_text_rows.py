"""Rows of text tasks: sources, templates, splits, filters and errors."""

import datetime
import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from embodyrl import files
from embodyrl.cli.dry_run import describe
from embodyrl.commands.banner import common_banner_lines
from embodyrl.errors import ConfigError
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.text import dataset as text
from embodyrl.text import tasks
from embodyrl.text.conversation import TextRow
from embodyrl.text.dataset import open_rows
from embodyrl.text.images import read_images
from embodyrl.text.messages import Message, join_messages, split_images, split_messages
from embodyrl.text.rewards.functions import countdown
from embodyrl.text.settings import PairSettings, RowSettings

ROWS = [{"question": f"{i}+1?", "answer": f"think\n#### {i + 1}"} for i in range(10)]
CHANGING = "COUNTS = iter(range(8, 99))\ndef rows(): return [dict(prompt=p, answer='x') for p in {expression}]"
KEYS = {"prompt_key": "question", "answer_pattern": "####( .+)?"}


def jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def functions(tmp_path: Path, monkeypatch):
    """Return a function that writes the module own_rows and returns the value of data.path for its function rows."""

    def write(code: str) -> str:
        (tmp_path / "own_rows.py").write_text(code + "\n")
        return "own_rows:rows"

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    sys.modules.pop("own_rows", None)


def test_json_lines_are_read_with_template_and_splits(tmp_path: Path):
    path = jsonl(tmp_path / "sums.jsonl", ROWS)
    rows = open_rows(
        RowSettings(path=path, prompt_template="Q: {prompt}", system_prompt="Be brief.", **KEYS), tokenizer=None
    )
    assert (rows.name, len(rows), rows.held_out) == ("sums", 10, 1)
    assert rows[3].reference == "4"
    assert rows[3].messages == (Message(role="system", content="Be brief."), Message(role="user", content="Q: 3+1?"))
    assert pickle.loads(pickle.dumps(rows))[3] == rows[3]
    both = open_rows(RowSettings(path=path, val_path=jsonl(tmp_path / "val.jsonl", ROWS[:3]), **KEYS), tokenizer=None)
    assert (len(both), both.held_out, both[10].reference) == (13, 3, "1")


def test_json_rows_are_split_only_at_line_feeds(tmp_path: Path):
    """JSON does not escape U+2028 and similar characters, which Python treats as line ends."""
    rows = [{"prompt": f"a{sep}b", "answer": "c"} for sep in ("\u2028", "\u2029", "\x85")]
    path = tmp_path / "odd.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    found = open_rows(RowSettings(path=str(path), val_share=0.0), tokenizer=None)
    assert [found[i].messages[0].content for i in range(len(found))] == [row["prompt"] for row in rows]


def test_empty_lines_and_byte_order_mark_are_skipped(tmp_path: Path):
    path = tmp_path / "edited.jsonl"
    lines = "\r\n\r\n".join(json.dumps({"prompt": word, "answer": "c"}) for word in "abc")
    path.write_text(f"{lines}\n\n", encoding="utf-8-sig", newline="")
    found = open_rows(RowSettings(path=str(path), val_share=0.0), tokenizer=None)
    assert [found[i].messages[0].content for i in range(len(found))] == ["a", "b", "c"]
    path.write_text("\n")
    with pytest.raises(ConfigError, match=r"edited.jsonl contains no rows\. Correct the path"):
        open_rows(RowSettings(path=str(path)), tokenizer=None)


def test_parquet_folders_and_chat_messages_are_read(tmp_path: Path):
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "2+2"},
    ]
    pq.write_table(pa.Table.from_pylist([{"prompt": talk, "answer": 4}] * 4), tmp_path / "part-0.parquet")
    pq.write_table(pa.Table.from_pylist([{"prompt": talk, "answer": 5}] * 4), tmp_path / "part-1.parquet")
    rows = open_rows(RowSettings(path=str(tmp_path)), tokenizer=None)
    assert [rows[i].reference for i in (0, 4)] == ["4", "5"]
    assert split_messages(join_messages(rows[0].messages)) == tuple(Message(**m) for m in talk)
    assert split_messages("pick up the cup") == (Message(role="user", content="pick up the cup"),)


def test_dry_run_shows_a_prompt_and_counts_unknown_tokens(tmp_path: Path):
    """Of `1 + 1 = N?` and the answer 2, only N is unknown; the preset adds its instruction to each question."""
    path = jsonl(tmp_path / "rows.jsonl", [{"question": "1 + 1 = N?", "answer": "#### 2"}] * 2)
    model, data = "model=causal_lm_tiny", ["data.prompt_key=question", f"data.path={path}", "data.val_share=0.5"]
    plain = describe(load_config("sft", [model, *data, "data.answer_pattern='#### (.+)'"]))
    assert '  prompt       "1 + 1 = N?" (11 tokens, 1 of them unknown)\n' in f"{plain}\n"
    assert "does not contain 8% of the tokens in prompts and answers, such as N, and" in plain
    preset = describe(load_config("train", ["env=text/gsm8k", model, *data]))
    assert "  prompt       \"1 + 1 = N?\\nLet's think step by step and output the final answer" in preset
    assert "with the text of data.prompt_template (conf/env/text/gsm8k.yaml)" in preset
    assert "does not contain" not in describe(load_config("train", ["env=text/arithmetic", model]))


def test_held_out_rows_repeated_in_training_are_counted(tmp_path: Path):
    asked = ["a", "b", "c", "d", "a", "e", "b", "b"]
    path = jsonl(tmp_path / "again.jsonl", [{"prompt": word, "answer": str(i)} for i, word in enumerate(asked)])
    assert open_rows(RowSettings(path=path, val_share=0.5), tokenizer=None).repeated == 3
    assert open_rows(RowSettings(path=path, val_path=path), tokenizer=None).repeated == 8
    assert open_rows(RowSettings(path=path, val_share=0.0), tokenizer=None).repeated == 0
    colors = RowSettings(path="embodyrl.text.tasks:colour", kwargs={"rows": 40}, val_share=0.5)
    assert open_rows(colors, tokenizer=None).repeated == 0, "one question, but other images"
    words = ["env=text/math", "model=causal_lm_tiny", f"data.path={path}", "data.prompt_key=prompt"]
    cfg = load_config("train", [*words, "data.answer_key=answer", "data.val_share=0.5"])
    told = dict(common_banner_lines(build_run_plan(cfg, training=True)))
    assert told["warning"].startswith("3 of the 4 held-out rows have the prompt of a training row; the tokenizer")


@pytest.mark.parametrize(
    ("name", "kwargs", "rows"),
    [
        ("length", {}, 5),
        ("copy", {}, 27),
        ("arithmetic", {}, 300),
        ("reverse", {"rows": 500}, 500),
        ("countdown", {"rows": 900, "count": 2, "largest": 9}, None),
    ],
)
def test_generated_rows_have_unique_prompts(name: str, kwargs: dict, rows: int | None):
    cfg = RowSettings(path=f"embodyrl.text.tasks:{name}", kwargs=kwargs, val_share=0.4)
    found = open_rows(cfg, tokenizer=None)
    assert found.held_out
    assert found.repeated == 0
    asked = [found[i].messages for i in range(len(found))]
    assert len({*asked}) == len(asked) == (rows or len(asked)) <= kwargs.get("rows", tasks.ROWS)
    assert [row.messages for row in getattr(tasks, name)(**kwargs)] == asked, "the same in another process"
    assert [row.messages for row in getattr(tasks, name)(**kwargs, seed=1)] != asked


def test_overlong_prompts_are_skipped(tmp_path: Path):
    rows = [{"prompt": "x" * n, "answer": str(n)} for n in (3, 9, 4, 5, 12)]
    found = open_rows(
        RowSettings(path=jsonl(tmp_path / "a.jsonl", rows), max_prompt_length=5, val_share=0.0), tokenizer=None
    )
    assert [found[i].reference for i in range(len(found))] == ["3", "4", "5"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": "no mark"}, "row 4: column 'answer' does not match data.answer_pattern"),
        ({"answer": "####"}, "row 4: column 'answer' does not match data.answer_pattern"),
        ({"answer": None}, "row 4: column 'answer' is empty"),
        ({"question": 5}, "row 4, column 'question': '5' is neither text nor a list"),
    ],
)
def test_invalid_row_error_names_the_row(tmp_path: Path, change: dict, message: str):
    rows = [*ROWS[:3], ROWS[3] | change, *ROWS[4:]]
    with pytest.raises(ConfigError, match=message):
        open_rows(RowSettings(path=jsonl(tmp_path / "a.jsonl", rows), **KEYS), tokenizer=None)


def test_escaped_surrogate_pairs_are_characters(tmp_path: Path):
    (tmp_path / "pair.jsonl").write_text('{"prompt": "\\uD83D\\uDE00", "answer": "b"}\n')
    rows = open_rows(RowSettings(path=str(tmp_path / "pair.jsonl"), val_share=0.0), tokenizer=None)
    assert rows.row(0).messages[-1].content == "\N{GRINNING FACE}"


def test_unreadable_data_sources_are_errors(tmp_path: Path):
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt"\n')
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "\xff", "answer": "b"}\n')
    (tmp_path / "half.jsonl").write_text('{"prompt": "\\uD83D", "answer": "b"}\n')
    (tmp_path / "nested.jsonl").write_text("[" * 100_000)
    (tmp_path / "sparse.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    os.truncate(tmp_path / "sparse.jsonl", 40 << 30)
    for path, message in (
        ("broken.jsonl", "line 2 is not JSON"),
        ("bytes.jsonl", "line 1 is not JSON"),
        ("half.jsonl", "line 1 is not JSON .*surrogates not allowed"),
        ("nested.jsonl", "line 1 is not JSON"),
        ("sparse.jsonl", "line 2 is longer than 16 MiB"),
        ("missing.jsonl", "does not exist, or contains no"),
        ("notes.txt", r"Use a \.jsonl or \.parquet file"),
    ):
        (tmp_path / "notes.txt").touch()
        with pytest.raises(ConfigError, match=message):
            open_rows(RowSettings(path=str(tmp_path / path)), tokenizer=None)
    for kwargs in ({"sise": 3}, {"size": "x"}, {"rows": "x"}, {"letters": ""}):
        with pytest.raises(ConfigError, match=r"tasks:copy fails with data\.kwargs=.*Error: .*Correct the function"):
            open_rows(RowSettings(path="embodyrl.text.tasks:copy", kwargs=kwargs), tokenizer=None)


def test_rows_of_a_generator_are_read(functions):
    rows = functions("def rows():\n    yield from ({'prompt': str(n), 'answer': n} for n in range(4))")
    assert [row.reference for row in open_rows(RowSettings(path=rows, val_share=0.0), tokenizer=None)] == [*"0123"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return {'prompt': ['a'], 'answer': ['b']}", "fails: TypeError: .*returns a dictionary"),
        ("return 1 + 'a'", r"fails: TypeError: unsupported operand .*\(own_rows.py:2\). Correct the function"),
        ("yield {}['a']", r"fails: KeyError: 'a' \(own_rows.py:2\)"),
        ("return None", "fails: TypeError: .*not iterable"),
        ("return []", "contains no rows"),
        ("return ['text']", "row 1: a row must be an object with columns, but is 'text'"),
    ],
)
def test_error_of_a_row_function_names_its_line(functions, body: str, message: str):
    with pytest.raises(ConfigError, match=message):
        open_rows(RowSettings(path=functions(f"def rows():\n    {body}"), val_share=0.0), tokenizer=None)


@pytest.mark.parametrize(
    ("value", "wanted"), [("Decimal('1.5')", "1.5"), ("np.int64(7)", "7"), ("np.float32(0.5)", "0.5"), ("True", "true")]
)
def test_number_of_any_type_is_an_answer(functions, value: str, wanted: str):
    code = f"import numpy as np\nfrom decimal import Decimal\ndef rows(): return [dict(prompt='a', answer={value})]"
    assert open_rows(RowSettings(path=functions(code), val_share=0.0), tokenizer=None)[0].reference == wanted


@pytest.mark.parametrize("answer", [b"bytes", datetime.date(2026, 1, 2)])
def test_answer_without_a_json_form_names_its_row_and_column(tmp_path: Path, answer: object):
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "answer": answer}]), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="row 1, column 'answer': a value is neither text nor JSON"):
        open_rows(RowSettings(path=str(tmp_path), val_share=0.0), tokenizer=None)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("('abcd', 'dabc')[next(COUNTS) % 2]", "row 1 has changed since the start of the run"),
        ("['a'] * next(COUNTS)", "the number of rows has changed"),
    ],
)
def test_rows_that_change_during_a_run_are_an_error(functions, expression: str, message: str):
    cfg = RowSettings(path=functions(CHANGING.format(expression=expression)))
    with pytest.raises(ConfigError, match=message):
        pickle.loads(pickle.dumps(open_rows(cfg, tokenizer=None)))[0]


def test_generated_rows_have_correct_answers():
    asked, rows = {"rows": 200}, {}
    for task in (tasks.reverse, tasks.length, tasks.copy, tasks.countdown):
        rows[task] = [(row.messages[0].content.removesuffix("="), row.reference) for row in task(**asked)]
    rows[tasks.arithmetic] = [(r.messages[0].content[:-1], r.reference) for r in tasks.arithmetic(digits=2, **asked)]
    assert all(str(eval(prompt)) == answer for prompt, answer in rows[tasks.arithmetic])
    assert all(prompt == answer[::-1] for prompt, answer in rows[tasks.reverse])
    assert all(answer == "x" * int(prompt) for prompt, answer in rows[tasks.length])
    assert all(prompt == answer for prompt, answer in (*rows[tasks.copy], *rows[tasks.countdown]))
    assert {countdown("", "1", answer) for _, answer in rows[tasks.countdown]} == {0.0}


def test_images_are_read_from_files_bytes_and_arrays(tmp_path: Path):
    """The images have different sizes, and all fit the size declared by the run."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    (tmp_path / "seen").mkdir()
    Image.fromarray(pixels).save(tmp_path / "seen" / "a.png")
    tall = Image.fromarray(pixels.transpose(1, 0, 2))
    tall.save(tmp_path / "seen" / "b.png")
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and "}, {"type": "image"}]}]
    rows = [{"prompt": "what?", "answer": "x", "shown": "seen/a.png"}]
    rows += [{"prompt": prompt, "answer": "y", "shown": ["seen/a.png", {"path": str(tmp_path / "seen" / "b.png")}]}]
    rows += [{"prompt": "2+2", "answer": "4", "shown": []}]
    found = open_rows(RowSettings(path=jsonl(tmp_path / "r.jsonl", rows), image_key="shown"), tokenizer=None)
    assert (found.pictures, found.image_size) == (2, (9, 9))
    assert split_images(found[0].messages[0].content) == ["", (6, 9), "what?"]
    assert split_images(found[1].messages[0].content) == ["", (6, 9), "and ", (9, 6), ""]
    np.testing.assert_array_equal(found[1].pictures[1].pixels(), pixels.transpose(1, 0, 2))
    assert pickle.loads(pickle.dumps(found))[2].pictures == ()
    smaller = open_rows(found.cfg.updated({"max_image_edge": 3}), tokenizer=None)
    flat = open_rows(RowSettings(path=jsonl(tmp_path / "f.jsonl", rows[:1]), image_key="shown"), tokenizer=None)
    assert flat.image_size == (6, 9), "height and width"
    assert (smaller.image_size, smaller[0].pictures[0].pixels().shape) == ((3, 3), (2, 3, 3))
    packed = {"prompt": "<image>?", "answer": "x", "shown": {"bytes": (tmp_path / "seen" / "a.png").read_bytes()}}
    pq.write_table(pa.Table.from_pylist([packed]), tmp_path / "p.parquet")
    (row,) = open_rows(RowSettings(path=str(tmp_path / "p.parquet"), image_key="shown", val_share=0.0), tokenizer=None)
    np.testing.assert_array_equal(row.pictures[0].pixels(), pixels)


@pytest.mark.parametrize("turned", range(1, 9))
def test_exif_orientation_is_applied_to_images(tmp_path: Path, turned: int):
    image = Image.new("RGB", (9, 6))
    image.getexif()[0x0112] = turned
    image.save(tmp_path / "a.jpg", exif=image.getexif())
    (picture,) = read_images("a.jpg", tmp_path, "row 1", None)
    assert picture.size == picture.pixels().shape[:2] == ((6, 9) if turned < 5 else (9, 6))


@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0, 3), (4, 4, 1)])
def test_image_array_without_pixels_is_rejected(shape: tuple[int, ...]):
    with pytest.raises(ConfigError, match=r"row 1: an image must be .* a uint8 array \[H, W, 3\]"):
        read_images(np.zeros(shape, np.uint8), None, "row 1", None)


@pytest.mark.parametrize("form", ["absolute", "parent", "within", "link", "mapping"])
def test_images_outside_the_data_folder_are_rejected(tmp_path: Path, form: str):
    outside, rows = tmp_path / "outside", tmp_path / "rows"
    for folder in (outside, rows):
        (folder / "images").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(folder / "a.png")
    (rows / "link.png").symlink_to(outside / "a.png")
    named = {"absolute": str(outside / "a.png"), "parent": "../outside/a.png", "within": "images/../../outside/a.png"}
    shown = named.get(form, "link.png") if form != "mapping" else {"path": str(outside / "a.png"), "bytes": None}
    path = jsonl(rows / "r.jsonl", [{"prompt": "?", "answer": "x", "shown": shown}])
    with pytest.raises(ConfigError, match=r"row 1: the image .* is outside the folder"):
        open_rows(RowSettings(path=path, image_key="shown", val_share=0.0), tokenizer=None)
    path = jsonl(rows / "r.jsonl", [{"prompt": "?", "answer": "x", "shown": "images/../a.png"}])
    assert len(open_rows(RowSettings(path=path, image_key="shown", val_share=0.0), tokenizer=None)) == 1


def test_rows_outside_the_data_folder_are_rejected(tmp_path: Path):
    private = jsonl(tmp_path / "private.jsonl", [{"prompt": "?", "answer": "x"}])
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").symlink_to(private)
    with pytest.raises(ConfigError, match=r"train.jsonl' is outside the folder"):
        open_rows(RowSettings(path=str(tmp_path / "rows"), val_share=0.0), tokenizer=None)


def test_hub_image_can_be_a_symlink_into_its_cache(tmp_path: Path):
    snapshot, blobs = (
        tmp_path / "datasets--me--set" / "snapshots" / ("a" * 40),
        tmp_path / "datasets--me--set" / "blobs",
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    Image.new("RGB", (4, 4)).save(blobs / "0123", format="png")
    (snapshot / "a.png").symlink_to("../../blobs/0123")
    path = jsonl(snapshot / "r.jsonl", [{"prompt": "?", "answer": "x", "shown": "a.png"}])
    assert open_rows(RowSettings(path=path, image_key="shown", val_share=0.0), tokenizer=None).image_size == (4, 4)


@pytest.mark.parametrize("suffix", ["eps", "png"])
def test_images_are_opened_without_other_programs(tmp_path: Path, monkeypatch, suffix: str):
    (tmp_path / "gs").write_text(f"#!/bin/sh\n> {tmp_path}/called\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    Image.new("RGB", (4, 4)).save(tmp_path / f"a.{suffix}", format="EPS")
    (picture,) = read_images(f"a.{suffix}", tmp_path, "row 1", None)
    with pytest.raises(ConfigError, match="row 1: the image cannot be read"):
        picture.pixels()
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    ("prompt", "shown", "says"),
    [
        ("<image> <image>", "a.png", "1 images, but the messages contain <image> 2 times"),
        ("what?", "none.png", "cannot be read"),
        ("what?", "https://host/a.png", "a local file"),
        ("what?", 7, "a local file"),
    ],
)
def test_invalid_image_error_names_the_row(tmp_path: Path, prompt: str, shown: object, says: str):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    path = jsonl(tmp_path / "r.jsonl", [{"prompt": prompt, "answer": "x", "shown": shown}])
    with pytest.raises(ConfigError, match=f"row 1: .*{says}"):
        open_rows(RowSettings(path=path, image_key="shown", val_share=0.0), tokenizer=None)


def test_most_shuffled_color_labels_do_not_match_their_image():
    def named(row: TextRow) -> bool:
        return bool((np.abs(row.pictures[0].astype(int) - tasks.COLORS[row.reference]).max(-1) <= 40).sum() >= 30)

    plain, shuffled = tasks.colour(rows=40), tasks.colour(rows=80, shuffled=True)
    assert all(named(plain[i]) for i in range(40))
    assert sum(named(shuffled[i]) for i in range(80)) < 30


def test_hub_dataset_splits_are_found_by_file_name(tmp_path: Path):
    for file, answers in (("train-00000-of-00002", "ab"), ("train-00001-of-00002", "c"), ("test-00000-of-00001", "d")):
        (tmp_path / "main").mkdir(exist_ok=True)
        rows = pa.Table.from_pylist([{"prompt": "?", "answer": answer} for answer in answers])
        pq.write_table(rows, tmp_path / "main" / f"{file}.parquet")
    jsonl(tmp_path / "main" / "training.jsonl", [{"prompt": "?", "answer": "of no split"}])
    (tmp_path / "other").mkdir()
    jsonl(tmp_path / "other" / "train.jsonl", [{"prompt": "?", "answer": "x"}])
    cfg = RowSettings(path=str(tmp_path), subset="main", split="train", val_split="test")
    rows = open_rows(cfg, tokenizer=None)
    assert ([rows[i].reference for i in range(len(rows))], rows.held_out) == (["a", "b", "c", "d"], 1)
    assert len(open_rows(RowSettings(path=str(tmp_path), split="train", val_share=0.0), tokenizer=None)) == 4
    with pytest.raises(ConfigError, match=r"no split 'dev'\. Set one of test, train, training"):
        open_rows(cfg.updated({"split": "dev"}), tokenizer=None)


@pytest.mark.parametrize(
    ("split", "found"),
    [
        ("train_prefs", ["train_prefs-00000-of-00001", "train_prefs-00001-of-00001-5c6e"]),
        ("dev", ["dev_2", "dev_3"]),
        ("dev_2", ["dev_2"]),
        ("val.a", ["val.a"]),
        ("extra-set", ["extra-set/rows"]),
        ("extra", ["extra-set/rows"]),
        ("half", ["half_a-1", "half_a"]),
    ],
)
def test_split_is_selected_by_its_full_name(tmp_path: Path, split: str, found: list[str]):
    (tmp_path / "extra-set").mkdir()
    names = ("train_prefs-00000-of-00001", "train_prefs-00001-of-00001-5c6e", "train_sft-00000-of-00001")
    for name in (*names, "dev_2", "dev_3", "val.a", "val.b", "extra-set/rows", "half_a", "half_a-1"):
        jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name, "answer": name}])
    cfg = RowSettings(path=str(tmp_path), split=split, val_share=0.0)
    assert [row.reference for row in open_rows(cfg, tokenizer=None)] == found
    with pytest.raises(ConfigError, match=r"has no split 'train'\. Set one of train_prefs, train_sft"):
        open_rows(cfg.updated({"split": "train"}), tokenizer=None)


def test_configured_columns_override_default_names(tmp_path: Path):
    """The rows also contain columns with the default names."""
    row = {"q": "1+1", "good": "2", "bad": "3"} | dict.fromkeys(("prompt", "chosen", "rejected", "answer"), "other")
    keys = {"path": jsonl(tmp_path / "a.jsonl", [row]), "prompt_key": "q", "answer_key": "good", "val_share": 0.0}
    found = open_rows(PairSettings(**keys, rejected_key="bad"), tokenizer=None)[0]
    assert (found.messages[0].content, found.reference, found.rejected) == ("1+1", "2", "3")
    assert open_rows(RowSettings(**keys), tokenizer=None)[0].reference == "2"


def test_held_out_row_count_excludes_skipped_rows(tmp_path: Path):
    own, val = (
        jsonl(tmp_path / f"{name}.jsonl", [{"prompt": "x" * n, "answer": str(n)} for n in lengths])
        for name, lengths in (("own", (3, 9, 4)), ("val", (12, 2, 11, 1)))
    )
    found = open_rows(RowSettings(path=own, val_path=val, max_prompt_length=5), tokenizer=None)
    assert ([row.reference for row in found], found.held_out) == (["3", "4", "2", "1"], 2)


@pytest.mark.parametrize("kind", ["a list of nulls", "rows of nulls", "a dictionary of one long text"])
def test_parquet_file_that_exceeds_memory_is_rejected(tmp_path: Path, monkeypatch, kind: str):
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    count = 2_000_000
    column = {
        "a list of nulls": lambda: pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.nulls(count)),
        "rows of nulls": lambda: pa.nulls(count),
        "a dictionary of one long text": lambda: pa.DictionaryArray.from_arrays(
            pa.array(np.zeros(400, np.int32)), pa.array(["x" * 100_000])
        ),
    }[kind]()
    file = tmp_path / "bomb.parquet"
    parquet.write_table(pa.table({"prompt": column, "answer": column}), file)
    assert file.stat().st_size < 120_000
    monkeypatch.setattr(files, "available_bytes", lambda: 100 << 20)
    with pytest.raises(ConfigError, match="unpacks to more than 25 MiB"):
        open_rows(RowSettings(path=str(file)), tokenizer=None)


def test_wrong_sizes_in_a_parquet_file_do_not_exceed_memory(tmp_path: Path, monkeypatch):
    """The declared size of the row group is replaced by a small number; the declared sizes of columns are correct."""
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    file, text_column = tmp_path / "bomb.parquet", pa.array(["x" * (5 << 20)])
    names = ("prompt", "answer", *(f"c{k}" for k in range(8)))
    options = {"use_dictionary": False, "write_statistics": False, "store_schema": False}
    parquet.write_table(pa.table(dict.fromkeys(names, text_column)), file, compression="zstd", **options)

    def varint(number: int, length: int = 0) -> bytes:
        parts = [2 * number >> shift & 127 for shift in range(0, max(7 * length, (2 * number).bit_length()), 7)]
        return bytes([*(part | 128 for part in parts[:-1]), parts[-1]])

    size = varint(parquet.ParquetFile(file).metadata.row_group(0).total_byte_size)
    head, _, tail = file.read_bytes().rpartition(size)
    file.write_bytes(head + varint(1, len(size)) + tail)
    assert parquet.ParquetFile(file).metadata.row_group(0).total_byte_size == 1
    monkeypatch.setattr(files, "available_bytes", lambda: 100 << 20)
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(ConfigError, match="unpacks to more than 25 MiB"):
        open_rows(RowSettings(path=str(file)), tokenizer=None)
    assert pa.default_memory_pool().max_memory() <= max(before, 25 << 20)


@pytest.mark.parametrize("kind", ["rows", "list", "nested", "map", "fixed", "prefixes", "prefixes in a list"])
def test_repeated_texts_in_a_parquet_file_do_not_exceed_memory(tmp_path: Path, monkeypatch, kind: str):
    """A text of 2 MiB is stored once, and occurs in 60 rows or 60 times in one row."""
    file, count = tmp_path / "bomb.parquet", 60
    encoded = {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"} if "prefixes" in kind else {}

    def write(texts: list[str]) -> None:
        column, ends = pa.array(texts).dictionary_encode(), pa.array([0, len(texts)], pa.int32())
        column = column.cast(pa.string()) if encoded else column
        column = {
            "list": lambda: pa.ListArray.from_arrays(ends, column),
            "nested": lambda: pa.ListArray.from_arrays(ends, pa.StructArray.from_arrays([column], ["text"])),
            "map": lambda: pa.MapArray.from_arrays(ends, pa.array(range(len(texts))).cast(pa.string()), column),
            "fixed": lambda: pa.array(["x" * len(texts[-1])] * count).cast(pa.binary()).cast(pa.binary(len(texts[-1]))),
            "prefixes in a list": lambda: pa.ListArray.from_arrays(ends, column),
        }.get(kind, lambda: column)()
        options = {"store_schema": False, "write_statistics": False, "dictionary_pagesize_limit": 64 << 20, **encoded}
        pq.write_table(pa.table({"text": column}), file, compression="zstd", **options)

    monkeypatch.setattr(files, "available_bytes", lambda: 100 << 20)
    write([f"text {number}" for number in range(count)])
    assert files.read_parquet(file).equals(pq.read_table(file))
    write(["x" * (2 << 20)] * count)
    assert file.stat().st_size < 10_000
    previous = pa.default_memory_pool()
    pa.set_memory_pool(pool := pa.proxy_memory_pool(previous))
    try:
        with pytest.raises((pa.ArrowException, OSError), match=r"unpacks to more than 25 MiB|Not yet implemented"):
            files.read_parquet(file)
    finally:
        pa.set_memory_pool(previous)
    assert pool.max_memory() < 75 << 20


def test_images_in_several_row_groups_are_read_with_little_memory(tmp_path: Path, monkeypatch):
    """A data set of images: one row group per episode, and a quarter of the free memory is larger than the images."""
    parquet, pa, rng = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow"), np.random.default_rng(0)
    images = [{"bytes": rng.bytes(4000), "path": f"frame_{k}.png"} for k in range(120)]
    table = pa.table({"image": images, "views": [[image] * 2 for image in images]})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=40)
    monkeypatch.setattr(files, "available_bytes", lambda: 6 << 20)
    assert files.read_parquet(tmp_path / "rows.parquet", ["image"]).equals(table.select(["image"]))
    assert files.read_parquet(tmp_path / "rows.parquet", ["views"]).equals(table.select(["views"]))


def test_nested_parquet_columns_are_read(tmp_path: Path):
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    words = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, None] * 50), pa.array(["a", "b"]))
    numbers = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, 1] * 50), pa.array([5, 6]))
    table = pa.table({"prompt": pa.array(["q"] * 200), "answer": numbers, "word": words, "more": [[1, 2]] * 200})
    parquet.write_table(table, tmp_path / "rows.parquet")
    rows = open_rows(RowSettings(path=str(tmp_path / "rows.parquet"), val_share=0.0), tokenizer=None)
    assert [rows[k].reference for k in range(4)] == ["5", "6", "5", "6"]
    assert len(rows) == 200


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("val_share", [0.1, 0.3])
def test_held_out_sums_share_no_pair_with_training(seed: int, val_share: float):
    cfg = RowSettings(path="embodyrl.text.tasks:sums", kwargs={"seed": seed}, val_share=val_share)
    rows = open_rows(cfg, tokenizer=None)
    pairs = [frozenset(rows[i].messages[0].content.strip("What is?").split(" + ")) for i in range(len(rows))]
    border = len(rows) - rows.held_out
    assert not set(pairs[:border]) & set(pairs[border:])
    assert round(val_share * len(rows)) - 1 <= rows.held_out <= round(val_share * len(rows))


def test_slow_answer_pattern_is_an_error(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(text, "_PATTERN_S", 0.05)
    path = jsonl(tmp_path / "r.jsonl", [{"prompt": "?", "answer": "a" * 40 + "b"}])
    with pytest.raises(ConfigError, match=r"row 1: data.answer_pattern=.* takes too long"):
        open_rows(RowSettings(path=path, answer_pattern="(a+)+$", val_share=0.0), tokenizer=None)
    rows = open_rows(RowSettings(path=path, answer_pattern="(a+)b$", val_share=0.0), tokenizer=None)
    assert rows[0].reference == "a" * 40


def test_prompt_tokens_is_the_length_of_the_longest_prompt_within_the_limit(tmp_path: Path):
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "x" * n, "answer": "y"} for n in (3, 7, 9)])
    kept = RowSettings(path=path, val_share=0.0)
    assert open_rows(kept, tokenizer=None).prompt_tokens == 9
    assert open_rows(kept.updated({"max_prompt_length": 7}), tokenizer=None).prompt_tokens == 7
    assert open_rows(kept.updated({"max_prompt_length": None}), tokenizer=None).prompt_tokens == 0
