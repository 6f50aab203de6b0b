"""States as int8 counts of a power-of-two step per token and layer: the arithmetic, the same bits on every machine.

A token's state in one layer becomes a *code*, W = H + M + 1 bytes: a count per feature, a high byte for each of the M
channels that often overflow a count, and the complement of the step's exponent. docs/format.md specifies the rule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from dspark_store.format.jsonvalue import JsonFields, JsonValue

if TYPE_CHECKING:  # imported where it is used: commands that only look at a store start in a third of the time
    import torch

AIMS = {"int8": 0.025, "int8-small": 0.05}
"""Mean relative error of a token that the offsets are calibrated to, by the name of the stored dtype."""
SAMPLE_TOKENS = 8192
"""About so many tokens of a store are looked at to calibrate it."""
MOST_WIDTH = 65_536
"""Channels of a state, at most: sums of their exponents are exact in float32."""
_MOST_HIGH = 8
_OFFSETS = range(-160, 65)
_UNSEEN = -16
"""The offset of a layer of which no token is seen."""
_LEAST_EXPONENT, _MOST_EXPONENT = -127, 126
_TOO_LARGE, _MAGNITUDE = 0x7F00, 0x7FFF
_FILL = -128
_BLOCK_VALUES = 32_000
"""Values that are worked on at a time: they stay in a core's cache, and torch starts no threads for them."""


def high_channels(hidden_size: int) -> int:
    """Return M, how many channels have a high byte."""
    return min(_MOST_HIGH, hidden_size)


def code_width(hidden_size: int) -> int:
    """Return W, the bytes of a code."""
    return hidden_size + high_channels(hidden_size) + 1


@dataclass(frozen=True, slots=True)
class LayerScale:
    """How one layer's tokens get their steps.

    ``offset`` is added to the mean exponent of a token, in sixteenths of an octave; ``high_channels`` are the M
    channels with a high byte, ascending. On the sample that they were found on, ``error`` was the mean relative error
    of a token, and ``widened`` the share of tokens whose step was widened so that nothing overflows.
    """

    offset: int
    high_channels: tuple[int, ...]
    error: float
    widened: float

    def to_json(self) -> dict[str, JsonValue]:
        """Return this as an entry of the attribute ``calibration``."""
        return {**asdict(self), "high_channels": list(self.high_channels)}

    @classmethod
    def from_json(cls, fields: JsonFields, hidden_size: int) -> LayerScale:
        """Read an entry back; ValueError when it is none of a layer of ``hidden_size`` channels."""
        channels = fields.counts("high_channels", 0, hidden_size - 1)
        if len(channels) != high_channels(hidden_size) or list(channels) != sorted(set(channels)):
            raise ValueError(f"{fields.where}: high_channels are {list(channels)}, expected M rising numbers")
        offset = fields.count("offset", _OFFSETS.start, _OFFSETS.stop)
        return cls(offset, channels, fields.number("error"), fields.number("widened"))


def quantise(states: torch.Tensor, scale: LayerScale) -> tuple[torch.Tensor, int]:
    """Encode the states of a layer's tokens.

    Args:
        states: (tokens, H) of any float dtype, on the CPU; they are rounded to bfloat16 first.
        scale: the layer's.

    Returns:
        The codes (tokens, W) int8, and how many of the tokens had their step widened. A token with a value that is not
        finite, or is 2^127 and more, which might be rounded to infinity, is all fill.
    """
    import torch

    values = states.to(torch.bfloat16).contiguous()
    tokens, width = values.shape
    channels = torch.tensor(scale.high_channels)
    codes = torch.empty((tokens, code_width(width)), dtype=torch.int8)
    exponents, ordinary = _exponents(values, scale.offset, channels)
    picked = values.index_select(1, channels)
    high = (picked.view(torch.int16) & _MAGNITUDE).amax(-1).int()
    least = torch.maximum(((ordinary + 1) >> 7) - 133, ((high + 1) >> 7) - 141)
    finite = torch.maximum(ordinary, high) < _TOO_LARGE
    wide = torch.maximum(exponents, least).clamp_(_LEAST_EXPONENT, _MOST_EXPONENT)
    factors = _powers(torch.float32)[128 - wide, None]
    parts = (torch.split(each, _block_tokens(values)) for each in (codes[:, :width], values, factors))
    for part, stored, factor in zip(*parts, strict=True):
        part.copy_(stored.float().mul_(factor).round_())
    counts = picked.float().mul_(factors).round_()
    upper = ((counts + 127.0) / 255.0).floor_()
    codes[:, channels] = (counts - 255.0 * upper).to(torch.int8)
    codes[:, width:-1] = upper
    codes[:, -1] = ~wide
    if not bool(finite.all()):
        codes[~finite] = _FILL
    return codes, int(((wide > exponents) & finite).sum())


