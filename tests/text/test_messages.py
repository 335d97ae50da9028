"""Messages and answers of rows: what is read, and what is rejected because it would be lost."""

import json
import re
from pathlib import Path

import pytest

from embodyrl.errors import ConfigError
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.text.dataset import open_rows
from embodyrl.text.settings import PairSettings, RowSettings


def jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_answer_can_be_the_last_chat_message(tmp_path: Path):
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    for answer, reference in ((talk, "2"), (talk[1:], "2"), ([1, 2], "[1, 2]"), ({"a": 1}, '{"a": 1}'), (2.5, "2.5")):
        cfg = RowSettings(path=jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1", "answer": answer}]), val_share=0.0)
        assert open_rows(cfg, tokenizer=None, json_answers=True)[0].reference == reference
        if isinstance(answer, dict) or answer == [1, 2]:
            with pytest.raises(ConfigError, match="row 1: column 'answer' is a list or an object"):
                open_rows(cfg, tokenizer=None)


def test_list_of_answers_requires_a_reward_that_reads_json(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1", "answer": ["2", "two"]}] * 4)
    words = ["env=text/copy", "model=causal_lm_tiny", f"data.path={path}", "data.val_share=0.5", "reward.weights={}"]
    with pytest.raises(ConfigError, match="row 1: column 'answer' is a list"):
        build_run_plan(load_config("train", [*words, "reward.name=math"]), training=True)
    build_run_plan(load_config("train", [*words, "reward.name=code"]), training=True)


USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
CALL = [{"function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (
            [USER, {"role": "assistant", "content": None, "tool_calls": CALL}, {"role": "tool", "content": "2"}],
            "tool_calls",
        ),
        ([USER, REPLY | {"tool_calls": CALL}, USER], "message 2 has the unsupported fields tool_calls"),
        ([USER, {"role": "tool", "name": "f", "tool_call_id": "x", "content": "2"}], "fields name, tool_call_id"),
        ([USER, REPLY | {"reasoning_content": "2+2"}, USER], "reasoning_content"),
        ([USER | {"name": "Ann"}], "name"),
        ([USER | {"weight": 1}], "weight"),
        ([USER, {"role": "assistant", "content": None}, USER], r"the content of message 2 is empty \(null\)"),
        ([{"role": "user"}], r"the content of message 1 is empty \(null\)"),
        ([USER | {"content": True}], "neither text nor a list of texts"),
        ([USER | {"content": {"text": "a"}}], "neither text nor a list of texts"),
        ([USER, REPLY], "the last message is an assistant message"),
        ([REPLY], "the last message is an assistant message"),
        ([], "there are no messages"),
        ([{"role": "system", "content": "own"}], "there is only a system message"),
        ([{"role": None, "content": "a"}], "neither text nor a list of messages"),
        ([{"role": "us\x1fer", "content": "a"}], "neither text nor a list of messages"),
        ([{"from": "human", "value": "hi"}], "neither text nor a list of messages"),
        ([USER, "hi"], "neither text nor a list of messages"),
        (USER, "neither text nor a list of messages"),
        ('[{"role": "user", "content": "hi"}]', "the messages are written as text"),
        ([USER | {"content": [{"type": "text", "text": None}]}], "message 1 contains the unsupported part"),
        ([USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
        ([USER | {"content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}], "cache_control"),
        ([USER | {"content": [{"type": "image"}, {"type": "text", "text": "a"}]}], "data.image_key names the column"),
        ([USER | {"content": ["a"]}], "unsupported part"),
    ],
)
def test_message_field_that_would_be_lost_is_an_error(tmp_path: Path, prompt: object, says: str):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "answer": "1"}])
    with pytest.raises(ConfigError, match=f"row 1.*{says}"):
        open_rows(RowSettings(path=path, val_share=0.0), tokenizer=None)


def test_prompt_template_and_system_prompt_apply_to_messages(tmp_path: Path):
    path = jsonl(
        tmp_path / "a.jsonl", [{"prompt": [USER, REPLY | {"tool_calls": None, "name": None}, USER], "answer": "1"}]
    )
    keys = {"path": path, "val_share": 0.0, "prompt_template": "Q: {prompt} {x}"}
    (row,) = open_rows(RowSettings(**keys, system_prompt="Be brief."), tokenizer=None)
    assert [(m.role, m.content) for m in row.messages] == [
        *[("system", "Be brief."), ("user", "hi"), ("assistant", "yes"), ("user", "Q: hi {x}")]
    ]
    sums = RowSettings(path="embodyrl.text.tasks:sums", system_prompt="Add.", prompt_template="{prompt}!")
    assert [m.content.rstrip("0123456789 +!?") for m in open_rows(sums, tokenizer=None)[0].messages] == [
        "Add.",
        "What is",
    ]
    for role in ("system", "developer"):
        path = jsonl(tmp_path / "b.jsonl", [{"prompt": [{"role": role, "content": "own"}, USER], "answer": "1"}])
        with pytest.raises(ConfigError, match=r"row 1.*in addition to data\.system_prompt"):
            open_rows(RowSettings(path=path, val_share=0.0, system_prompt="run"), tokenizer=None)
        (row,) = open_rows(RowSettings(path=path, val_share=0.0), tokenizer=None)
        assert [m.content for m in row.messages] == ["own", "hi"]
    path = jsonl(tmp_path / "c.jsonl", [{"prompt": [{"role": "tool", "content": "2"}], "answer": "1"}])
    with pytest.raises(ConfigError, match=r"data\.prompt_template needs a user message") as raised:
        open_rows(RowSettings(**keys | {"path": path}), tokenizer=None)
    override = re.search(r"'(data\.prompt_template=.*?)'", str(raised.value))
    assert override is not None
    assert load_config("train", ["env=text/gsm8k", override[1]]).data.prompt_template == "{prompt}"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ([USER, {"role": "assistant", "content": None, "tool_calls": CALL}], "message 2 has the unsupported fields"),
        ([USER, {"role": "assistant", "content": None}], "the content of message 2 is empty"),
        ([USER], "the conversation must be the messages of the prompt, followed by"),
        ([USER, REPLY, USER, REPLY], "the conversation must be the messages of the prompt, followed by"),
        ([USER | {"content": "other"}, REPLY], "the conversation must be the messages of the prompt, followed by"),
        ([{"content": "yes"}], "neither text nor a list of messages"),
    ],
)
def test_answer_conversation_that_differs_from_the_prompt_is_an_error(tmp_path: Path, answer: list, says: str):
    path = jsonl(
        tmp_path / "a.jsonl", [{"prompt": "hi", "answer": answer, "chosen": [USER, REPLY], "rejected": answer}]
    )
    for kind, key in ((RowSettings, "answer"), (PairSettings, "rejected")):
        with pytest.raises(ConfigError, match=f"row 1, column '{key}': .*{says}"):
            open_rows(kind(path=path, val_share=0.0), tokenizer=None)


@pytest.mark.parametrize("column", ["tools", "chat_template_kwargs"])
def test_row_with_own_tools_or_template_arguments_is_an_error(tmp_path: Path, column: str):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "hi", "answer": "1", column: {"a": 1}}])
    with pytest.raises(ConfigError, match=f"row 1: column '{column}' is not supported"):
        open_rows(RowSettings(path=path, val_share=0.0), tokenizer=None)
