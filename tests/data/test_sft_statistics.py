"""Statistics of the user's data: SFT of checkpoints for other robots, and dimensions that rarely or never differ."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from embodyrl.commands.sft_data import data_statistics
from embodyrl.data.statistics import describe_constant_dimensions
from embodyrl.policies import POLICIES
from embodyrl.policies.flow.small.config import read_bounds
from embodyrl.policies.flow.vla.folder import read_normalizer
from embodyrl.policies.lerobot.config import Feature
from embodyrl.policies.lerobot.files import _read_sft_statistics
from embodyrl.policies.lerobot.normalization import Normalizer
from embodyrl.policies.openvla_oft.config import Statistics, normalize, unnormalize
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
    return units.actions.normalize, units.actions.unnormalize, units.state.normalize


def oft(mode: str, folder: Path):
    found = Statistics(json.loads((folder / "dataset_statistics.json").read_text()), folder)
    action, state = found.bounds("arm", "action", mode), found.bounds("arm", "proprio", mode)
    return (
        lambda x: normalize(x, action),
        lambda x: unnormalize(x, action),
        lambda x: normalize(x, state, flat_to_zero=False),
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
        lambda x: network._normalize_state(torch.as_tensor(x)).numpy(),
    )


def lerobot_units(mode: str, folder: Path) -> Normalizer:
    from embodyrl.policies.lerobot.act.config import ActConfig

    config = ActConfig(
        input_features={"observation.state": Feature(type="STATE", shape=(5,))},
        output_features={"action": Feature(type="ACTION", shape=(5,))},
        normalization_mapping=dict.fromkeys(("STATE", "ACTION"), mode),
    )
    units = Normalizer(config, 1e-8, torch.device("cpu"))
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
def test_rarely_changing_and_constant_dimensions_are_scaled(reader, mode: str, folder: Path) -> None:
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
    found = lerobot_units(mode, folder).get_varying_mask()
    assert found is not None
    assert found.tolist() == [1, 0, 1, 1, 0]


def test_banner_lists_constant_and_rarely_changing_dimensions() -> None:
    assert describe_constant_dimensions(data(), data()[:, :2]) == (
        "constant: action[1], action[4], state[1] · rarely different, scaled by min and max: action[2], action[3]"
    )
    assert describe_constant_dimensions(data()[:, :1], data()[:, :0]) == ""


def test_varying_dimensions_have_plain_statistics() -> None:
    entry, rows = data_statistics(data(), data(), ENV, 1), data()[:, 0].astype(np.float64)
    for part in ("action", "proprio"):
        found = [entry[part][name][0] for name in ("mean", "std", "q01", "q99", "min", "max")]
        wanted = rows.mean(), rows.std(), *np.quantile(rows, (0.01, 0.99)), rows.min(), rows.max()
        np.testing.assert_allclose(found, wanted, rtol=1e-9)
    assert [entry["action"][name][1] for name in ("min", "q01", "q99", "max", "std")] == pytest.approx([0.7] * 4 + [0])
    assert [entry["proprio"][name][1] for name in ("min", "q01", "q99", "max", "std")] == pytest.approx(
        [-0.3, -0.3, 1.7, 1.7, 1.0]
    )