def _exponents(values: torch.Tensor, offset: int, channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exponent of each token's step before it is widened, and the bits of its largest ordinary magnitude."""
    import torch

    step, words = _block_tokens(values), values.view(torch.int16)
    sums, (largest, least) = torch.empty(len(words)), torch.empty((2, len(words)), dtype=torch.int16)
    for part, total, most, fewest in zip(
        *(torch.split(each, step) for each in (words, sums, largest, least)), strict=True
    ):
        bits = part & _MAGNITUDE
        torch.amin(bits, -1, out=fewest)
        torch.sum((bits >> 7).float(), -1, out=total)  # exact: whole numbers below 2^24
        torch.amax(bits.index_fill_(1, channels, 0), -1, out=most)
    counts = torch.full((len(words),), values.shape[1], dtype=torch.int32)
    zeros = least == 0
    if bool(zeros.any()):  # of few tokens
        counts[zeros] = (words[zeros] & _MAGNITUDE).count_nonzero(-1).int().clamp_(min=1)
    mean = torch.div(16 * sums.int() + offset * counts, 16 * counts, rounding_mode="floor") - 127
    return mean.clamp_(_LEAST_EXPONENT, _MOST_EXPONENT), largest.int()


def _block_tokens(values: torch.Tensor) -> int:
    return max(1, _BLOCK_VALUES // values.shape[-1])


@lru_cache(maxsize=8)
def _powers(dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Return 2^-128 to 2^127, (256,)."""
    import numpy as np
    import torch

    return torch.from_numpy(np.ldexp(1.0, np.arange(-128, 128))).to(dtype=dtype, device=device)


def split_codes(codes: torch.Tensor, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the counts (..., H) and high bytes (..., M) of codes, as views, and the exponents (...) of their steps.

    Codes (..., W) are of one layer; flat ones, (..., K*W), get an axis of layers before the last: (..., K, H).
    """
    width = code_width(hidden_size)
    parts = codes if codes.shape[-1] == width else codes.view(*codes.shape[:-1], -1, width)
    return parts[..., :hidden_size], parts[..., hidden_size:-1], ~parts[..., -1]


def dequantise(codes: torch.Tensor, channels: Sequence[int], out: torch.Tensor) -> None:
    """Decode the codes of one layer into ``out``.

    Args:
        codes: (..., W) int8.
        channels: the layer's M high channels.
        out: (..., H) of a float dtype, on the device of the codes. Every value is exact in bfloat16 and float32; fill
            becomes minus infinity.
    """
    import torch

    if out.dtype == torch.float16:  # whose powers of two do not reach far enough
        exact = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        dequantise(codes, channels, exact)
        out.copy_(exact)
        return
    width, where = out.shape[-1], torch.tensor(channels, device=out.device)
    factors = _powers(out.dtype, out.device)[127 - codes[..., -1:].int()]
    counts = codes.index_select(-1, where).float() + 255.0 * codes[..., width:-1].float()
    step = _block_tokens(out) if out.ndim == 2 and out.device.type == "cpu" else max(1, len(out))
    for part, counted, factor in zip(
        *(torch.split(each, step) for each in (out, codes[..., :width], factors)), strict=True
    ):
        part.copy_(counted).mul_(factor)
    out[..., where] = counts.to(out.dtype).mul_(factors)


def spread(costs: Sequence[int]) -> list[int]:
    """Return places of rows or batches, evenly spread, that together cost about ``SAMPLE_TOKENS``: their tokens."""
    return list(range(0, len(costs), max(1, round(sum(costs) / SAMPLE_TOKENS))))


def calibrate(rows: Sequence[torch.Tensor], hidden_size: int, aim: float) -> LayerScale:
    """Find a layer's scale on a sample of its states, rows of (tokens, H), for a mean relative error of ``aim``.

    The scale is the same for the same states, whoever finds it; tokens with a value that is not finite do not count.
    """
    import torch

    values = torch.cat([torch.empty(0, hidden_size, dtype=torch.bfloat16), *(row.to(torch.bfloat16) for row in rows)])
    values = values[(values.isfinite().all(-1)) & (values != 0).any(-1)]
    if not len(values):
        return LayerScale(_UNSEEN, tuple(range(high_channels(hidden_size))), 0.0, 0.0)
    exact = values.float()
    norms = exact.norm(dim=-1)
    no_channels = torch.empty(0, dtype=torch.int64)

    def steps(offset: int) -> torch.Tensor:
        return _powers(torch.float32)[_exponents(values, offset, no_channels)[0] + 128, None]

    @cache
    def error(offset: int) -> float:
        step = steps(offset)
        rounded = (exact / step).round_().mul_(step)
        return float((rounded.sub_(exact).norm(dim=-1) / norms).double().mean())

    at = bisect_right(_OFFSETS, aim, key=error)
    near = [offset for offset in (at - 1, at) if 0 <= offset < len(_OFFSETS)]
    offset = min((_OFFSETS[place] for place in near), key=lambda found: abs(error(found) - aim))
    counts = (exact / steps(offset)).abs_() / 127.5
    overflow = (counts - 1.0).clamp_(min=0.0).double().sum(0) + 1e-6 * counts.amax(0)  # then the largest ones
    ranked = overflow.argsort(descending=True, stable=True)[: high_channels(hidden_size)]
    scale = LayerScale(offset, tuple(sorted(ranked.tolist())), 0.0, 0.0)
    codes, widened = quantise(values, scale)
    decoded = torch.empty_like(exact)
    dequantise(codes, scale.high_channels, decoded)
    found = float((decoded.sub_(exact).norm(dim=-1) / norms).double().mean())
    return LayerScale(offset, scale.high_channels, round(found, 6), round(widened / len(values), 6))
