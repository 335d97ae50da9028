"""Sizes of weights from the meta device, in this process and in one without torch."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from embodyrl.policies.lerobot.config import Feature
from embodyrl.policies.lerobot.diffusion.config import DiffusionConfig
from embodyrl.policies.lerobot.diffusion.network import Diffusion
from embodyrl.policies.vla.weights import get_weight_sizes

NETWORK = "embodyrl.policies.lerobot.diffusion.network:Diffusion"
CONFIG = DiffusionConfig(
    input_features={"observation.state": Feature(type="STATE", shape=(4,))},
    output_features={"action": Feature(type="ACTION", shape=(2,))},
    down_dims=(16, 32),
)
DRIVER = f"""
import sys
from embodyrl.policies.lerobot.diffusion.config import DiffusionConfig
from embodyrl.policies.vla.weights import get_weight_sizes
found = get_weight_sizes({NETWORK!r}, DiffusionConfig.model_validate_json(sys.argv[1]))
assert "torch" not in sys.modules
print({{name: tuple(size) for name, size in found.items()}})
"""


def test_weight_sizes_match_the_module():
    module, found = Diffusion(CONFIG), get_weight_sizes(NETWORK, CONFIG)
    assert {name: size.shape for name, size in found.items()} == {n: p.shape for n, p in module.named_parameters()}
    layers = [n for n, part in module.named_modules() if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d)]
    assert {name for name, size in found.items() if size.adaptable} == {f"{name}.weight" for name in layers}
    assert found["unet.final_conv.1.weight"].fan_in_plus_fan_out == 2 + 16
    assert torch.get_default_device().type == "cpu"


@pytest.mark.integration
def test_weight_sizes_are_measured_once_and_cached(tmp_path):
    command = [sys.executable, "-c", DRIVER, CONFIG.model_dump_json()]
    told = []
    for _ in range(2):
        done = subprocess.run(
            command, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
        (file,) = (tmp_path / "embodyrl" / "weights").iterdir()
        # The second process reads what the first one wrote.
        file.write_text(file.read_text().replace("unet.", "read."))
    expected = str({name: tuple(size) for name, size in get_weight_sizes(NETWORK, CONFIG).items()})
    assert told == [expected + "\n", expected.replace("unet.", "read.") + "\n"]


@pytest.mark.integration
def test_weight_sizes_are_measured_again_if_a_module_changes(tmp_path):
    package = tmp_path / "somewhere"
    (package / "nets").mkdir(parents=True)
    for folder in (package, package / "nets"):
        (folder / "__init__.py").touch()
    network = "from torch.nn import Linear\nfrom somewhere.sizes import WIDTH\ndef build(): return Linear(2, WIDTH)\n"
    (package / "nets" / "network.py").write_text(network)
    driver = (
        "from embodyrl.policies.vla.weights import get_weight_sizes as sizes; "
        "print(sizes('somewhere.nets.network:build'))"
    )
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": paths}
    for width in (3, 40):
        (package / "sizes.py").write_text(f"WIDTH = {width}\n")
        done = subprocess.run([sys.executable, "-c", driver], env=environ, capture_output=True, text=True, check=False)
        assert f"'weight': WeightSize(shape=({width}, 2)" in done.stdout, done.stderr
