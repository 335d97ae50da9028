"""GPU check of presets: which of them fit on this host, and the predicted time of a training step."""

import tempfile
from pathlib import Path

from embodyrl.errors import ConfigError
from embodyrl.plan.build import build_run_plan
from embodyrl.plan.config import load_config
from embodyrl.plan.memory_limits import resource_banner_lines
from embodyrl.plan.rates import predict
from embodyrl_gpu_check.result import GpuParts, GpuResult
from embodyrl_gpu_check.synthetic import write_file_headers

_GIB = 2**30
PRESETS = {
    "libero_10_lora_1gpu": "openvla_oft",
    "libero_10_lora_24gb": "openvla_oft",
    "libero_10_full_8gpu": "openvla_oft",
    "libero_spatial_smolvla_1gpu": "smolvla",
    "libero_spatial_pi05_1gpu": "pi05",
}
"""Model of each checked preset. Presets of ManiSkill and vLLM need packages that few hosts have."""


def check_presets() -> GpuResult:
    """Build the run plan of each preset with the published sizes of its model."""
    parts, fitting = GpuParts(), list[str]()
    for preset, model in PRESETS.items():
        with parts.part(preset), tempfile.TemporaryDirectory() as folder:
            write_file_headers(Path(folder), model)
            try:
                text = describe_preset(preset, folder)
            except ConfigError as error:
                parts.record(preset, f"does not fit: {error}")
                continue
            parts.record(preset, text)
            fitting.append(f"{preset} ({text})")
    others = [name for name in PRESETS if str(parts.values.get(name, "")).startswith("does not fit")]
    if not fitting:
        parts.warnings.append("no preset fits as it is")
    lines = [f"fits: {', '.join(fitting)}"] if fitting else []
    return parts.result("; ".join([*lines, *([f"does not fit as it is: {', '.join(others)}"] if others else [])]))


def describe_preset(preset: str, folder: str) -> str:
    """Return the planned GPU memory and the predicted time of a training step.

    Raises:
        ConfigError: the run does not fit on this host.
    """
    cfg = load_config("train", [f"experiment={preset}", f"model.path={folder}", "runner.output_dir=" + folder])
    run_plan = build_run_plan(cfg, training=True)
    resource_banner_lines(run_plan)  # raises if memory is too small
    memory, rates = f"{run_plan.memory.policy / _GIB:.1f} GiB for the policy", predict(run_plan)
    return memory if rates is None else f"{memory}, about {rates.seconds:.0f} s a step"
