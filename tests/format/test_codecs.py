"""One contract for every chain: what goes in comes back bit by bit, and anything else is an error."""

import importlib.util
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.format.codecs import (
    CODEC_PRESETS,
    CodecChain,
    EncodedChunk,
    plain_chain,
    state_chain,
    token_chain,
)
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.dtypes import CACHE_DTYPES, CacheDtype
from tests.stores import bits, numbers

SHAPE = (16, 12)
EVERY_PRESET = pytest.mark.parametrize("preset", CODEC_PRESETS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", CACHE_DTYPES.values(), ids=CACHE_DTYPES)
BUFFERS = ("zeros", "numbers", "noise", "specials", "fill", "tail")


def buffer(kind: str, dtype: CacheDtype) -> np.ndarray:
    """Return a chunk of the stored dtype: smooth, random, or full of what floats find hard."""
    values = bits(numbers(1, SHAPE).to(dtype.torch_dtype)).view(dtype.bits).copy()
    exponent = {"bf16": 0x7F80, "fp16": 0x7C00, "fp32": 0x7F800000}[dtype.name]
    sign = 1 << (8 * dtype.itemsize - 1)
    if kind == "zeros":
        values[:] = 0
    elif kind == "noise":
        values[:] = np.random.default_rng(2).integers(0, 2 * sign, SHAPE, np.uint64)
    elif kind == "specials":
        infinities, nans = (exponent, exponent | sign), (exponent | 1, exponent | 5 | sign, 2 * sign - 1)
        values.reshape(-1)[:8] = [sign, 1, sign | 1, *infinities, *nans]
    elif kind == "fill":
        values[:] = dtype.fill_bits
    elif kind == "tail":
        values[5:] = dtype.fill_bits
    return values.view(dtype.stored)


def stored_bytes(chunk: EncodedChunk) -> bytearray:
    return bytearray(bytes(chunk.payload) + chunk.crc_bytes())


def decode(chain: CodecChain, stored: bytes | bytearray, like: np.ndarray, crc: int | None) -> np.ndarray:
    out = np.empty_like(like)
    chain.decode(memoryview(stored), out, crc=crc)
    return out


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one.view(np.uint8), other.view(np.uint8))


@EVERY_PRESET
@EVERY_DTYPE
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_chunk_comes_back_bit_by_bit(preset, dtype, kind):
    chain, chunk = state_chain(preset, dtype.itemsize), buffer(kind, dtype)
    encoded = chain.encode(chunk)
    assert encoded.nbytes == len(stored_bytes(encoded))
    assert same(decode(chain, stored_bytes(encoded), chunk, encoded.crc), chunk)
    assert same(decode(chain, stored_bytes(encoded), chunk, None), chunk)


@EVERY_PRESET
@EVERY_DTYPE
def test_a_flip_in_any_byte_of_a_chunk_is_found(preset, dtype):
    chain, chunk = state_chain(preset, dtype.itemsize), buffer("numbers", dtype)
    encoded = chain.encode(chunk)
    for place in range(encoded.nbytes):
        stored = stored_bytes(encoded)
        stored[place] ^= 1 << (place % 8)
        with pytest.raises(DamagedStoreError, match="checksum"):
            decode(chain, stored, chunk, encoded.crc)


@EVERY_PRESET
def test_another_chunk_with_a_right_checksum_of_its_own_is_found(preset):
    dtype = CACHE_DTYPES["bf16"]
    chain, chunk = state_chain(preset, 2), buffer("numbers", dtype)
    other = chain.encode(buffer("noise", dtype))
    with pytest.raises(DamagedStoreError, match="promised"):
        decode(chain, stored_bytes(other), chunk, chain.encode(chunk).crc)


@EVERY_PRESET
def test_a_chunk_of_another_size_does_not_decode(preset):
    dtype = CACHE_DTYPES["bf16"]
    chain, chunk = state_chain(preset, 2), buffer("numbers", dtype)
    short = chain.encode(np.ascontiguousarray(chunk[:-1]))
    with pytest.raises(DamagedStoreError, match="does not decode"):
        decode(chain, stored_bytes(short), chunk, short.crc)


