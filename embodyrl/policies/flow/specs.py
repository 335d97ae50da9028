"""Sizes of flow policies as frozen records; the published sizes, and the numbers that every size shares."""

from dataclasses import dataclass

MAX_DIM = 32
"""Width of states and actions in all published checkpoints; shorter ones are padded with zeros."""
SHORTEST_PERIOD, LONGEST_PERIOD = 4e-3, 4.0
"""Periods of the time embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """A SigLIP tower."""

    image_size: int
    patch_size: int
    width: int
    depth: int
    heads: int
    mlp: int

    @property
    def patches(self) -> int:
        """Patches of one image."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersSpec:
    """A stack of decoder layers: Gemma's kind, or Llama's."""

    width: int
    depth: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    gemma: bool = True
    """Gemma: norms multiply by 1 + weight, MLPs gate with the tanh form of GELU. Llama: by the weight, with SiLU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpec:
    """What pi0, pi0.5 and SmolVLA have in common."""

    vision: VisionSpec
    language: LayersSpec
    expert: LayersSpec
    vocab: int
    horizon: int = 50
    """H: actions of a chunk."""
    action_dim: int = MAX_DIM
    state_dim: int = MAX_DIM

    @property
    def image_tokens(self) -> int:
        """Prefix tokens of one image."""
        return self.vision.patches


@dataclass(frozen=True, slots=True, kw_only=True)
class Pi0Spec(FlowSpec):
    """pi0, and pi0.5 (arXiv 2410.24164, 2504.16054; sizes of the openpi repository)."""

    adaptive: bool = False
    """pi0.5: time enters through the expert's norms, and the state is text; pi0: both are suffix tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolVlaSpec(FlowSpec):
    """SmolVLA (arXiv 2506.01844; sizes of lerobot)."""

    shuffle: int = 4
    """Side of the square of patches that become one token."""
    joint_every: int = 2
    """Layers whose index this divides attend jointly, the others across; 1: all jointly."""

    @property
    def image_tokens(self) -> int:
        """Prefix tokens of one image."""
        return self.vision.patches // self.shuffle**2


def expert_mlp(width: int) -> int:
    """Width of SmolVLA's expert MLP: 4 * 2/3 of the width, rounded up to a multiple of 256."""
    return -(-4 * int(2 * width / 3) // 256) * 256


SO400M = VisionSpec(image_size=224, patch_size=14, width=1152, depth=27, heads=16, mlp=4304)
GEMMA_2B = LayersSpec(width=2048, depth=18, mlp=16384, heads=8, kv_heads=1, head_dim=256)
GEMMA_300M = LayersSpec(width=1024, depth=18, mlp=4096, heads=8, kv_heads=1, head_dim=256)
PALIGEMMA_VOCAB = 257152

PI0 = Pi0Spec(vision=SO400M, language=GEMMA_2B, expert=GEMMA_300M, vocab=PALIGEMMA_VOCAB)
PI05 = Pi0Spec(vision=SO400M, language=GEMMA_2B, expert=GEMMA_300M, vocab=PALIGEMMA_VOCAB, adaptive=True)

SMOL_TEXT = LayersSpec(
    width=960, depth=16, mlp=2560, heads=15, kv_heads=5, head_dim=64, norm_eps=1e-5, gemma=False
)  # fmt: skip
SMOL_EXPERT = LayersSpec(
    width=720, depth=16, mlp=expert_mlp(720), heads=15, kv_heads=5, head_dim=64, norm_eps=1e-5, gemma=False
)
SMOLVLA = SmolVlaSpec(
    vision=VisionSpec(image_size=512, patch_size=16, width=768, depth=12, heads=12, mlp=3072),
    language=SMOL_TEXT,
    expert=SMOL_EXPERT,
    vocab=49280,
)
