"""Peak memory of writing and reading a sharded 400 MB checkpoint, each in a new process."""

import json
import subprocess
import sys

import pytest

SHARD_BYTES = 80_000_000
SCRIPT = """
import json, resource, sys
from embodyrl.policies.openvla_oft import FACTORY, checkpoint
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.types import ActionSpec, BenchmarkSpec, CameraSpec, EnvSpec

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

source, target, shard_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
checkpoint.SHARD_BYTES = shard_bytes
env = EnvSpec(
    name="e",
    action=ActionSpec(dim=7),
    tasks=("put the",),
    states_per_task=(1,),
    cameras=CameraSpec(names=("a",)),
    benchmark=BenchmarkSpec(unnorm_key="libero_10"),
)
request = PolicyRequest(env=env, value_dim=0, temperature=1.0, device="cpu", seed=0, trainable=True)
import embodyrl.policies.openvla_oft.policy
start = peak()
policy = FACTORY.build(FACTORY.settings(model_type="openvla_oft", path=source, precision="fp32"), request)
built = peak()
if target:
    from pathlib import Path
    policy.save(Path(target))
size = sum(p.numel() * p.element_size() for p in policy.module.parameters())
print(json.dumps({"size": size, "build": built - start, "save": peak() - built}))
"""


def measure(source, target):
    command = [sys.executable, "-c", SCRIPT, str(source), str(target), str(SHARD_BYTES)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.integration
def test_peak_memory_of_loading_is_the_model_plus_one_shard(checkpoint, edit_json, tmp_path):
    text = json.loads((checkpoint / "config.json").read_text())["text_config"]
    text |= {"hidden_size": 768, "intermediate_size": 1920, "num_hidden_layers": 16, "num_attention_heads": 16}
    edit_json(checkpoint / "config.json", text_config=text | {"num_key_value_heads": 16}, embodyrl_init="random")
    for path in checkpoint.glob("model*"):
        path.unlink()
    written = measure(checkpoint, tmp_path / "saved")
    shards = list((tmp_path / "saved").glob("model-*.safetensors"))
    assert written["size"] > 400_000_000
    assert len(shards) >= 5
    # The parameters lie in host memory already, so that writing needs no copy of a shard, and never a second model.
    assert written["save"] < 1.5 * SHARD_BYTES
    read = measure(tmp_path / "saved", "")
    assert read["size"] == written["size"]
    # Pages of the shard that is being copied count, too.
    assert read["build"] < read["size"] + 2 * SHARD_BYTES
