"""Chat templates against transformers, and the checks before a run starts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from text_runs import text_config
from tokenizers import Tokenizer
from transformers import AddedToken, AutoTokenizer

from embodyrl.cli.dry_run import describe
from embodyrl.commands.train import train
from embodyrl.config.paths import resolve_asset
from embodyrl.config.shared import SamplingSettings
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.plan.config import load_config
from embodyrl.policies.causal_lm.prompts import PromptReader, get_reply_text
from embodyrl.policies.causal_lm.settings import CausalLMSettings
from embodyrl.text.chat import (
    ChatTemplate,
    RejectedMessages,
    count_turn_tokens,
    count_unknown_tokens,
    find_control_tokens,
    find_end_token_problem,
    find_roles_problem,
    get_opened_tag,
    measure_prompts,
    remove_control_tokens,
)
from embodyrl.text.dataset import open_rows
from embodyrl.text.messages import Message, join_messages
from embodyrl.text.rewards.functions import tagged
from embodyrl.text.settings import RowSettings

TINY = resolve_asset("assets/causal_lm_tiny")
CHATML = (
    "{% for m in messages %}{{ '<bos>' + m['role'] + '\n' + m['content'] + '<eos>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>assistant\n' }}{% endif %}"
)
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('Only user and assistant are roles') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "|{{ m['content'] | trim }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
OTHERS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m | tojson }}{{ strftime_now('%Y') }}{% endif %}{% if loop.first %}{% continue %}"
    "{% endif %}{% endfor %}\n    {%- if tools %}never{% endif %}"
)


def folder(where: Path, template: str, *, ends: int = 2) -> Path:
    """Create a small model's folder with a chat template."""
    where.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(where)
    (where / "config.json").write_text((TINY / "config.json").read_text())
    (where / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return where


def reader_of(place: Path) -> PromptReader:
    cfg = CausalLMSettings(model_type="causal_lm")
    return PromptReader(AutoTokenizer.from_pretrained(place), cfg, place, empty_prompt_token=0, pixels=0)


def messages(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f" {n}+1= "} for n, role in enumerate(roles)]


