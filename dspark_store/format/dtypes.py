"""How states of each cache dtype look on disk, and views between torch and the stored bits.

bfloat16 is stored as ``uint16`` bits, because no zarr-python release knows it and a single unknown array makes the
listing of its whole group fail. float16 and float32 are Zarr's own types. Every view here is zero-copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import numpy as np

if TYPE_CHECKING:  # imported where it is used: commands that only look at a store start in a third of the time
    import torch


@dataclass(frozen=True, slots=True)
class CacheDtype:
    """One dtype that states may be cached in.

    ``name`` is the command's (``bf16``), ``logical`` the attribute's (``bfloat16``), ``zarr_name`` the data type in
    ``zarr.json``, ``fill_value`` its JSON fill value: a NaN, which real data never holds. ``infinity_bits`` are the
    bits of positive infinity; every larger magnitude is a NaN.
    """

    name: str
    logical: str
    zarr_name: str
    bits: np.dtype
    fill_value: int | str
    fill_bits: int
    infinity_bits: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of tensors of these states."""
        import torch

        return cast(torch.dtype, getattr(torch, self.logical))

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return self.bits.itemsize

    @property
    def stored(self) -> np.dtype:
        """The numpy dtype that stock Zarr readers return."""
        return np.dtype(self.zarr_name).newbyteorder("<")


CACHE_DTYPES = MappingProxyType(
    {
        "bf16": CacheDtype("bf16", "bfloat16", "uint16", np.dtype("<u2"), 0xFFFF, 0xFFFF, 0x7F80),
        "fp16": CacheDtype("fp16", "float16", "float16", np.dtype("<u2"), "NaN", 0x7E00, 0x7C00),
        "fp32": CacheDtype("fp32", "float32", "float32", np.dtype("<u4"), "NaN", 0x7FC00000, 0x7F800000),
    }
)
"""The cache dtypes by the name that commands and manifests use."""
INT8 = CacheDtype("int8", "int8", "int8", np.dtype("u1"), -128, 0x80, 0)
"""The bytes of codes, in which states of a cache dtype may be stored: see `dspark_store.format.int8`."""


def cache_dtype(name: str) -> CacheDtype:
    """Return the cache dtype called ``name``; ValueError naming the known ones otherwise."""
    if name not in CACHE_DTYPES:
        raise ValueError(f"dtype {name!r} is not a cache dtype; choose one of {', '.join(CACHE_DTYPES)}")
    return CACHE_DTYPES[name]


def cache_dtype_of(torch_dtype: torch.dtype) -> CacheDtype:
    """Return the cache dtype that stores ``torch_dtype``; ValueError when there is none."""
    for candidate in CACHE_DTYPES.values():
        if candidate.torch_dtype is torch_dtype:
            return candidate
    raise ValueError(f"{torch_dtype} is not a cache dtype; choose one of {', '.join(CACHE_DTYPES)}")


def tensor_bits(states: torch.Tensor) -> np.ndarray:
    """View a CPU tensor of states or of codes as unsigned integers of the same width, without a copy."""
    import torch

    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[states.dtype.itemsize]
    return states.detach().view(signed).numpy().view(f"<u{states.dtype.itemsize}")


def all_finite(bits: np.ndarray, dtype: CacheDtype) -> bool:
    """Tell whether an array of stored bits holds no infinity and no NaN; a code that holds one is all fill.

    As signed integers the largest is the largest positive value, as unsigned ones the negative value of the largest
    magnitude: two maxima, three times as fast as masking the sign out, where torch's isfinite takes as long as
    compressing the same bfloat16 values.
    """
    if not bits.size:
        return True
    if dtype is INT8:
        return not bool((bits[..., -1] == INT8.fill_bits).any())
    sign = 1 << (8 * dtype.itemsize - 1)
    positive, any_sign = bits.view(f"<i{dtype.itemsize}").max(), bits.max()
    return int(positive) < dtype.infinity_bits and int(any_sign) < sign | dtype.infinity_bits


def round_mantissa(bits: np.ndarray, kept: int) -> None:
    """Round bf16 values, given as their bits, in place to ``kept`` of 7 mantissa bits: to nearest, ties to even.

    No finite value becomes infinite: above the largest number that has so few bits is that number. What is not finite
    stays as it is.
    """
    step = 1 << (7 - kept)
    magnitudes = bits & np.uint16(0x7FFF)
    odd = (magnitudes >> np.uint16(7 - kept)) & np.uint16(1)
    rounded = (magnitudes + (odd + np.uint16(step // 2 - 1))) & np.uint16(0x8000 - step)
    np.minimum(rounded, np.uint16(0x7F80 - step), out=rounded)
    np.copyto(bits, (bits & np.uint16(0x8000)) | rounded, where=magnitudes < 0x7F80)


def rounded_states(states: torch.Tensor, kept: int | None) -> torch.Tensor:
    """Return bf16 states on the CPU rounded by `round_mantissa`; the same tensor where ``kept`` is None."""
    if kept is not None:
        states = states.clone()
        round_mantissa(tensor_bits(states), kept)
    return states


def bits_tensor(bits: np.ndarray, torch_dtype: torch.dtype) -> torch.Tensor:
    """View an array of stored states (bits, float16 or float32) as a tensor of ``torch_dtype``, without a copy."""
    import torch

    return torch.from_numpy(bits.view(f"i{torch_dtype.itemsize}")).view(torch_dtype)
