"""The settings of a training: one frozen dataclass that says what is known, what is the default, and what cannot be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_store.draft.settings import MARKOV_KINDS
from dspark_store.precompute.settings import PrecomputeConfig
from dspark_store.settings import flag, setting

if TYPE_CHECKING:
    import torch

    from dspark_store.draft.loss import LossWeights

_AT_LEAST_ONE = (
    *("batch_size", "accumulate", "epochs", "max_steps", "num_anchors", "draft_layers", "block_size", "markov_rank"),
    *("log_every", "threads", "prefetch_bytes", "keep_checkpoints"),
)
_NOT_NEGATIVE = (
    *("learning_rate", "weight_decay", "min_lr_ratio", "ce_weight", "l1_weight", "confidence_weight"),
    *("checkpoint_every", "validate_every", "min_supervised", "seed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything a training is told. The names are the flags' names with underscores."""

    output_dir: str = setting("where checkpoints and metrics are written", group="training")
    mask_token_id: int = setting(
        "the token that stands in a block's empty slots; one that texts do not have", type=int, group="draft"
    )
    store: str | None = setting("the store to train from", None, group="data")
    online: str | None = setting(
        "in place of a store: the YAML file of a precompute, whose target is run live", None, group="data"
    )
    target_model: str | None = setting(
        "the target that the store must be of; its configuration is compared", None, group="data"
    )
    seq_length: int | None = setting("the sequence length that the store must have", None, type=int, group="data")
    layers: tuple[int, ...] = setting(
        "captured layers to train from, by id; all if not given", (), nargs="+", type=int, group="data"
    )
    allow_reduced_depth: bool = setting(
        "train from the states of a target that was cut to its first layers", False, group="data"
    )
    draft_layers: int = setting("layers of the draft", 5, group="draft")
    block_size: int = setting("K, the tokens that a draft proposes at once", 7, group="draft")
    intermediate_size: int | None = setting(
        "width of the draft's MLPs; the target's if not given", None, type=int, group="draft"
    )
    markov: str = setting("the head that knows the token before", "vanilla", choices=MARKOV_KINDS, group="draft")
    markov_rank: int = setting("rank of the Markov head", 256, group="draft")
    no_confidence: bool = setting("train no confidence head", False, group="draft")
    num_anchors: int = setting("N, the blocks of a sample, at most", 512, group="draft")
    batch_size: int = setting("samples of a micro-batch, on each rank", 8, group="data")
    accumulate: int = setting("micro-batches of a step", 1, group="data")
    epochs: int = setting("times that the training samples are gone through", 1, group="training")
    max_steps: int | None = setting(
        "end after so many steps, and plan the learning rate for them", None, type=int, group="training"
    )
    learning_rate: float = setting("learning rate after the warm-up", 6e-4, group="training")
    warmup_ratio: float = setting(
        "share of the steps that warm up, at least 20 of them; 0 for none", 0.05, group="training"
    )
    min_lr_ratio: float = setting("what the cosine leaves of the learning rate in the end", 0.1, group="training")
    weight_decay: float = setting("weight decay of AdamW", 0.0, group="training")
    clip: float = setting("norm that gradients are clipped to", 1.0, group="training")
    ce_weight: float = setting("weight of the cross-entropy to the text's own tokens", 0.1, group="training")
    l1_weight: float = setting("weight of the distance to the target's distribution", 0.9, group="training")
    confidence_weight: float = setting("weight of the confidence head's error", 1.0, group="training")
    gamma: float | None = setting(
        "slot k of a block counts exp(-k / gamma); all the same if not given", None, type=float, group="training"
    )
    seed: int = setting("seed of the initial weights, the order of samples and the anchors", 42, group="data")
    shape: str = setting(
        "rows padded to S, or to the longest of their batch", "longest", choices=("longest", "full"), group="data"
    )
    window_shards: int | None = setting(
        "shuffle within windows of so many shards, for slow storage", None, type=int, group="data"
    )
    min_supervised: int = setting("leave out samples with fewer supervised tokens", 2, group="data")
    validation_fraction: float = setting(
        "share of the samples that are kept for validation, by content", 0.0, group="data"
    )
    validate_every: int = setting(
        "steps between validations, the first before any step; 0 validates at the end only", 0, group="training"
    )
    checkpoint_every: int = setting("steps between checkpoints; 0 makes one at the end only", 0, group="recovery")
    keep_checkpoints: int = setting("newest checkpoints to keep", 2, group="recovery")
    resume: bool = setting("go on from the newest checkpoint in --output-dir", False, group="recovery")
    resume_from: str | None = setting(
        "go on from this checkpoint, step-00000040 say; later ones are kept under other names", None, group="recovery"
    )
    device: str = setting(
        "where the draft trains: cuda where there is one, else cpu", "", metavar="DEVICE", group="advanced"
    )
    dtype: str = setting(
        "what is computed in; weights are fp32; auto is bf16 on CUDA, else fp32",
        "auto",
        choices=("auto", "bf16", "fp32"),
        group="advanced",
    )
    threads: int = setting("threads that read the store", 8, group="advanced")
    prefetch_bytes: int = setting(
        "bytes of batches that are read ahead, one batch at least", 64 * 1024 * 1024, group="advanced"
    )
    log_every: int = setting("steps between lines of metrics", 10, group="training")
    tensorboard: bool = setting("write metrics for TensorBoard too", False, group="training")
    log_level: str = setting(
        "least level of log messages", "INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"), group="advanced"
    )

    live: PrecomputeConfig | None = field(default=None, compare=False)
    """The settings that ``online`` names; no setting."""

    def check(self) -> None:
        """Raise ValueError naming the first setting that cannot be."""
        if (self.store is None) == (self.online is None):
            raise ValueError("give either --store, to train from it, or --online, to run a target live")
        for names, least in ((_AT_LEAST_ONE, 1), (_NOT_NEGATIVE, 0)):
            for name in names:
                value = getattr(self, name)
                if value is not None and value < least:
                    raise ValueError(f"--{flag(name)} must be >= {least}, got {value}")
        twice = sorted({layer for layer in self.layers if self.layers.count(layer) > 1})
        if twice:
            raise ValueError(f"layers name {twice[0]} more than once: give each captured layer once")
        if not 0 < self.clip < math.inf:
            raise ValueError(f"clip must be a finite number > 0, got {self.clip}")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation-fraction must be at least 0 and below 1, got {self.validation_fraction}")
        for known in fields(self):
            choices, value = known.metadata.get("choices"), getattr(self, known.name)
            if choices and value not in choices:
                raise ValueError(f"{flag(known.name)} must be one of {', '.join(choices)}, got {value!r}")

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
