"""The identity of a target's weights, by content.

A fingerprint is a digest over every weight file's size and a sample of its bytes: the first and last MiB, 4096 blocks
of 4 KiB at even distances, and in a safetensors file the first block of each tensor, so that no retrained tensor is
passed by however small it is. Hundreds of gigabytes are judged by reading some hundreds of megabytes.
"""

import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from transformers.utils.hub import cached_file

from dspark_store.target.source import Location, TargetSource, locate, one_line_errors

_EDGE_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 12
_BLOCKS = 4096
_READERS = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
# The order in which transformers looks for weights.
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def target_fingerprint(source: TargetSource) -> dict[str, str]:
    """Return {"weights": hex digest, "revision": hub commit or ""}.

    Copies of a model agree wherever they lie; a hub id stands for the files of its snapshot.

    Raises ValueError when the model, or weights in it, cannot be found.
    """
    location = locate(source)
    files = _weight_files(source, location)
    digest = blake2b(digest_size=32)
    with ThreadPoolExecutor(_READERS) as readers:
        for file_digest in readers.map(_file_digest, files):
            digest.update(file_digest)
    return {"weights": digest.hexdigest(), "revision": _revision(files[0], location)}


def _weight_files(source: TargetSource, location: Location) -> list[Path]:
    """The weight files that transformers would load, in the order of their names."""
    if location.gguf_file is not None:
        return [Path(location.name, location.gguf_file)]
    with one_line_errors(source, "weights"):
        for name in _WEIGHT_FILES:
            found = _resolve(location, name)
            if found is not None and name.endswith(".index.json"):
                return [_resolve_or_fail(location, shard) for shard in _shard_names(found)]
            if found is not None:
                return [found]
        raise ValueError(f"found none of {', '.join(_WEIGHT_FILES)}")


def _resolve(location: Location, name: str) -> Path | None:
    if location.directory is not None:
        path = location.directory / name
        return path if path.is_file() else None
    found = cached_file(
        location.name,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,  # without a network, what the cache holds counts
    )
    return None if found is None else Path(found)


def _resolve_or_fail(location: Location, name: str) -> Path:
    found = _resolve(location, name)
    if found is None:
        raise FileNotFoundError(f"its index names {name}, which is not there")
    return found


def _shard_names(index: Path) -> list[str]:
    return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))


def _revision(weight_file: Path, location: Location) -> str:
    """A hub snapshot lies in `snapshots/<commit>/`."""
    if location.directory is None and weight_file.parent.parent.name == "snapshots":
        return weight_file.parent.name
    return ""


def _file_digest(path: Path) -> bytes:
    digest = blake2b(digest_size=32)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        digest.update(struct.pack("<Q", size))
        for start, length in _sampled_ranges(descriptor, size, path.suffix == ".safetensors"):
            digest.update(os.pread(descriptor, length, start))
    finally:
        os.close(descriptor)
    return digest.digest()


def _sampled_ranges(descriptor: int, size: int, is_safetensors: bool) -> Iterator[tuple[int, int]]:
    """Ranges (start, length) in bytes; the whole of a file no larger than the sample would be."""
    if size <= 2 * _EDGE_BYTES + _BLOCKS * _BLOCK_BYTES:
        yield from ((start, _EDGE_BYTES) for start in range(0, size, _EDGE_BYTES))
        return
    yield 0, _EDGE_BYTES
    yield from ((index * (size - _BLOCK_BYTES) // (_BLOCKS - 1), _BLOCK_BYTES) for index in range(_BLOCKS))
    if is_safetensors:
        yield from ((start, _BLOCK_BYTES) for start in _tensor_starts(descriptor))
    yield size - _EDGE_BYTES, _EDGE_BYTES


def _tensor_starts(descriptor: int) -> list[int]:
    """Offsets of the tensors of a safetensors file: 8 bytes of header length, a JSON header, then the data."""
    (header_bytes,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
    if header_bytes > _MAX_HEADER_BYTES:
        raise ValueError(f"a safetensors header of {header_bytes} bytes is not valid: the file is damaged")
    header = json.loads(os.pread(descriptor, header_bytes, 8))
    return sorted(
        8 + header_bytes + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"
    )
