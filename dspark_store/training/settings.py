"""The settings of a training: one frozen dataclass that says what is known, what is the default, and what cannot be."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_store.draft.settings import MARKOV_KINDS
from dspark_store.precompute.settings import PrecomputeConfig
from dspark_store.settings import check_settings, setting

if TYPE_CHECKING:
    import torch

    from dspark_store.draft.loss import LossWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything a training is told. The names are the flags' names with underscores."""

    output_dir: str = setting("training", "where checkpoints and metrics are written")
    mask_token_id: int = setting("draft", "the token that stands in a block's empty slots; one that texts do not have")
    store: str | None = setting("data", "the store to train from", None)
    online: str | None = setting(
        "data", "in place of a store: the YAML file of a precompute, whose target is run live", None
    )
    target_model: str | None = setting(
        "data", "the target that the store must be of; its configuration is compared", None
    )
    seq_length: int | None = setting("data", "the sequence length that the store must have", None)
    layers: tuple[int, ...] = setting("data", "captured layers to train from, by id; all if not given", (), nargs="+")
    allow_reduced_depth: bool = setting(
        "data", "train from the states of a target that was cut to its first layers", False
    )
    draft_layers: int = setting("draft", "layers of the draft", 5, least=1)
    block_size: int = setting("draft", "K, the tokens that a draft proposes at once", 7, least=1)
    intermediate_size: int | None = setting("draft", "width of the draft's MLPs; the target's if not given", None)
    markov: str = setting("draft", "the head that knows the token before", "vanilla", choices=MARKOV_KINDS)
    markov_rank: int = setting("draft", "rank of the Markov head", 256, least=1)
    no_confidence: bool = setting("draft", "train no confidence head", False)
    num_anchors: int = setting("draft", "N, the blocks of a sample, at most", 512, least=1)
    batch_size: int = setting("data", "samples of a micro-batch, on each rank", 8, least=1)
    accumulate: int = setting("data", "micro-batches of a step", 1, least=1)
    epochs: int = setting("training", "times that the training samples are gone through", 1, least=1)
    max_steps: int | None = setting(
        "training", "end after so many steps, and plan the learning rate for them", None, least=1
    )
    learning_rate: float = setting("training", "learning rate after the warm-up", 6e-4, least=0)
    warmup_ratio: float = setting("training", "share of the steps that warm up, at least 20 of them; 0 for none", 0.05)
    min_lr_ratio: float = setting("training", "what the cosine leaves of the learning rate in the end", 0.1, least=0)
    weight_decay: float = setting("training", "weight decay of AdamW", 0.0, least=0)
    clip: float = setting("training", "norm that gradients are clipped to", 1.0, positive=True)
    ce_weight: float = setting("training", "weight of the cross-entropy to the text's own tokens", 0.1, least=0)
    l1_weight: float = setting("training", "weight of the distance to the target's distribution", 0.9, least=0)
    confidence_weight: float = setting("training", "weight of the confidence head's error", 1.0, least=0)
    gamma: float | None = setting(
        "training", "slot k of a block counts exp(-k / gamma); all the same if not given", None
    )
    seed: int = setting("data", "seed of the initial weights, the order of samples and the anchors", 42, least=0)
    shape: str = setting(
        "data", "rows padded to S, or to the longest of their batch", "longest", choices=("longest", "full")
    )
    window_shards: int | None = setting("data", "shuffle within windows of so many shards, for slow storage", None)
    min_supervised: int = setting("data", "leave out samples with fewer supervised tokens", 2, least=0)
    validation_fraction: float = setting("data", "share of the samples that are kept for validation, by content", 0.0)
    validate_every: int = setting(
        "training", "steps between validations, the first before any step; 0 validates at the end only", 0, least=0
    )
    checkpoint_every: int = setting("recovery", "steps between checkpoints; 0 makes one at the end only", 0, least=0)
    keep_checkpoints: int = setting("recovery", "newest checkpoints to keep", 2, least=1)
    resume: bool = setting("recovery", "go on from the newest checkpoint in --output-dir", False)
    resume_from: str | None = setting(
        "recovery", "go on from this checkpoint, step-00000040 say; later ones are kept under other names", None
    )
    device: str = setting("advanced", "where the draft trains: cuda where there is one, else cpu", "", metavar="DEVICE")
    dtype: str = setting(
        "advanced",
        "what is computed in; weights are fp32; auto is bf16 on CUDA, else fp32",
        "auto",
        choices=("auto", "bf16", "fp32"),
    )
    threads: int = setting("advanced", "threads that read the store", 8, least=1)
    prefetch_bytes: int = setting(
        "advanced", "bytes of batches that are read ahead, one batch at least", 64 * 1024 * 1024, least=1
    )
    log_every: int = setting("training", "steps between lines of metrics", 10, least=1)
    tensorboard: bool = setting("training", "write metrics for TensorBoard too", False)
    log_level: str = setting(
        "advanced", "least level of log messages", "INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR")
    )

    live: PrecomputeConfig | None = field(default=None, compare=False)
    """The settings that ``online`` names; no setting."""

    def check(self) -> None:
        """Raise ValueError naming the first setting that cannot be."""
        if (self.store is None) == (self.online is None):
            raise ValueError("give either --store, to train from it, or --online, to run a target live")
        check_settings(self)
        twice = sorted({layer for layer in self.layers if self.layers.count(layer) > 1})
        if twice:
            raise ValueError(f"layers name {twice[0]} more than once: give each captured layer once")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation-fraction must be at least 0 and below 1, got {self.validation_fraction}")

    @property
    def tokens_dir(self) -> Path:
        """Where an online training keeps its tokens."""
        return Path(self.output_dir) / "tokens"

    @property
    def resolved_device(self) -> torch.device:
        """The device to train on; ValueError when there is none of that name."""
        from dspark_store.target.device import device_named

        return device_named(self.device)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What matrices are multiplied in."""
        import torch

        dtype = ("bf16" if self.resolved_device.type == "cuda" else "fp32") if self.dtype == "auto" else self.dtype
        return torch.bfloat16 if dtype == "bf16" else torch.float32

    @property
    def loss_weights(self) -> LossWeights:
        """The weights of the loss's terms."""
        from dspark_store.draft.loss import LossWeights

        return LossWeights(self.ce_weight, self.l1_weight, 0.0 if self.no_confidence else self.confidence_weight)