@pytest.mark.parametrize("template", [CHATML, ALTERNATING, OTHERS])
def test_chat_template_matches_transformers(template: str, tmp_path: Path):
    place = folder(tmp_path / "m", template)
    read, tokenizer = ChatTemplate.read(place), AutoTokenizer.from_pretrained(place)
    assert read is not None
    for roles in (("user",), ("user", "assistant", "user")):
        wanted = tokenizer.apply_chat_template(messages(*roles), tokenize=False, add_generation_prompt=True)
        assert read.render(messages(*roles)) == wanted
        ids = tokenizer.apply_chat_template(messages(*roles), add_generation_prompt=True, return_dict=False)
        assert measure_prompts([wanted], place, template=read) == [len(ids)]


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ ('a' * 10**9) | length }}",
        "{{ 'a' * 2**25 }}",
    ],
)
def test_template_that_exceeds_a_resource_limit_is_an_error_in_every_process(source: str, tmp_path: Path):
    place = folder(tmp_path / "m", source)
    for render in (
        lambda: ChatTemplate.read(place).render(messages("user")),
        lambda: reader_of(place),  # in the policy process of a run, in `serve` and in pages
    ):
        with pytest.raises(ConfigError, match=r"needs more than 1 s of CPU time or 512 MiB.*model.chat=false"):
            render()
    assert ChatTemplate(CHATML, {}).render([]) == "<bos>assistant\n", "later templates are rendered"


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{" + "(" * 300])
def test_template_that_fails_rejects_the_conversation(source: str):
    with pytest.raises(RejectedMessages, match=r"division by zero|recursion"):
        ChatTemplate(source, {}).render(messages("user"))


@pytest.mark.parametrize("layout", ["inside", "list", "processor"])
def test_chat_template_is_found_in_transformers_locations(layout: str, tmp_path: Path):
    place = folder(tmp_path / "m", CHATML)
    (place / "chat_template.jinja").unlink()
    config = json.loads((place / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    if layout == "processor":
        (place / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    else:
        config["chat_template"] = CHATML if layout == "inside" else named
        (place / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.read(place).source == CHATML
    assert ChatTemplate.read(TINY) is None


@pytest.mark.parametrize(
    ("roles", "fix"),
    [
        (("system", "user"), "data.prompt_template instead of data.system_prompt"),
        (("user", "assistant", "tool"), "env.tool_role=user"),
        (("system", "user", "assistant", "tool"), "env.tool_role=user, and data.prompt_template"),
        (("user", "user"), "change the roles"),
    ],
)
def test_unsupported_role_sequence_error_contains_a_fix(roles: tuple[str, ...], fix: str, tmp_path: Path):
    template = ChatTemplate.read(folder(tmp_path / "m", ALTERNATING))
    problem = find_roles_problem(template, roles, parts=False)
    assert fix in problem
    assert ", ".join(roles) in problem
    assert find_roles_problem(template, ("user", "assistant", "user"), parts=False) is None


def test_roles_are_rendered_before_the_run_starts(tmp_path: Path):
    place = folder(tmp_path / "m", ALTERNATING)
    words = ["model=causal_lm", f"model.path={place}", "data.max_prompt_length=null"]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    system = ["env=text/gsm8k", f"data.path={tmp_path}/rows.jsonl", "data.system_prompt=add", "data.prompt_key=prompt"]
    system += ["data.answer_pattern=null"]
    for command in ("train", "sft", "eval"):
        chosen = system if command != "sft" else system[1:]
        with pytest.raises(ConfigError, match=r"rejects the roles system, user \(Only user and .*data.prompt_template"):
            describe(load_config(command, [*words, *chosen, f"runner.output_dir={tmp_path}/runs"]))
    tools = ["env=text/calculator", *words]
    with pytest.raises(ConfigError, match=r"rejects the roles user, assistant, tool .*env.tool_role=user"):
        describe(load_config("train", [*tools, f"runner.output_dir={tmp_path}/runs"]))
    assert not (tmp_path / "runs").exists()
    describe(load_config("train", [*tools, "env.tool_role=user"]))
    describe(load_config("train", [*tools, "model.chat=false"]))


def test_prompt_length_includes_the_chat_template(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": "1" * n, "answer": "2"}) + "\n" for n in (3, 9)))
    keys = {"path": str(tmp_path / "rows.jsonl"), "max_prompt_length": 9, "val_share": 0.0}
    plain, place = RowSettings(**keys), folder(tmp_path / "m", "{{ bos_token }}12+34={{ messages[0]['content'] }}")
    template = ChatTemplate.read(place)
    assert len(open_rows(plain, tokenizer=place)) == 1, "the tokenizer's own token counts"
    assert len(open_rows(plain.updated({"max_prompt_length": 10}), tokenizer=place, template=template)) == 1
    with pytest.raises(ConfigError, match=r"none of the .* rows remains"):
        open_rows(plain.updated({"max_prompt_length": 8}), tokenizer=place, template=template)


@pytest.mark.parametrize("stored", ["padding", "truncation"])
def test_prompt_length_ignores_stored_padding_and_truncation(stored: str, tmp_path: Path):
    place = folder(tmp_path / "m", CHATML)
    tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
    if stored == "padding":
        tokenizer.enable_padding()
    else:
        tokenizer.enable_truncation(2)
    tokenizer.save(str(place / "tokenizer.json"))
    template, prompts = ChatTemplate.read(place), ["1", "12+34"]
    assert measure_prompts(prompts, place, template=template) == [1, 5]
    assert count_unknown_tokens(prompts, place, template=template)[0] == [(1, 0), (5, 0)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "["),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '"text"'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("special_tokens_map.json", "[3]"),
        ("generation_config.json", "{"),
    ],
)
def test_damaged_model_file_is_named_before_the_run_starts(name: str, content: str, tmp_path: Path):
    place = folder(tmp_path / "m", CHATML)
    (place / name).write_text(content)
    if name == "tokenizer_config.json":
        (place / "chat_template.jinja").unlink()
    model = ["env=text/copy", "model=causal_lm", f"model.path={place}", "launcher=inline"]
    problem = "(cannot be read|is missing or malformed)"
    with pytest.raises(EmbodyError, match=rf"{place / name} {problem}.*Download the file again\."):
        describe(load_config("train", [*model, f"runner.output_dir={tmp_path}/runs"]))


@pytest.mark.parametrize(("source", "role"), [(CHATML, "tool"), (ALTERNATING, "user"), (None, "tool")])
def test_turn_tokens_are_the_tokens_around_a_reply_and_a_tool_answer(source: str | None, role: str, tmp_path: Path):
    place = folder(tmp_path / "m", source or CHATML)
    cfg = CausalLMSettings(model_type="causal_lm", chat=None if source else False)
    reader = PromptReader(AutoTokenizer.from_pretrained(place), cfg, place, empty_prompt_token=0, pixels=0)
    asked = Message(role="user", content="12*34=")
    talk = (asked, Message(role="assistant", content="?12*34"), Message(role=role, content="408"))
    before, after = (len(reader._encode(join_messages(turns), b"", ())) for turns in ((asked,), talk))
    template = ChatTemplate.from_settings(cfg, place)
    assert after - before == len("?12*34") + len("408") + count_turn_tokens(place, template=template)


TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|plan|>")
ENVELOPE = ("<tool_response>", "</tool_response>", "[INST]", "[/INST]", "<|agent|>")
ENVELOPED = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "<tool_response>{{ m.content }}</tool_response>{% else %}<|agent|>"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}"
    "{{ m.content.split('</think>')[-1] }}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<|agent|>"
)


def tagged_reader(place: Path, generation: str) -> PromptReader:
    """Return the reader of a tokenizer whose tags are special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder(place, ENVELOPED + generation + "{% endif %}"))
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in TAGS + ENVELOPE], special_tokens=True)
    tokenizer.save_pretrained(place)
    return PromptReader(tokenizer, CausalLMSettings(model_type="causal_lm"), place, empty_prompt_token=0, pixels=0)


def test_special_tokens_that_are_tags_are_kept_as_text(tmp_path: Path):
    reader = tagged_reader(tmp_path / "m", "")
    tokenizer, hidden = reader._processor, ("<eos>", *ENVELOPE)
    text = "1".join(TAGS)
    reply = tokenizer(text + "".join(hidden), add_special_tokens=False)["input_ids"]
    assert get_reply_text(reader, reply, SamplingSettings()) == text
    assert get_reply_text(reader, reply, SamplingSettings(stop=["</answer>"])) == text.partition("</answer>")[0]
    prompt = tokenizer.decode(reader._encode(text + "2" + "".join(hidden), b"", ()))
    assert prompt == f"[INST]{text}2[/INST]<|agent|>"
    assert reader.opening_tag == ""


STRUCTURE = ("<end_of_utterance>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")


@pytest.mark.parametrize("chat", [True, False])
def test_structural_tokens_outside_templates_are_removed(chat: bool, tmp_path: Path):
    place = folder(tmp_path / "m", "{{ messages[0].content }}") if chat else TINY
    tokenizer = AutoTokenizer.from_pretrained(place)
    pairs = ["<think>", "</think>", "[CALL]", "[/CALL]", "<|do|>", "<|/do|>"]
    named = ["<|begin_of_thought|>", "<|end_of_thought|>", "<|python_tag|>"]  # text if a template shows the structure
    more = [AddedToken(t, special=True, normalized=False) for t in (*pairs, *named, *STRUCTURE)]
    tokenizer.add_tokens(more, special_tokens=True)
    reader = PromptReader(tokenizer, CausalLMSettings(model_type="causal_lm"), place, empty_prompt_token=0, pixels=0)
    reply = tokenizer("1".join((*pairs, *named)) + "".join(STRUCTURE), add_special_tokens=False)["input_ids"]
    assert reader.decode(reply) == ("1".join((*pairs, *named)) if chat else "1".join((*pairs, "", "", "")))


@pytest.mark.parametrize(
    ("generation", "opened"),
    [("<think>1", ""), ("<think>\n", "<think>\n"), ("<think>", "<think>"), ("<think>\n\n</think>\n\n", "")],
)
def test_reply_begins_with_the_tag_that_the_template_opens(generation: str, opened: str, tmp_path: Path):
    reader = tagged_reader(tmp_path / "m", generation.replace("\n", "{{ '\n' }}"))
    assert reader.opening_tag == opened
    end = reader._processor("b</think><answer>c</answer>", add_special_tokens=False)["input_ids"]
    reply = get_reply_text(reader, end, SamplingSettings())
    assert reply == f"{opened}b</think><answer>c</answer>"
    assert tagged("", reply, "") == float(bool(opened))
    assert reader.strip_opening_tag(reply) == "b</think><answer>c</answer>"
    assert reader.strip_opening_tag("c") == "c"


def test_tag_that_the_template_closes_belongs_to_the_template(tmp_path: Path):
    place = folder(tmp_path / "m", "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}")
    template = ChatTemplate.read(place)
    assert (
        get_opened_tag(
            replace(template, source=template.source + "{% if add_generation_prompt %}<assistant>{% endif %}")
        )
        == ""
    )


THINKING = (
    "{% for m in messages %}{{ m['content'] + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a' if think | default(true) else 'ab' }}{% endif %}"
)


@pytest.mark.parametrize("arguments", [{}, {"think": False}])
def test_template_and_arguments_of_a_run_match_transformers(arguments: dict[str, bool], tmp_path: Path):
    place, file = folder(tmp_path / "m", CHATML), tmp_path / "thinking.jinja"
    file.write_text(THINKING)
    keys = {"chat_template": str(file), "chat_template_kwargs": arguments}
    cfg, tokenizer = CausalLMSettings(model_type="causal_lm", **keys), AutoTokenizer.from_pretrained(place)
    asked = messages("user", "assistant", "user")
    words = {"tokenize": False, "add_generation_prompt": True, **arguments}
    expected = tokenizer.apply_chat_template(asked, chat_template=THINKING, **words)
    template = ChatTemplate.from_settings(cfg, place)
    assert template is not None
    assert template.render(asked) == expected
    assert expected.endswith("b") == bool(arguments)
    tokenizer.chat_template = THINKING
    ids = PromptReader(tokenizer, cfg, place, empty_prompt_token=0, pixels=0)._encode("1+1=", b"", ())
    assert tokenizer.decode(ids) == "1+1=" + expected[expected.rindex("|") :]


def test_chat_template_of_a_run_is_checked_before_the_start_and_saved(tmp_path: Path):
    file = tmp_path / "thinking.jinja"
    file.write_text(THINKING)
    words = ("model.chat_template_kwargs={think: false}", f"model.chat_template={file}", "runner.max_steps=1")
    run = train(text_config(tmp_path, *words)).run
    saved = AutoTokenizer.from_pretrained(next((run / "checkpoints").glob("step_*")) / "policy")
    assert saved.chat_template == THINKING
    for wrong, reason in (
        (("model.chat_template_kwargs={tools: 1}",), "tools cannot be set"),
        (("model.chat=false", f"model.chat_template={file}"), "have no effect"),
        (("model.chat_template_kwargs={think: false}",), "has no chat template. Set model.chat_template"),
        ((f"model.chat_template={tmp_path}/none",), "none cannot be read"),
    ):
        with pytest.raises(ConfigError, match=reason):
            describe(text_config(tmp_path / "wrong", *wrong))


def test_undeclared_end_of_turn_token_gives_a_warning(tmp_path: Path):
    place = folder(tmp_path / "m", CHATML, ends=1)
    warning = find_end_token_problem(ChatTemplate.read(place), place, parts=False)
    assert "ends a turn with <eos> (2)" in warning
    assert "add 2" in warning
    words = ["model=causal_lm", f"model.path={place}", "model.precision=fp32"]
    assert "ends a turn with <eos>" in describe(load_config("train", ["env=text/arithmetic", *words]))
    sft = [*words, "data.path=embodyrl.text.tasks:arithmetic"]
    assert "ends a turn with <eos>" in describe(load_config("sft", sft))
    named = folder(tmp_path / "named", CHATML)
    assert find_end_token_problem(ChatTemplate.read(named), named, parts=False) is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("plain <text>", "plain <text>"),
        ("a<e<eos>os>b", "ab"),
        ("x<e<e<eos>os>os><<eos>eos>y<eos", "xy<eos"),
        ("<e<start>os><sta<eos>rt>.", "."),
        ("<e" * 200_000 + "os>" * 200_000 + "end", "end"),
    ],
    ids=["none", "one", "nested", "two kinds", "deep"],
)
@pytest.mark.timeout(60)  # minutes, if each removal searches the whole text again
def test_nested_control_tokens_are_removed_in_one_pass(content: str, expected: str):
    assert remove_control_tokens(content, ["<start>", "<eos>", ""]) == expected


def test_control_tokens_in_text_are_removed_and_counted(tmp_path: Path):
    place = folder(tmp_path / "m", CHATML)
    assert remove_control_tokens("a<e<eos>os>b", find_control_tokens(place, ChatTemplate.read(place))) == "ab"
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1<eos>+1=", "answer": "2"}\n')
    cfg = RowSettings(path=str(tmp_path / "rows.jsonl"), val_share=0.0)
    rows = open_rows(cfg, tokenizer=place, template=ChatTemplate.read(place))
    assert rows.warnings == ("1 rows contain control tokens of the model, which are removed (first: row 2, <eos>)",)
    assert open_rows(cfg, tokenizer=place).warnings == ()
    tokenizer = AutoTokenizer.from_pretrained(place)
    reader = PromptReader(tokenizer, CausalLMSettings(model_type="causal_lm"), place, empty_prompt_token=0, pixels=0)
    prompts = [list(reader._encode(text, b"", ())) for text in ("1+1=", "1<eos>+1=")]
    assert prompts[0] == prompts[1]
    assert text_config(tmp_path / "runs")
