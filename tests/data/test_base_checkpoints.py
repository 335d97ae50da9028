"""SFT from published base checkpoints: the result has the statistics of the data, not those of the base checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lerobot_sets import numbers, write_set
from safetensors.numpy import load_file, save_file
from settings import model_of

from embodyrl import load_policy
from embodyrl.commands.export import export
from embodyrl.commands.sft import sft
from embodyrl.commands.sft_setup import sft_banner_lines
from embodyrl.data.reader import load_demonstrations
from embodyrl.errors import ConfigError, EmbodyError
from embodyrl.plan.config import load_config
from embodyrl.policies import POLICIES
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import ActionSpec, CameraSpec, EnvSpec, Observation

ASSETS = Path(__file__).parents[2] / "assets"
ACTION, STATE, CAMERA = "action", "observation.state", "observation.images.front"
WIDTH = {ACTION: 7, STATE: 4}
"""Sizes of the user's actions and states."""
CONSTANT = 3
"""Action dimension that is always 0.7 in the user's data, so that policies return 0.7 for any weights."""
Sets = dict[str, dict[str, int]]
BASES: dict[str, Sets] = {
    "equal_width": {"so100": WIDTH},
    "another_width": {"aloha": {ACTION: 14, STATE: 14}},
    "several_robots": {"so100": WIDTH, "aloha": {ACTION: 14, STATE: 14}},
    "no_statistics": {},
    "identity": {"identity": {ACTION: 32, STATE: 32}},
    "another_key": {"bridge_orig": WIDTH},
}
"""Statistics of the base checkpoint: sizes of actions and states by data set."""
NETWORKS = {"act": {"dim_model": 32, "dim_feedforward": 32}, "diffusion": {"down_dims": [16, 32], "n_groups": 4}}
"""Policies whose weights have the robot's sizes, and small sizes of the other weights."""
SHORT = (
    *("launcher=inline", "runner.max_steps=1", "runner.save_interval=1", "runner.val_check_interval=-1"),
    *("actor.global_batch_size=2", "actor.micro_batch_size=2", "data.val_share=0", "runner.logger.backends=[jsonl]"),
)

