"""The options of a Megatron source: one flat set of values, as a configuration gives them."""

from dataclasses import dataclass, fields
from os import PathLike
from typing import Literal, get_args

from dspark_store.sources.megatron.windows import Rule, WindowSettings
from dspark_store.sources.source import SourceError

type Mode = Literal["document", "window"]
type OverLong = Literal["truncate", "drop", "split"]

DEFAULT_SEED = 1234  # Megatron-LM's own

_IN_EVERY_MODE = ("mode", "skip_images", "loss_mask")


@dataclass(frozen=True, slots=True)
class MegatronOptions:
    """How a pair becomes samples.

    Attributes:
        mode: "document": one document per record. "window": windows of the shuffled and joined corpus.
        skip_images: leave the image sequences of a multimodal pair out, instead of refusing the pair.
        loss_mask: a second pair of the same lengths, whose values (0 or 1) are the loss mask; None: all ones.
        over_long: documents longer than the sequence length: "truncate", "drop" or "split".
        window: S; None: as many tokens as fit into a sample.
        seed: of the shuffles; None: the shuffle seed of the job, or else 1234.
        num_samples: windows asked for. There are as many epochs as that takes, and all their windows are read by the
            rule "megatron"; None: those of one epoch.
        rule: "megatron" or "hyper_parallel"; see `WindowSettings`.
        keep_partial: keep the last window of the corpus where it is shorter than the others.
        extra_token: build the indices so that each window has a token after it.
        carry_next_token: a sample is the window and the token after it, so that its last position has a next token.
        eod_token_id: do not supervise the token after this one (Megatron-LM's `eod_mask_loss`); None: supervise all.
        parts: weights for train, valid and test, such as "990,9,1"; None: all is read.
        part: which of them.
        cache: keep the indices on disk.
        cache_dir: where; None: `<prefix>.windows`, beside the pair.

    """

    mode: Mode = "document"
    skip_images: bool = False
    loss_mask: str | PathLike[str] | None = None
    over_long: OverLong = "truncate"
    window: int | None = None
    seed: int | None = None
    num_samples: int | None = None
    rule: Rule = "megatron"
    keep_partial: bool = False
    extra_token: bool = True
    carry_next_token: bool = True
    eod_token_id: int | None = None
    parts: str | None = None
    part: str = "train"
    cache: bool = True
    cache_dir: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Check the mode, and that no option of the other mode is set; SourceError names the option."""
        modes = get_args(Mode.__value__)
        if self.mode not in modes:
            raise SourceError(f"mode is {self.mode!r}; expected one of {', '.join(modes)}")
        for field in fields(self):
            of_mode = "document" if field.name == "over_long" else "window"
            value = getattr(self, field.name)
            if field.name not in _IN_EVERY_MODE and of_mode != self.mode and value != field.default:
                raise SourceError(
                    f"{field.name} is {value!r}: an option of the mode {of_mode!r}, but it is {self.mode!r}"
                )

    def window_settings(self, seq_length: int, shuffle_seed: int | None) -> WindowSettings:
        """Return what decides the indices.

        Raises:
            SourceError: a window does not fit into `seq_length` tokens, or a value cannot be.

        """
        carried = int(self.carries)
        window = self.window if self.window is not None else seq_length - carried
        if window + carried > seq_length:
            raise SourceError(
                f"a window of {window} tokens{' and the token after it' if carried else ''} "
                f"needs a sequence length of {window + carried}, and that is {seq_length}; raise it"
                + (", or set carry_next_token to false" if carried else " or make the window smaller")
            )
        seeds = (self.seed, shuffle_seed, DEFAULT_SEED)
        seed = next(seed for seed in seeds if seed is not None)
        return WindowSettings(window, seed, self.num_samples, self.rule, self.keep_partial, self.extra_token)

    @property
    def carries(self) -> bool:
        """Whether a sample ends with the token after its window."""
        return self.extra_token and self.carry_next_token
