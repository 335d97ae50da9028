"""Statistics of the user's data: SFT of checkpoints for other robots, and dimensions that rarely or never differ."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot_sets import numbers, write_set

from embodyrl.cli.dry_run import describe
from embodyrl.commands.sft import sft
from embodyrl.commands.sft_setup import data_statistics, load_inputs, sft_banner_lines
from embodyrl.data.statistics import scaling_text
from embodyrl.errors import EmbodyError
from embodyrl.plan.config import load_config
from embodyrl.policies import POLICIES
from embodyrl.policies.flow.small.config import read_bounds
from embodyrl.policies.flow.vla.folder import read_normalizer
from embodyrl.policies.lerobot.config import Feature
from embodyrl.policies.lerobot.files import _read_sft_statistics
from embodyrl.policies.lerobot.units import Normalizer
from embodyrl.policies.openvla_oft.config import Statistics, normalise, unnormalise
from embodyrl.types import ActionSpec, EnvSpec

ASSETS = Path(__file__).parents[2] / "assets"
ENV = EnvSpec(name="arm", action=ActionSpec(dim=5), tasks=("a",), states_per_task=(1,), state_dim=5)
COUNT = 400


def data() -> np.ndarray:
    """Return 400 rows: uniform, constant, one value in 400 differs, jitter with a rare value, almost constant."""
    rng = np.random.default_rng(0)
    rows = np.stack([rng.uniform(-1, 1, COUNT), np.full(COUNT, 0.7)], 1)
    rare, jitter = np.zeros(COUNT), rng.normal(0, 1e-3, COUNT)
    rare[7], jitter[9] = 1.0, 2.0
    return np.concatenate([rows, np.stack([rare, jitter, 0.3 + 1e-8 * rare], 1)], 1).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dataset_statistics.json").write_text(json.dumps({"arm": data_statistics(data(), data(), ENV, 1)}))
    return tmp_path


def flow(mode: str, folder: Path):
    kind = "pi05" if mode == "quantiles" else "smolvla"
    (folder / "config.json").write_text("{}")
    cfg = POLICIES.get(kind).settings.model_validate({"model_type": kind, "path": str(folder)})
    units = read_normalizer(folder, cfg, 5, 5)
    return units.actions.normalise, units.actions.unnormalise, units.state.normalise


def oft(mode: str, folder: Path):
    found = Statistics(json.loads((folder / "dataset_statistics.json").read_text()), folder)
    action, state = found.bounds("arm", "action", mode), found.bounds("arm", "proprio", mode)
    return (
        lambda x: normalise(x, action),
        lambda x: unnormalise(x, action),
        lambda x: normalise(x, state, flat_to_zero=False),
    )


def small(mode: str, folder: Path):
    from embodyrl.policies.flow.small.config import SmallConfig
    from embodyrl.policies.flow.small.network import SmallFlow
    from embodyrl.policies.vla.records import ChunkShape

    shape = ChunkShape(horizon=1, width=5, executed=1, action_dim=5)
    network = SmallFlow(SmallConfig(state_dim=5, action_width=5), shape, read_bounds(ENV, None, folder), min_words=1)
    return (
        lambda x: network.from_actions(x, None),
        lambda x: network.to_actions(x, None),
        lambda x: network._normalise_state(torch.as_tensor(x)).numpy(),
    )


def lerobot_units(mode: str, folder: Path) -> Normalizer:
    from embodyrl.policies.lerobot.act.config import ActConfig

    config = ActConfig(
        input_features={"observation.state": Feature(type="STATE", shape=(5,))},
        output_features={"action": Feature(type="ACTION", shape=(5,))},
        normalization_mapping=dict.fromkeys(("STATE", "ACTION"), mode),
    )
    units = Normalizer(config, 1e-8)
    units.set_statistics(_read_sft_statistics(folder / "dataset_statistics.json", config), folder)
    return units


def lerobot(mode: str, folder: Path):
    units = lerobot_units(mode, folder)

    def through(change, name):
        return lambda x: change(name, torch.as_tensor(np.asarray(x, np.float32))).numpy()

    return (
        through(units.normalize, "action"),
        through(units.unnormalize, "action"),
        through(units.normalize, "observation.state"),
    )


READERS = [
    *((flow, mode) for mode in ("quantiles", "mean_std")),
    *((oft, mode) for mode in ("bounds_q99", "bounds")),
    (small, ""),
    *((lerobot, mode) for mode in ("MEAN_STD", "MIN_MAX", "QUANTILES")),
]


@pytest.mark.parametrize(("reader", "mode"), READERS, ids=[f"{reader.__name__}-{mode}" for reader, mode in READERS])
def test_rare_and_constant_dimensions_are_scaled(reader, mode: str, folder: Path) -> None:
    """Every action of the data can be represented, and no later state or target is far outside the range of training.

    Only values beyond q01 and q99 of the uniform dimension are clipped.
    """
    to_units, from_units, read_state = reader(mode, folder)
    actions = data()
    targets = to_units(actions)
    assert np.abs(targets).max() <= 3
    np.testing.assert_allclose(from_units(targets)[:, 1:], actions[:, 1:], atol=1e-5)
    assert np.abs(from_units(targets)[:, 0] - actions[:, 0]).max() < 0.03
    noisy = from_units(targets + 0.3)
    np.testing.assert_allclose(noisy[:, [1, 4]], actions[:, [1, 4]], atol=1e-5, err_msg="constant actions stay")
    assert (np.abs(noisy - actions)[:, [0, 2, 3]].max(0) > 0.1).all()
    later = np.array([[0.0, 0.98, 0.5, 0.5, 0.98], [50.0, 50.0, 50.0, 50.0, 50.0]], np.float32)
    states = read_state(later)
    assert np.abs(states).max() <= 4
    assert (read_state(actions)[0] != states[0]).all()
    assert np.abs(read_state(actions)).max() <= 3
    assert np.abs(to_units(later)).max() <= 4, "targets of other data"


@pytest.mark.parametrize("mode", ["MEAN_STD", "MIN_MAX", "QUANTILES"])
def test_constant_actions_have_no_log_probability(mode: str, folder: Path) -> None:
    found = lerobot_units(mode, folder).varies()
    assert found is not None
    assert found.tolist() == [1, 0, 1, 1, 0]


def test_banner_names_constant_and_rare_dimensions() -> None:
    assert scaling_text(data(), data()[:, :2]) == (
        "constant: action[1], action[4], state[1] · rarely different, scaled by min and max: action[2], action[3]"
    )
    assert scaling_text(data()[:, :1], data()[:, :0]) == ""


def test_ordinary_statistics_are_unchanged() -> None:
    entry, rows = data_statistics(data(), data(), ENV, 1), data()[:, 0].astype(np.float64)
    for part in ("action", "proprio"):
        found = [entry[part][name][0] for name in ("mean", "std", "q01", "q99", "min", "max")]
        wanted = rows.mean(), rows.std(), *np.quantile(rows, (0.01, 0.99)), rows.min(), rows.max()
        np.testing.assert_allclose(found, wanted, rtol=1e-9)
    assert [entry["action"][name][1] for name in ("min", "q01", "q99", "max", "std")] == pytest.approx([0.7] * 4 + [0])
    assert [entry["proprio"][name][1] for name in ("min", "q01", "q99", "max", "std")] == pytest.approx(
        [-0.3, -0.3, 1.7, 1.7, 1.0]
    )


def write_base(kind: str, where: Path, sets: dict[str, int]) -> Path:
    """Write a base checkpoint (with an empty file as weights) with statistics of data sets of other sizes."""
    name = {"smolvla": "smolvla_tiny", "pi05": "pi05_tiny", "openvla_oft": "openvla_oft_tiny"}[kind]
    base = shutil.copytree(ASSETS / name, where)
    config = json.loads((base / "config.json").read_text())
    config.pop("embodyrl_init")
    (base / "config.json").write_text(json.dumps(config))
    (base / "model.safetensors").touch()
    (base / "dataset_statistics.json").unlink(missing_ok=True)
    rows = {key: dict.fromkeys(("mean", "std", "min", "max", "q01", "q99"), [1.0] * size) for key, size in sets.items()}
    if kind == "openvla_oft":
        (base / "dataset_statistics.json").write_text(json.dumps({key: {"action": row} for key, row in rows.items()}))
    for key, row in rows.items() if kind == "pi05" else ():
        (base / "assets" / key).mkdir(parents=True)
        (base / "assets" / key / "norm_stats.json").write_text(
            json.dumps({"norm_stats": {"state": row, "actions": row}})
        )
    if kind == "smolvla" and sets:
        from safetensors.numpy import save_file

        flat = {f"{key}.buffer.action.mean": np.zeros(size, np.float32) for key, size in sets.items()}
        save_file(flat, base / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    return base


SETS = ({"bridge_orig": 7}, {"bridge_orig": 7, "fractal": 7}, {"aloha": 14, "other": 6}, {"identity": 32}, {})


@pytest.fixture(scope="module")
def arm_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("arm") / "data"
    write_set(root, columns={"action": numbers(7), "observation.state": numbers(4)})
    info = json.loads((root / "meta" / "info.json").read_text())
    (root / "meta" / "info.json").write_text(json.dumps(info | {"robot_type": "my_robot"}))
    return root


@pytest.mark.parametrize("sets", SETS, ids=lambda sets: "+".join(f"{k}{v}" for k, v in sets.items()) or "none")
@pytest.mark.parametrize("kind", ["smolvla", "pi05", "openvla_oft"])
def test_sft_ignores_statistics_of_other_data(kind: str, sets: dict[str, int], arm_data: Path, tmp_path: Path) -> None:
    base = write_base(kind, tmp_path / "base", sets)
    more = ["data.gripper=[-1,1]", "model.use_proprio=false"] if kind == "openvla_oft" else []
    words = [f"data.path={arm_data}", f"model={kind}_tiny", f"model.path={base}", "model.num_images_in_input=1", *more]
    for key in ((), ("model.unnorm_key=bridge_orig",), ("model.unnorm_key=new",)):
        cfg = load_config("sft", [*words, *key])
        assert cfg.model.unnorm_key == "my_robot"
        assert dict(sft_banner_lines(cfg))["model"].startswith(str(base))
        material = load_inputs(cfg, tmp_path / "start")
        assert material.model.unnorm_key == "my_robot"
        assert [*json.loads((tmp_path / "start" / "dataset_statistics.json").read_text())] == ["my_robot"]


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["openvla_oft_tiny56px", "smolvla_tiny"])
def test_runs_from_checkpoints_of_other_robots_are_evaluated(kind: str, tmp_path: Path) -> None:
    root, oft = tmp_path / "data", kind.startswith("openvla")
    columns = {"action": numbers(7), "observation.state": numbers(4)}
    write_set(root, columns=columns, cameras=("observation.images.front",))
    base, rows = shutil.copytree(ASSETS / kind, tmp_path / "base"), dict.fromkeys(("q01", "q99"), [1.0] * 14)
    if oft:
        sets = {"aloha": {"action": rows}, "other": {"action": rows}}
        (base / "dataset_statistics.json").write_text(json.dumps(sets))
    else:
        (base / "norm_stats.json").write_text(json.dumps({"norm_stats": {"state": rows, "actions": rows}}))
    model = "model=openvla_oft_tiny" if oft else f"model={kind}"
    more = ["data.gripper=[-1,1]", "model.num_images_in_input=1", *(["model.use_proprio=false"] if oft else [])]
    words = [f"data.path={root}", model, f"model.path={base}", f"runner.output_dir={tmp_path}", *more]
    small = ["launcher=inline", "runner.max_steps=1", "actor.global_batch_size=2", "actor.micro_batch_size=2"]
    run = sft(load_config("sft", [*words, *small, "runner.val_check_interval=-1"])).run
    size = [f"env.init_params.camera_{side}=32" for side in ("heights", "widths")]
    words = ["env=tabletop", f"ckpt={run}", *size]
    cfg = load_config("eval", words, base=run / "config.yaml")
    assert cfg.model.path == str(run / "start")
    assert str(run) in describe(cfg)
    with pytest.raises(EmbodyError, match="aloha" if oft else "norm_stats"):
        describe(load_config("eval", [*words, f"model.path={base}"], base=run / "config.yaml"))


def test_dpo_keeps_the_statistics_of_the_policy(arm_data: Path) -> None:
    words = [f"data.path={arm_data}", "model=openvla_oft_tiny", "model.unnorm_key=bridge_orig", "objective.name=dpo"]
    assert load_config("sft", words).model.unnorm_key == "bridge_orig"
