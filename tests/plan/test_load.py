"""Invalid configs are rejected with a helpful message, and valid configs compose to the expected values."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodyrl.cli.output import get_help
from embodyrl.config import compose
from embodyrl.config.shared import Precision
from embodyrl.errors import ConfigError
from embodyrl.plan.config import apply_overrides, load_config, load_saved_config
from embodyrl.plan.keys import all_keys
from embodyrl.plan.saved import ENVIRONMENT_FILE, dump_config, save_config

BAD = [
    # unknown names
    ("env=libero_11", ["env=libero_11", "Did you mean 'libero_10'?", "libero_spatial"]),
    ("model=openvla_otf", ["unknown model", "Did you mean 'openvla_oft'?"]),
    ("algorithm=gpro", ["Did you mean 'grpo'?"]),
    ("launcher=rya", ["unknown launcher 'rya'", "inline, local, ray"]),
    ("experiment=laptop", ["unknown experiment", "libero_laptop"]),
    ("env=null", ["takes the name of one option"]),
    ("env=[libero_10,libero_90]", ["takes the name of one option"]),
    ("env.train.total_num_env=4", ["unknown key", "Did you mean 'env.train.total_num_envs'?"]),
    ("env.num_env=3", ["unknown key", "Did you mean 'env.train.total_num_envs'?"]),
    ("group_size=4", ["Did you mean 'algorithm.group_size'?"]),
    ("lr=0.1", ["Did you mean 'actor.optim.lr'?"]),
    ("qqqqqqqqq=1", ["unknown key", "`embodyrl show train` lists all keys"]),
    ("hydra.run.dir=x", ["unknown key"]),
    ("env.init_params={camera_width: 64}", ["Did you mean 'env.init_params.camera_widths'?"]),
    ("env.train=3", ["env.train is a group of keys"]),
    # forms
    ("++foo=1", ["never added", "foo=VALUE"]),
    ("+env.foo=1", ["never added"]),
    ("++seed=3", ["seed=VALUE"]),
    ("~seed", ["never added or removed"]),
    ("custom.foo=1", ["custom.foo"]),
    ("seed=1,2", ["one value per key", "embodyrl train -m seed=1,2"]),
    ("data.prompt_template={prompt}", ["""'data.prompt_template="{prompt}"'"""]),
    ("env@eval_env=libero_10", ["'@' is not supported"]),
    ("env.id=[1", ["Cannot parse 'env.id=[1'"]),
    ("seed", ["Cannot parse 'seed'", "key=value"]),
    # types
    ("algorithm.group_size=three", ["must be an integer", "Default: 8"]),
    ("algorithm.group_size=2.5", ["must be an integer"]),
    ("algorithm.group_size=null", ["must be an integer"]),
    ("runner.deterministic=3", ["must be true or false"]),
    ("runner.deterministic=yes", ["must be true or false"]),
    ("model.path=true", ["must be a path or null"]),
    ("model.precision=fp16", ["must be one of bf16, fp32", "Did you mean 'bf16'?"]),
    ("rollout.mode=colocated", ["Did you mean 'collocated'?"]),
    ("env.train.task_ids=3", ["a list of different task numbers", "or null"]),
    ("env=gym env.kwargs=3", ["must be a mapping"]),
    ("seed=${nowhere}", ["cannot be resolved"]),
    ("seed=???", ["cannot be resolved"]),
    # ranges
    ("algorithm.clip_ratio_low=20", ["greater than 0 and at most 1"]),
    ("algorithm.clip_ratio_high=20", ["greater than 0 and at most 10"]),
    ("algorithm.clip_ratio_high=-0.1", ["greater than 0 and at most 10"]),
    ("env.train.total_num_envs=0", ["must be an integer at least 1"]),
    ("seed=-1", ["at least 0"]),
    ("actor.optim.learning_rate=1", ["Did you mean 'actor.optim.lr'?"]),
    ("env.num_envs=8", ["Did you mean 'env.train.total_num_envs'?"]),
    ("runner.iterations=8", ["Did you mean 'runner.max_steps'?"]),
    ("eval.greedy=true", ["Did you mean 'eval.sampling_params.do_sample'?"]),
    ("zzz.qqq=true", ["lists all keys"]),
    ("algorithm.clip_range=0.2", ["Did you mean 'algorithm.clip_ratio_high'?"]),
    ("video=off", ["none, failures, first:N, changed:N, all"]),
    ("video=first:0", ["first:N"]),
    ("algorithm=ppo algorithm.gamma=1.5", ["at least 0 and at most 1"]),
    ("algorithm=ppo algorithm.gamma=nan", ["must be"]),
    ("actor.optim.lr=inf", ["must be"]),
    ("env.reward_coef=nan", ["must be"]),
    ("algorithm.entropy_bonus=nan", ["must be a number"]),
    ("algorithm.clip_ratio_c=0.9", ["greater than 1", "or null"]),
    ("algorithm.filter_rewards=[0.9,0.1]", ["low < high"]),
    ("algorithm.filter_rewards=[0.5]", ["two numbers"]),
    ("env.train.task_ids=[]", ["different task numbers"]),
    ("env.train.task_ids=[1,1]", ["different task numbers"]),
    ("launcher.env_workers=0", ["auto or an integer"]),
    ("runner.logger.backends=[jsonl,jsonl]", ["different names", "[console,jsonl,wandb]"]),
    ("runner.experiment_name=a/b", ["without '/'"]),
    ("runner.experiment_name=..", ["does not begin with a dot"]),
    ("actor.optim.schedule=linaer", ["constant, linear, cosine, wsd"]),
    ("runner.val_check_interval=0", ["at least 1, or -1"]),
    # not available yet
    ("rollout.backend=sglang", ["one of hf, vllm, server"]),
    ("env.eval.enable_offload=true", ["does not read"]),
    ("actor.fsdp.size=2 launcher=inline", ["one process", "launcher=local"]),
    ("actor.fsdp.size=4 actor.fsdp.shard_size=3", ["not a multiple", "shard_size=-1"]),
    ("actor.fsdp.size=2 model.compile=true", ["one actor rank"]),
    ("actor.fsdp.size=2 rollout.backend=vllm", ["one actor rank", "rollout.backend=hf"]),
    ("actor.fsdp.size=2 algorithm.max_staleness=1", ["one actor rank"]),
    ("algorithm.max_staleness=-1", ["at least 0"]),
    # combinations
    ("algorithm.group_size=3 env.train.total_num_envs=4", ["total_num_envs=3 or 6", "group_size=2"]),
    ("env=libero_10 algorithm.group_size=16", ["total_num_envs=16,", "group_size=8"]),
    ("env.train.use_fixed_reset_state_ids=false", ["one initial state", "use_fixed_reset_state_ids=true"]),
    ("env=libero_10 launcher.env_workers=9", ["env_workers=8"]),
    ("env=libero_10 actor.micro_batch_size=200", ["micro_batch_size=160"]),
]


def problems_of(overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config("train", overrides)
    return caught.value.problems


@pytest.mark.parametrize(("typed", "fragments"), BAD, ids=[b[0] for b in BAD])
def test_config_error_is_one_line_with_a_fix(typed: str, fragments: list[str]) -> None:
    overrides = [typed] if "{" in typed else typed.split(" ")
    problems = problems_of(overrides)
    assert len(problems) == 1, problems
    assert "\n" not in problems[0]
    for fragment in fragments:
        assert fragment in problems[0]


def test_config_problems_are_reported_together() -> None:
    bad = "env=libero_11 sed=1 ++x=2 algorithm.group_size=a algorithm.clip_ratio_low=700 b=[ seed=${q}"
    problems = problems_of(bad.split(" "))
    text = "\n".join(problems)
    assert len(problems) == 7, text
    for fragment in ("libero_11", "'seed'", "++x=2", "an integer", "at most 1.", "parse 'b=['", "resolved"):
        assert fragment in text


def test_conflicts_are_checked_after_single_values() -> None:
    problems = problems_of(["env.train.total_num_env=4", "algorithm.group_size=3"])
    assert len(problems) == 1
    assert "unknown key" in problems[0]


def option_files() -> list[str]:
    return [f"{group}={option}" for group in compose.default_options("train") for option in compose.options(group)]


@pytest.mark.parametrize("override", option_files())
def test_every_yaml_composes_and_has_a_description(override: str) -> None:
    if override == "launcher=ray":
        pytest.importorskip("ray")
    group, _, option = override.partition("=")
    file = compose.options(group)[option]
    load_config("train", [override])
    assert len(get_help(group, option, file)) > 10


@pytest.mark.parametrize("suite", ["libero_spatial", "libero_object", "libero_goal"])
def test_simplevla_preset_sets_its_horizon(suite: str) -> None:
    env = load_config("train", ["algorithm=simplevla", f"env={suite}"]).env
    assert (env.train.max_episode_steps, env.eval.max_episode_steps) == (512, 512)


def test_every_yaml_in_conf_belongs_to_a_group() -> None:
    grouped = {f for group in compose.default_options("train") for f in compose.options(group).values()}
    commands = ("train", "collect", "sft", "serve", "dagger", "check-env")
    roots = {compose.conf_dir() / f"{command}.yaml" for command in commands}
    algorithms = set((compose.conf_dir() / "start/algorithm").glob("*.yaml"))
    starts = set((compose.conf_dir() / "start").rglob("*.yaml")) - algorithms
    others = {compose.conf_dir() / "variants.yaml"}
    assert set(compose.conf_dir().rglob("*.yaml")) == grouped | roots | starts | algorithms | others
    assert {file.stem for file in algorithms} <= set(compose.options("algorithm"))
    for file in starts:
        name = file.relative_to(compose.conf_dir() / "start").with_suffix("").as_posix()
        env, _, model = name.rpartition("-")
        assert env in compose.options("env")
        assert model in compose.options("model")


def test_env_and_model_pair_sets_matching_weights() -> None:
    assert load_config("train", []).model.path == "assets/openvla_oft_tabletop"
    assert load_config("train", ["env=libero_10"]).model.path == "assets/openvla_oft_tiny"
    assert load_config("eval", ["model.path=mine"]).model.path == "mine"


def test_command_line_takes_precedence_over_experiment_and_group() -> None:
    cfg = load_config("train", ["experiment=libero_laptop", "env=libero_goal", "runner.max_steps=7"])
    assert cfg.env.task_suite_name == "libero_goal"
    assert cfg.env.train.max_episode_steps == 200
    assert cfg.runner.max_steps == 7
    assert cfg.model.precision is Precision.fp32


def test_env_kwargs_accept_any_nested_key() -> None:
    words = ["env=gym", "env.kwargs.a.b=[1,x]", "env.kwargs={speed: 2}", "env.kwargs.c=${seed}", "seed=5"]
    assert load_config("train", words).env.kwargs == {"a": {"b": [1, "x"]}, "c": 5, "speed": 2}


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("env=libero_10 env=tabletop", "env.env_type", "tabletop"),
        ("seed=1 seed=2", "seed", 2),
        ("env=gym env.kwargs.a.b=1 env.kwargs.a=2", "env.kwargs", {"a": 2}),
        ("env=gym env.kwargs.a=2 env.kwargs.a.b=1", "env.kwargs", {"a": {"b": 1}}),
        ("env=gym env.kwargs.a={} env.kwargs.a.b=1", "env.kwargs", {"a": {"b": 1}}),
    ],
)
def test_last_of_two_overrides_is_used(words: str, key: str, value: object) -> None:
    assert dict(load_config("train", words.split()).leaves())[key] == value


@pytest.mark.parametrize("name", ["video", "critic.path", "reward"])
def test_updated_rejects_keys_that_the_command_does_not_use(name: str) -> None:
    with pytest.raises(ConfigError, match=f"`embodyrl sft` has no key '{name}'"):
        load_config("sft", ()).updated({name: None})


def test_missing_config_section_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^algorithm is not set\.$"):
        apply_overrides(load_config("train", ()), {"algorithm": None})


def test_train_and_eval_have_equal_values_of_shared_keys() -> None:
    words = ["env=libero_goal", "seed=3"]
    trained, measured = (dict(load_config(command, words).leaves()) for command in ("train", "eval"))
    assert measured.items() <= trained.items()
    assert len(measured) < len(trained)


def test_config_dir_options_are_validated_strictly(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "mine.yaml").write_text("# My kitchen\nenv_type: libero\nreward_coef: 5\n")
    (tmp_path / "env" / "typo.yaml").write_text("env_type: libero\nreward_coeff: 5\n")
    (tmp_path / "env" / "broken.yaml").write_text("env_type: [\n")
    assert load_config("train", ["env=mine"], config_dirs=[tmp_path]).env.reward_coef == 5
    assert (
        load_config("train", ["env=mine"], config_dirs=[tmp_path]).sources["env.reward_coef"].endswith("env/mine.yaml")
    )
    (tmp_path / "env" / "mine.yaml").write_text("env_type: libero\nreward_coef: 7\n# @package _global_\n")
    assert load_config("train", ["env=mine"], config_dirs=[tmp_path]).env.reward_coef == 7, "as it is now"
    for option, fragment in (("typo", "Did you mean 'env.reward_coef'?"), ("broken", "env=broken")):
        with pytest.raises(ConfigError) as caught:
            load_config("train", [f"env={option}"], config_dirs=[tmp_path])
        assert len(caught.value.problems) == 1
        assert fragment in caught.value.problems[0]
    with pytest.raises(ConfigError, match="no such folder"):
        load_config("train", [], config_dirs=[tmp_path / "nowhere"])
    (tmp_path / "env" / "gym.yaml").write_text("env_type: gym\nreward_coef: 5\n")
    with pytest.raises(ConfigError, match=r"env=gym: env 'gym' is built in, so .*env/gym.yaml would be ignored"):
        load_config("train", ["env=gym"], config_dirs=[tmp_path])


def test_value_source_is_the_last_file_that_set_it() -> None:
    origin = load_config("train", ["experiment=libero_laptop", "seed=3"]).sources
    assert origin["seed"] == "command line"
    assert origin["env.train.max_episode_steps"] == "conf/experiment/libero_laptop.yaml"
    assert origin["env.task_suite_name"].startswith("conf/env/")
    assert "actor.optim.adam_beta1" not in origin


def test_saved_config_round_trips(tmp_path: Path) -> None:
    cfg = load_config(
        "train", ["env=gym", "env.kwargs.x={a: [1, null]}", "env.train.task_ids=[2,0]", "algorithm=ppo", "model=cnn"]
    )
    (tmp_path / "config.yaml").touch()
    before = (tmp_path / "config.yaml").stat().st_ino
    save_config(cfg, tmp_path / "config.yaml")
    assert (tmp_path / "config.yaml").stat().st_ino != before, "replaced as a whole, never rewritten in place"
    assert load_saved_config(tmp_path, []) == cfg
    changed = load_saved_config(tmp_path / "config.yaml", ["seed=9"])
    differences = [(a, b) for a, b in zip(cfg.leaves(), changed.leaves(), strict=True) if a != b]
    assert differences == [(("seed", 0), ("seed", 9))]


def test_unparsable_number_gives_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"seed: {'9' * 5000}\n")
    with pytest.raises(ConfigError):
        load_saved_config(tmp_path, [])


def test_saved_config_is_validated_strictly(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "sed: 1\nalgorithm: {update_epoch: x}\nenv: {env_type: tabletop}\n"
        "model: {model_type: mlp}\nlauncher: {name: local}\ncheckpoint: {}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_saved_config(tmp_path, ["env=libero_10", "seed=a"])
    text = str(caught.value)
    assert len(caught.value.problems) == 4, text
    for fragment in (
        f"{file}: unknown key 'sed'",
        "algorithm.update_epoch=x must be",
        "no group options",
        "seed=a: must be",
    ):
        assert fragment in text
    with pytest.raises(ConfigError, match="list runs"):
        load_saved_config(tmp_path / "nowhere", [])


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system ['touch {marker}']",
        "!!python/object/new:pathlib.PosixPath [x]",
        "!!python/name:os.system ''",
        "!custom x",
    ],
)
def test_yaml_tags_never_construct_anything(tmp_path: Path, tag: str) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "config.yaml").write_text(f"seed: 0\nenv: {{a: {tag.format(marker=marker)}}}\n")
    with pytest.raises(ConfigError, match=r"config.yaml:2: YAML tag .* is refused"):
        load_saved_config(tmp_path, [])
    assert not marker.exists()


def test_every_key_is_documented() -> None:
    missing = [name for name, key in all_keys().items() if len(key.doc) < 5 or not key.doc.endswith(".")]
    assert missing == []


def test_ckpt_of_a_run_sets_model_and_image_settings(tmp_path: Path) -> None:
    save_config(load_config("train", []), tmp_path / "small.yaml")
    save_config(load_config("sft", ["data.path=demos"]), tmp_path / "large.yaml")
    for command in ("train", "eval"):
        small = load_config(command, ["env=tabletop"], base=tmp_path / "small.yaml")
        assert (small.model.num_images_in_input, small.env.init_params.camera_heights) == (1, 56)
        large = load_config(command, ["env=tabletop"], base=tmp_path / "large.yaml")
        assert (large.model.num_images_in_input, large.env.init_params.camera_names) == (2, ["front", "wrist"])
        other = load_config(command, ["env=libero_10"], base=tmp_path / "large.yaml")
        assert other.env.init_params.camera_heights == 256


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("env=libero_object", "linear"),
        ("experiment=libero_laptop_flow", "linear"),
        ("experiment=libero_laptop", "auto"),  # the colors of the demonstrations of its weights
        ("experiment=libero_laptop eval=libero_standard", "linear"),
        ("experiment=libero_laptop eval=libero_standard env.texture_colorspace=auto", "auto"),
        ("env=libero_object model=flow_small model.path=assets/flow_small_tabletop", "linear"),
    ],
)
def test_texture_colors_follow_the_protocol_or_the_weights(words: str, expected: str) -> None:
    assert load_config("train", words.split()).env.texture_colorspace == expected


def test_ckpt_of_a_run_sets_the_environment(tmp_path: Path) -> None:
    """Fails if the run is trained in the environment of the default run because no environment is given."""
    base, demos = tmp_path / "config.yaml", "env=libero_object env.train.task_ids=[3] env.train.max_episode_steps=90"
    save_config(load_config("train", [*demos.split(), "algorithm=ppo"]), base)
    cfg = load_config("train", [], base=base)
    assert (cfg.env.task_suite_name, cfg.env.train.task_ids, cfg.env.train.max_episode_steps) == (
        "libero_object",
        [3],
        90,
    )
    assert cfg.algorithm.adv_type == "gae"  # as the run learned
    assert load_config("train", ["env=tabletop"], base=base).env.env_type == "tabletop"

    save_config(load_config("sft", ["data.path=demos"]), base)
    with pytest.raises(ConfigError, match="without a known environment"):
        load_config("train", [], base=base)
    shown = load_config("collect", [*demos.split(), "collect.out=demos"])
    (tmp_path / ENVIRONMENT_FILE).write_text(dump_config(shown, group="env"))
    cfg = load_config("train", [], base=base)
    assert (cfg.env.task_suite_name, cfg.env.eval.task_ids, cfg.env.eval.max_episode_steps) == (
        "libero_object",
        [3],
        90,
    )
    assert (cfg.env.train.state_ids, cfg.env.eval.state_ids) == ([20, 49], [0, 9])


@pytest.mark.parametrize("command", ["train", "eval", "collect", "serve"])
def test_rollout_commands_use_the_weights_of_the_env_model_pair(command: str, tmp_path: Path) -> None:
    words = [f"collect.out={tmp_path}"] * (command == "collect")
    cfg = load_config(command, ["env=tabletop", "model=openvla_oft_tiny", *words])
    assert (cfg.model.path, cfg.env.init_params.camera_heights) == ("assets/openvla_oft_tabletop", 56)
    if command == "collect":
        assert load_config(command, ["env=tabletop", *words]).env.init_params.camera_heights == 112  # the expert's


def test_eval_of_a_run_uses_its_validation_settings(tmp_path: Path) -> None:
    base = tmp_path / "config.yaml"
    words = ["eval.episodes=33", "eval.sampling_params.do_sample=true", "eval.sampling_params.temperature=0.7"]
    save_config(load_config("train", words), base)

    def found(*typed: str) -> tuple[int | None, int, bool]:
        cfg = load_config("eval", typed, base=base)
        return cfg.eval.episodes, cfg.eval.episodes_per_task, cfg.eval.sampling_params.do_sample

    assert found() == (33, 10, True)
    assert found("eval.episodes=7", "eval.sampling_params.do_sample=false") == (7, 10, False)
    assert found("eval.episodes_per_task=5") == (None, 5, True)  # the total of the run would win
    assert found("env=libero_10") == (None, 10, False)
    assert found("eval=libero_standard")[1:] == (50, False)
    assert load_config("collect", [f"collect.out={tmp_path}"], base=base).env.env_type == "tabletop"

    save_config(load_config("train", ["eval=tabletop_axes"]), base)
    with_suites = load_config("eval", [], base=base)
    assert with_suites.eval.protocol.name == "tabletop_axes"
    assert with_suites.runner.val_suites
    assert load_config("eval", ["env=libero_10"], base=base).runner.val_suites == []


def test_keys_of_a_missing_component_give_one_error(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("model_type: gone\nown_key: 1\n")
    with pytest.raises(ConfigError) as raised:
        load_config("train", ["model=mine"], config_dirs=[tmp_path])
    assert [problem.partition(" Known")[0] for problem in raised.value.problems] == ["Unknown model 'gone'."]


def test_run_with_keys_of_its_own_loss_can_be_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "soft_loss.py").write_text(
        "from embodyrl.algorithms.protocol import PolicyLoss\n"
        "from embodyrl.config.settings import Settings\n"
        "class SoftSettings(Settings):\n    softness: float = 0.2\n"
        "LOSS = PolicyLoss(compute=lambda units, cfg: None, settings=SoftSettings)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["env=gym", "env.id=CartPole-v1", "model=mlp", "algorithm=ppo", "algorithm.loss_type=soft_loss:LOSS"]
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    saved = run / "config.yaml"
    save_config(load_config("train", [*words, "algorithm.softness=0.3"]), saved)
    assert load_config("eval", [f"ckpt={run}", "trust=true"], base=saved).env.id == "CartPole-v1"
    with pytest.raises(ConfigError) as caught:
        load_config("eval", [f"ckpt={run}"], base=saved)
    assert "add trust=true" in str(caught.value)
    assert "unknown key" not in str(caught.value)
    saved.write_text(saved.read_text().replace("soft_loss:LOSS", "soft_lost:LOSS"))
    with pytest.raises(ConfigError, match="Cannot import 'soft_lost'") as caught:
        load_config("eval", [f"ckpt={run}", "trust=true"], base=saved)
    saved.write_text(saved.read_text().replace("soft_lost:LOSS", "soft_loss:LOSS"))
    assert "unknown key" not in str(caught.value)
    saved.write_text(saved.read_text().replace("softness", "softnes"))
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm\.softnes'"):
        load_config("eval", [f"ckpt={run}", "trust=true"], base=saved)


def test_experiment_without_package_line_is_an_error_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("seed: 3\n")
    with pytest.raises(ConfigError, match="# @package _global_"):
        load_config("train", ["experiment=mine"], config_dirs=[tmp_path])


def test_quoted_braces_are_text() -> None:
    """The argument that the error message for an unquoted value suggests is valid."""
    assert compose.parse_override('data.prompt_template="{prompt}"') == ("data.prompt_template", "{prompt}")
