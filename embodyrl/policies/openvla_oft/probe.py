"""Declaration of the GPU check of OpenVLA-OFT. Does not import torch."""

from embodyrl.findings import GpuCheck

CHECK = GpuCheck(
    number=9,
    title="OpenVLA-OFT at 7B with two layers: acting, CUDA graphs, training",
    function="embodyrl.policies.openvla_oft.gpu_check:check_policy",
    timeout_s=300,
    needs=("torch",),
)