@EVERY_PRESET
@given(cut=st.integers(0, 60))
def test_a_truncated_chunk_is_an_error_even_without_checksums(preset, cut):
    chain, chunk = state_chain(preset, 2), buffer("noise", CACHE_DTYPES["bf16"])
    stored = stored_bytes(chain.encode(chunk))[: cut + 4]
    with pytest.raises(DamagedStoreError, match="does not decode"):
        decode(chain, stored, chunk, None)


@EVERY_PRESET
def test_a_chunk_too_short_for_its_checksum_is_an_error(preset):
    chunk = buffer("zeros", CACHE_DTYPES["bf16"])
    with pytest.raises(DamagedStoreError):
        decode(state_chain(preset, 2), b"ab", chunk, 0)


@EVERY_PRESET
@pytest.mark.parametrize("stored_dtype", ["<i4", "u1"])
def test_token_chunks_come_back(preset, stored_dtype):
    chunk = (np.arange(40) % 7).astype(stored_dtype)
    chain = token_chain(preset, chunk.itemsize)
    encoded = chain.encode(chunk)
    assert same(decode(chain, stored_bytes(encoded), chunk, encoded.crc), chunk)


@pytest.mark.parametrize("preset", ["fast", "default"])
def test_a_chunk_of_many_blocks_has_the_same_bytes_on_every_thread(preset):
    chain = state_chain(preset, 2)
    chunk = np.random.default_rng(0).standard_normal(1_500_000, np.float32).view(np.uint16)
    there: set[bytes] = set()
    thread = threading.Thread(target=lambda: there.add(bytes(chain.encode(chunk).payload)))
    thread.start()
    here = {bytes(chain.encode(chunk).payload) for _ in range(5)}
    thread.join()
    assert len(here | there) == 1


@EVERY_PRESET
@EVERY_DTYPE
def test_every_chain_ends_in_a_checksum(preset, dtype):
    chains = (state_chain(preset, dtype.itemsize), token_chain(preset, 4), token_chain(preset, 1), plain_chain(8))
    assert all(chain.metadata()[-1] == {"name": "crc32c"} for chain in chains)


def test_the_default_chain_is_the_documented_one():
    blosc = {"typesize": 2, "cname": "zstd", "clevel": 1, "shuffle": "shuffle", "blocksize": 512 * 1024}
    assert state_chain("default", 2).metadata() == [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "blosc", "configuration": blosc},
        {"name": "crc32c"},
    ]


def test_a_plain_payload_is_a_view_of_the_chunk():
    chunk = np.zeros(4, "<u2")
    encoded = state_chain("none", 2).encode(chunk)
    chunk[0] = 258
    assert bytes(encoded.payload[:2]) == b"\x02\x01"


@EVERY_DTYPE
@pytest.mark.parametrize("shape", [(64, 96), (700, 576)])
def test_the_fill_behind_a_sample_costs_dense_next_to_nothing_and_numcodecs_decodes_it(dtype, shape):
    codec = pytest.importorskip("numcodecs.pcodec").PCodec(level=8)
    whole = bits(numbers(3, shape).to(dtype.torch_dtype)).view(dtype.stored)
    chunk, valid = whole.copy(), shape[0] // 3
    chunk[valid:].view(dtype.bits)[:] = dtype.fill_bits
    chain = state_chain("dense", dtype.itemsize)
    assert bytes(chain.encode(whole).payload) == codec.encode(whole)
    encoded = bytes(chain.encode(chunk).payload)
    assert len(encoded) <= len(codec.encode(np.ascontiguousarray(whole[:valid]))) + 64
    assert same(np.asarray(codec.decode(encoded)).reshape(shape), chunk)


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'gzip' is unknown; choose one of none, fast, default, dense"):
        state_chain("gzip", 2)


def test_dense_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'dspark-store\[dense\]'"):
        state_chain("dense", 2)