TABLETOP = ("env=tabletop", "env.init_params={camera_names: [front], camera_heights: 32, camera_widths: 32}")
"""An environment with the sizes of the user's data."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    varied = numbers(WIDTH[ACTION])

    def actions(episode: int, step: int) -> list[float]:
        return [0.7 if i == CONSTANT else value for i, value in enumerate(varied(episode, step))]

    columns, root = {ACTION: actions, STATE: numbers(WIDTH[STATE])}, tmp_path_factory.mktemp("data") / "data"
    return write_set(root, columns=columns, cameras=(CAMERA,), info={"robot_type": "my_robot"})


def rows(data_set: str, width: int) -> dict[str, list[float]]:
    mean, std = (0.0, 1.0) if data_set == "identity" else (37.0, 20.0)
    low, high = mean - std, mean + std
    values = {"mean": mean, "std": std, "min": low, "max": high, "q01": low, "q99": high}
    return {name: [value] * width for name, value in values.items()}


def write_openvla(base: Path, sets: Sets) -> None:
    shutil.copytree(ASSETS / "openvla_oft_tiny56px", base)
    (base / "dataset_statistics.json").unlink()
    names = {ACTION: "action", STATE: "proprio"}
    entries = {key: {names[part]: rows(key, size) for part, size in sizes.items()} for key, sizes in sets.items()}
    if entries:
        (base / "dataset_statistics.json").write_text(json.dumps(entries))


def write_openpi(base: Path, sets: Sets) -> None:
    """Write a pi0 folder with the statistics files of openpi."""
    shutil.copytree(ASSETS / "pi05_tiny", base)
    edit(base / "config.json", lambda config: config["embodyrl_flow"].update(adaptive=False))
    for key, sizes in sets.items():
        (base / "assets" / key).mkdir(parents=True)
        content = {"norm_stats": {"actions": rows(key, sizes[ACTION]), "state": rows(key, sizes[STATE])}}
        (base / "assets" / key / "norm_stats.json").write_text(json.dumps(content))


def write_lerobot(model: str, base: Path, sets: Sets) -> None:
    """Write a folder with statistics in the processors of LeRobot, or, as LeRobot 0.3, among the weights."""
    if model in NETWORKS:
        write_network(model, base, sets)
    else:
        shutil.copytree(ASSETS / f"{model}_tiny{'_tabletop' if model == 'smolvla' else ''}", base)
        (base / "dataset_statistics.json").unlink(missing_ok=True)
    in_weights = ("another_key" if model == "smolvla" else "several_robots") if model != "pi05" else None
    if in_weights and sets == BASES[in_weights]:
        old = {
            f"normalize_inputs.{f'{key}.' if len(sets) > 1 else ''}buffer_{part.replace('.', '_')}.{name}": row
            for key, sizes in sets.items()
            for part, size in sizes.items()
            for name, row in rows(key, size).items()
        }
        stored = load_file(base / "model.safetensors") | {name: np.array(row, np.float32) for name, row in old.items()}
        save_file(stored, base / "model.safetensors")
        return
    prompt = {"smolvla": "smolvla_new_line_processor", "pi05": "pi05_prepare_state_tokenizer_processor_step"}
    tokens = {"registry_name": "tokenizer_processor", "config": {"max_length": 48, "task_key": "task"}}
    after = [{"registry_name": prompt[model], "config": {}}, tokens] if model in prompt else []
    rename = {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}}
    mode = {"pi05": "QUANTILES", "diffusion": "MIN_MAX"}.get(model, "MEAN_STD")
    normalizer = normalizer_step(base, "pre", 1, sets, mode)
    write_processor(base, "pre", [rename, normalizer, *after])
    write_processor(base, "post", [normalizer_step(base, "post", 0, sets, mode)])


def normalizer_step(base: Path, side: str, index: int, sets: Sets, mode: str) -> dict[str, Any]:
    """Return a normalizer; without statistics, it has neither features nor a file, as in lerobot/pi05_base."""
    types = {ACTION: "ACTION"} if side == "post" else {ACTION: "ACTION", STATE: "STATE"}
    sizes = next(iter(sets.values()), {})
    features = {part: {"type": kind, "shape": [sizes[part]]} for part, kind in types.items() if sizes}
    modes = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    kind = "normalizer_processor" if side == "pre" else "unnormalizer_processor"
    step: dict[str, Any] = {"registry_name": kind, "config": {"eps": 1e-8, "features": features, "norm_map": modes}}
    if sets:
        step["state_file"] = f"policy_{side}processor_step_{index}_{kind}.safetensors"
        flat = {
            f"{f'{key}.buffer.' if len(sets) > 1 else ''}{part}.{name}": np.array(row, np.float32)
            for key, sizes in sets.items()
            for part, size in sizes.items()
            for name, row in rows(key, size).items()
        }
        save_file(flat, base / step["state_file"])
    return step


def write_processor(base: Path, side: str, steps: list[dict[str, Any]]) -> None:
    name = f"policy_{side}processor"
    (base / f"{name}.json").write_text(json.dumps({"name": name, "steps": steps}))


def write_network(model: str, base: Path, sets: Sets) -> None:
    """Write random weights of an ACT or diffusion policy for the first robot."""
    sizes = next((sizes for key, sizes in sets.items() if key != "identity"), WIDTH)
    start = shutil.copytree(ASSETS / model, base.with_name("start"))
    edit(start / "config.json", lambda config: config.update(NETWORKS[model]))
    env = EnvSpec(
        name="other",
        action=ActionSpec(dim=sizes[ACTION]),
        state_dim=sizes[STATE],
        cameras=CameraSpec(names=("front",), size=(32, 32)),
        tasks=("a",),
        states_per_task=(1,),
    )
    request = PolicyRequest(env=env, value_dim=0, device="cpu", seed=0, trainable=True)
    base.mkdir()
    POLICIES.get(model).build(model_of(model, path=str(start), num_action_chunks=4), request).save(base)
    for path in base.glob("policy_*"):
        path.unlink()


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def combinations() -> list[Any]:
    models = ("smolvla", "pi0", "pi05", "openvla_oft", *NETWORKS)
    slow = [("diffusion", name) for name in BASES if name != "several_robots"] + [("act", "identity")]
    return [
        pytest.param(model, name, id=f"{model}-{name}", marks=pytest.mark.slow if (model, name) in slow else ())
        for model in models
        for name in BASES
    ]


@pytest.mark.integration
@pytest.mark.parametrize(("model", "statistics"), combinations())
def test_sft_replaces_the_statistics_of_the_base(model: str, statistics: str, data: Path, tmp_path: Path) -> None:
    base, sets = tmp_path / "base", BASES[statistics]
    overrides = [f"data.path={data}", "data.gripper=[-1,1]", f"model.path={base}", f"runner.output_dir={tmp_path}"]
    overrides += [f"model={model}", "model.precision=fp32", "model.num_action_chunks=4", *SHORT]
    if model == "openvla_oft":
        write_openvla(base, sets)
    elif model == "pi0":
        write_openpi(base, sets)
    else:
        write_lerobot(model, base, sets)
    overrides += ["model.num_images_in_input=1"] * (model not in NETWORKS)
    overrides += ["model.unnorm_key=bridge_orig"] * (statistics == "another_key")
    if model in NETWORKS and statistics == "another_width":
        with pytest.raises(ConfigError, match=r"'my_robot' has a state of 4 numbers, but the checkpoint needs 14"):
            sft(load_config("sft", overrides))
        return
    cfg = load_config("sft", overrides)
    assert dict(sft_banner_lines(cfg))["model"].startswith(str(base))
    run = sft(cfg).run
    check_statistics(run / "checkpoints" / "step_000001" / "policy", data)
    check_actions(run)
    if statistics == "several_robots":
        with pytest.raises(EmbodyError, match="aloha"):
            load_policy(run, *TABLETOP, f"model.path={base}")


def check_actions(folder: Path) -> None:
    """Check that the policy of a run or an export uses the statistics of the data."""
    obs = Observation(
        images=np.zeros((2, 1, 32, 32, 3), np.uint8),
        state=np.zeros((2, WIDTH[STATE]), np.float32),
        instructions=("touch the red block",) * 2,
    )
    actions = load_policy(folder, *TABLETOP).policy.act(obs, noise=None).actions
    np.testing.assert_allclose(actions[..., CONSTANT], 0.7, atol=1e-5)


@pytest.mark.integration
@pytest.mark.parametrize("model", ["openvla_oft", "smolvla"])
def test_adapters_on_a_base_model_of_other_robots_are_exported(model: str, data: Path, tmp_path: Path) -> None:
    base, assets = tmp_path / "base", {"openvla_oft": "openvla_oft_tabletop", "smolvla": "smolvla_tiny_tabletop"}
    shutil.copytree(ASSETS / assets[model], base)
    entries = {key: {"action": rows(key, 14), "proprio": rows(key, 14)} for key in ("aloha", "other")}
    (base / "dataset_statistics.json").write_text(json.dumps(entries))
    overrides = [f"data.path={data}", "data.gripper=[-1,1]", f"model.path={base}", f"runner.output_dir={tmp_path}"]
    overrides += [f"model={model}", "model.precision=fp32", "model.num_action_chunks=4", "model.num_images_in_input=1"]
    run = sft(load_config("sft", [*overrides, "model.is_lora=true", *SHORT])).run
    export(run, 1, tmp_path / "export")
    check_statistics(tmp_path / "export", data)
    check_actions(tmp_path / "export")


def check_statistics(folder: Path, data: Path) -> None:
    """Check the statistics in all files, except those of the gripper, whose convention may differ from the data's."""
    demos = load_demonstrations(data)
    expected = {ACTION: demos.action.mean(0)[:-1], STATE: demos.state.mean(0)[:-1]}
    means: dict[str, dict[str, Any]] = {}
    if (folder / "dataset_statistics.json").is_file():
        ((key, entry),) = json.loads((folder / "dataset_statistics.json").read_text()).items()
        assert key == "my_robot"
        means["dataset_statistics.json"] = {ACTION: entry["action"]["mean"], STATE: entry["proprio"]["mean"]}
    for path in folder.glob("policy_*processor.json"):
        steps = json.loads(path.read_text())["steps"]
        (step,) = (step for step in steps if step["registry_name"].endswith("normalizer_processor"))
        features = {part: row for part, row in step["config"]["features"].items() if part in WIDTH}
        assert features.keys() == ({ACTION} if "post" in path.name else {ACTION, STATE})
        assert {part: row["shape"] for part, row in features.items()} == {part: [WIDTH[part]] for part in features}
        tensors = load_file(folder / step["state_file"])
        means[path.name] = {part: tensors[f"{part}.mean"] for part in features}
    assert means
    for name, parts in means.items():
        for part, mean in parts.items():
            assert len(mean) == WIDTH[part]
            np.testing.assert_allclose(mean[:-1], expected[part], atol=1e-5, err_msg=f"{name}: {part}")
    names = [name for path in folder.glob("*.safetensors") for name in load_file(path)]
    assert not [name for name in names if "buffer" in name], "statistics of the base"


def test_dpo_keeps_the_statistics_of_the_policy(data: Path) -> None:
    words = [f"data.path={data}", "model=openvla_oft_tiny", "model.unnorm_key=bridge_orig", "objective.name=dpo"]
    assert getattr(load_config("sft", words).model, "unnorm_key", None) == "bridge_orig"
