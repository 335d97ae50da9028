"""Config keys shared by policies. The folder of each policy declares its own keys."""

from typing import Annotated, Literal, Self

from pydantic import Field

from embodyrl.config.settings import Count, Path, Settings
from embodyrl.config.shared import Precision

WARMUP_STEPS = 10
"""Default number of warm-up steps in RL. Adam's first steps change each weight by the learning rate, even if gradients
are small. Without warm-up, they move the log-probability of a chunk, a sum over all elements and steps, far beyond the
clip range."""


class ModelSettings(Settings):
    """Config keys for every policy."""

    model_type: str
    """Type of the policy: a registered name, or package.module:attr."""
    num_action_chunks: Annotated[int, Field(ge=1, le=100_000)] = 8
    """K: number of actions that the policy returns per inference (length of an action chunk)."""

    @property
    def weights(self) -> str | None:
        """Path of the checkpoint; None for a policy without weights."""
        return getattr(self, "path", None)

    @property
    def warmup_steps(self) -> int:
        """Default number of warm-up optimizer steps in RL: `WARMUP_STEPS` for pretrained weights, otherwise 0."""
        return 0 if self.weights is None else WARMUP_STEPS

    @property
    def uses_bf16(self) -> bool:
        """True if the policy computes in bfloat16."""
        return getattr(self, "precision", Precision.fp32) is Precision.bf16

    @property
    def precision_name(self) -> str:
        """Name of the compute precision; fp32 for policies without the key `precision`."""
        return str(getattr(self, "precision", Precision.fp32))

    @property
    def is_compiled(self) -> bool:
        """True if torch.compile or CUDA graphs are used, so that weights must keep their memory addresses."""
        return getattr(self, "compile", False) or self.uses_cuda_graphs

    @property
    def uses_cuda_graphs(self) -> bool:
        """True if the policy captures CUDA graphs."""
        return getattr(self, "cuda_graphs", False)

    @property
    def trains_adapters(self) -> bool:
        """True if low-rank adapters are trained instead of the weights."""
        return getattr(self, "is_lora", False)

    def without_adapters(self, path: str | None = None) -> Self:
        """Return the settings without adapters, and with `path` (if set) as the folder of the weights."""
        return self if path is None else self.model_copy(update={"path": path})

    def with_statistics(self, path: str, key: str) -> Self:
        """Return the settings with the weights in folder `path` and the statistics of data set `key`."""
        own = {"unnorm_key": key} if "unnorm_key" in type(self).model_fields else {}
        return self.model_copy(update={"path": path, **own})


class WeightSettings(ModelSettings):
    """Config keys for a policy with weights."""

    path: Path | None = None
    """Checkpoint in the model's published format: a folder, or owner/name[@revision] on the Hugging Face hub."""
    precision: Precision = Precision.bf16
    """Compute precision; in training, master weights stay in fp32."""


class LoraSettings(Settings):
    """Config keys for low-rank adapters."""

    r: Count = 32
    """LoRA rank."""
    lora_alpha: Count = 32
    """LoRA scale: adapters are multiplied by lora_alpha / r."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead of lora_alpha / r (arXiv 2312.03732)."""
    target_modules: str = "all-linear"
    """Modules with adapters: all-linear, or comma-separated suffixes of module names (q_proj,v_proj)."""
    init_lora_weights: Literal["gaussian", "kaiming"] = "gaussian"
    """Initialization of the A matrix: gaussian or kaiming; the B matrix starts at 0."""
    path: Path | None = None
    """Folder of an initial adapter. Without is_lora, the adapter is merged into the weights."""


class AdapterSettings(WeightSettings):
    """Config keys for a policy with weights that supports adapters."""

    keys_by_condition = {
        "is_lora": "lora.r lora.lora_alpha lora.use_rslora lora.target_modules lora.init_lora_weights "
        "lora.lora_dropout lora.modules_to_save"
    }

    is_lora: bool = False
    """Train low-rank adapters instead of all weights."""
    lora: LoraSettings = LoraSettings()

    @property
    def uses_adapters(self) -> bool:
        """True if adapters are trained or merged."""
        return self.is_lora or self.lora.path is not None

    def without_adapters(self, path: str | None = None) -> Self:
        """Return the settings without adapters, and with `path` (if set) as the folder of the weights."""
        lora = self.lora if path is None else self.lora.model_copy(update={"path": None})
        return super().without_adapters(path).model_copy(update={"is_lora": False, "lora": lora})
