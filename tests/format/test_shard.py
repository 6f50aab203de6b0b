"""One object: chunks in the order they came, a trailer that says what they are, an index that Zarr reads."""

import json
import random
import struct
from collections.abc import Buffer, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.format.codecs import EncodedChunk, plain_chain
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.grid import ShardGrid
from dspark_store.format.jsonvalue import canonical_json
from dspark_store.format.shard import ObjectLabel, ObjectRecord, ObjectTail, Place, ShardWriter, parse_label, read_tail

SLOTS = 6
PLACE = Place("target_hidden_states", 1, 5, 12)
LABEL = ObjectLabel("a-store", (PLACE,), 2, "digest-of-tokens", (1,))
ORDER = (3, 0, 4)
"""The slots that are written, in the order they come; the others are absent."""


@dataclass
class Memory:
    """An object in memory, written and then read."""

    data: bytes = b""
    committed: bool = False
    aborted: bool = False
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.data)

    def write(self, *parts: Buffer) -> None:
        self.data += b"".join(bytes(part) for part in parts)
        self.size = len(self.data)

    def finish(self) -> None: ...

    def commit(self) -> None:
        self.committed = True

    def abort(self) -> None:
        self.aborted = True

    def version(self) -> None:
        return None

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]

    def read_into(self, buffer: Buffer, offset: int) -> int:
        raise NotImplementedError

    def read_vector(self, buffers: Sequence[Buffer], offset: int) -> int:
        raise NotImplementedError

    def close(self) -> None: ...


def chunk(slot: int) -> EncodedChunk:
    payload = bytes([slot]) * (slot + 1)
    return EncodedChunk(payload, crc32c(payload))


def write(order: Sequence[int] = ORDER, label: ObjectLabel = LABEL) -> tuple[Memory, ObjectRecord]:
    memory = Memory()
    writer = ShardWriter(memory, SLOTS)
    for slot in order:
        writer.append(slot, chunk(slot))
    return memory, writer.finish(label)


def grid_of(slots: int) -> ShardGrid:
    return ShardGrid(slots, slots, 1, 1)


def tail_of(data: bytes) -> ObjectTail:
    return read_tail(Memory(data), grid_of(SLOTS))


def test_chunks_are_stored_in_the_order_they_come():
    memory, _ = write()
    stored = b"".join(bytes(chunk(slot).payload) + chunk(slot).crc_bytes() for slot in ORDER)
    assert memory.data.startswith(stored)


def test_a_chunk_is_written_when_it_comes():
    memory = Memory()
    ShardWriter(memory, SLOTS).append(2, chunk(2))
    assert len(memory.data) == chunk(2).nbytes
    assert not memory.committed


def test_the_index_is_zarrs():
    memory, _ = write()
    index = memory.data[-16 * SLOTS - 4 : -4]
    entries = list(struct.iter_unpack("<QQ", index))
    assert entries[3] == (0, 8)
    assert entries[0] == (8, 5)
    assert entries[1] == (2**64 - 1, 2**64 - 1)
    assert struct.unpack("<I", memory.data[-4:]) == (crc32c(index),)


@given(st.permutations(range(SLOTS)), st.integers(0, SLOTS))
def test_the_tail_says_what_was_written(order, count):
    memory, record = write(order[:count])
    tail = tail_of(memory.data)
    assert (tail.label, tail.record) == (LABEL, record)
    assert np.flatnonzero(tail.present).tolist() == sorted(order[:count])
    for slot in order[:count]:
        begin, end = tail.bounds[slot].tolist()
        stored = memory.read(begin, end - begin)
        plain_chain(1).check(memoryview(stored), tail.crcs.item(slot, 0))


def test_a_long_label_needs_a_second_read_and_comes_back():
    label = ObjectLabel("a-store", (PLACE, PLACE), 5000, "t", tuple(range(5000)))
    memory, record = write(label=label)
    tail = tail_of(memory.data)
    assert (tail.label, tail.record) == (label, record)


def test_the_record_is_the_objects_size_and_a_digest_that_follows_it():
    memory, record = write()
    assert record.nbytes == len(memory.data)
    assert write()[1] == record
    assert write(order=(0, 3, 4))[1].digest != record.digest


def test_a_slot_is_written_once():
    writer = ShardWriter(Memory(), SLOTS)
    writer.append(2, chunk(2))
    with pytest.raises(ValueError, match="slot 2 was written already"):
        writer.append(2, chunk(2))


def test_finishing_commits_and_aborting_does_not():
    memory, _ = write()
    assert (memory.committed, memory.aborted) == (True, False)
    dropped = Memory()
    ShardWriter(dropped, SLOTS).abort()
    assert (dropped.committed, dropped.aborted) == (False, True)


def test_a_cut_anywhere_is_damage():
    memory, _ = write()
    for cut in range(len(memory.data)):
        with pytest.raises(DamagedStoreError):
            tail_of(memory.data[:cut])


def test_bytes_before_or_behind_are_damage():
    memory, _ = write()
    for data in (b"x" + memory.data, memory.data + b"x", memory.data + b"\0" * 100):
        with pytest.raises(DamagedStoreError):
            tail_of(data)


def test_a_flip_in_the_tail_is_damage_or_another_record():
    memory, record = write()
    first = sum(chunk(slot).nbytes for slot in ORDER)
    for place in range(first, len(memory.data)):
        for bit in range(8):
            flipped = bytearray(memory.data)
            flipped[place] ^= 1 << bit
            try:
                assert tail_of(bytes(flipped)).record != record
            except DamagedStoreError:
                continue


def test_another_number_of_slots_is_damage():
    memory, _ = write()
    for slots in (SLOTS - 1, SLOTS + 1, 2 * SLOTS):
        with pytest.raises(DamagedStoreError):
            read_tail(Memory(memory.data), grid_of(slots))


def test_a_wrong_magic_is_a_missing_trailer():
    memory, _ = write()
    assert memory.data.count(b"DSPKTRLR") == 2
    end = memory.data.rindex(b"DSPKTRLR")
    with pytest.raises(DamagedStoreError, match="trailer is missing"):
        tail_of(memory.data[:end] + b"DSPKTRLX" + memory.data[end + 8 :])
    with pytest.raises(DamagedStoreError, match="trailer is malformed"):
        tail_of(memory.data.replace(b"DSPKTRLR", b"XSPKTRLR", 1))


def test_a_wrong_index_checksum_is_named():
    memory, _ = write()
    with pytest.raises(DamagedStoreError, match="shard index checksum is wrong"):
        tail_of(memory.data[:-1] + bytes([memory.data[-1] ^ 1]))


def test_an_index_that_does_not_cover_the_data_is_named():
    memory, _ = write()
    index = bytearray(memory.data[-16 * SLOTS - 4 : -4])
    struct.pack_into("<QQ", index, 16 * 3, 2**64 - 1, 2**64 - 1)
    forged = memory.data[: -16 * SLOTS - 4] + index + struct.pack("<I", crc32c(index))
    with pytest.raises(DamagedStoreError, match="does not cover"):
        tail_of(forged)


@pytest.mark.parametrize("length", [0, 23 + 4 * SLOTS, 2**31])
def test_a_trailer_that_cannot_be_so_long_is_named(length):
    memory, _ = write()
    end = len(memory.data) - 16 * SLOTS - 4 - 12
    with pytest.raises(DamagedStoreError, match=f"cannot have {length}"):
        tail_of(memory.data[:end] + struct.pack("<I", length) + memory.data[end + 4 :])


def test_an_empty_object_is_too_short():
    with pytest.raises(DamagedStoreError, match="object of 0 bytes is too short for its index of 6 chunks"):
        tail_of(b"")


def test_another_trailer_version_is_named():
    with pytest.raises(DamagedStoreError, match="trailer version 2 is unknown, expected 1"):
        parse_label(canonical_json({"version": 2}))


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b"\xff", b'{"version":1}', b'{"version":1,"places":[1]}'])
def test_a_malformed_header_is_damage(header):
    with pytest.raises(DamagedStoreError, match="malformed"):
        parse_label(header)


COUNTS = st.integers(0, 2**63 - 1)
LABELS = st.builds(
    ObjectLabel,
    st.text(),
    st.lists(st.builds(Place, st.text(), COUNTS, st.none() | st.integers(-1, 2**63 - 1), COUNTS)).map(tuple),
    st.just(2**63 - 1),
    st.text(),
    st.lists(st.integers(0, 2**63 - 2)).map(tuple),
)


@pytest.mark.parametrize(
    "field",
    [
        {"rows": -1},
        {"rows": True},
        {"rows": 2**63},
        {"rows": 1.0},
        {"nonfinite": [2]},
        {"nonfinite": "0"},
        {"nonfinite": [[0]]},
        {"store": 5},
        {"tokens": None},
        {"places": {}},
        {"places": [None]},
        {"places": [{"column": 1, "slot": 0, "layer_id": None, "shard": 0}]},
        {"places": [{"column": "a", "slot": -1, "layer_id": None, "shard": 0}]},
        {"places": [{"column": "a", "slot": 0, "layer_id": -2, "shard": 0}]},
        {"places": [{"column": "a", "slot": 0, "layer_id": None, "shard": "0"}]},
    ],
)
def test_a_header_with_a_value_of_another_type_or_range_is_damage(field):
    with pytest.raises(DamagedStoreError, match="malformed"):
        parse_label(canonical_json({**json.loads(LABEL.header()), **field}))


def index_of(*ranges: tuple[int, int]) -> bytes:
    """Return an object of 30 bytes of data whose first slots have these ranges, the checksum of its index right."""
    memory, _ = write()
    data, tail = memory.data[: -16 * SLOTS - 4], [*ranges, *[(2**64 - 1, 2**64 - 1)] * (SLOTS - len(ranges))]
    index = b"".join(struct.pack("<QQ", *entry) for entry in tail)
    return data + index + struct.pack("<I", crc32c(index))


DATA_BYTES = sum(slot + 5 for slot in ORDER)


def test_ranges_that_cover_the_data_are_accepted_in_any_order():
    tail = tail_of(index_of((8, DATA_BYTES - 8), (0, 8)))
    assert tail.bounds.tolist() == [[8, DATA_BYTES], [0, 8], *[[0, 0]] * 4]


@pytest.mark.parametrize(
    "ranges",
    [
        [(2**64 - 8, 8), (0, DATA_BYTES - 8)],
        [(8, 2**64 - 8), (0, DATA_BYTES + 8)],
        [(0, 2**63), (0, 2**63), (0, DATA_BYTES)],
        [(0, 8), (4, DATA_BYTES - 8)],
        [(0, 8), (0, DATA_BYTES - 8)],
        [(4, DATA_BYTES - 4)],
        [(0, DATA_BYTES), (DATA_BYTES, 0)],
        [(0, DATA_BYTES - 3), (DATA_BYTES - 3, 3)],
        [(0, DATA_BYTES), (2**64 - 1, 7)],
    ],
)
def test_ranges_that_wrap_overlap_or_leave_bytes_out_are_damage(ranges):
    with pytest.raises(DamagedStoreError, match="does not cover"):
        tail_of(index_of(*ranges))


NUMBERS = (0, 1, 3, 4, 5, 7, 8, DATA_BYTES - 1, DATA_BYTES, DATA_BYTES + 1, 2**31, 2**32, 2**63, 2**64 - 8, 2**64 - 1)


def test_whatever_a_tail_says_no_range_of_it_leaves_the_data():
    rng, accepted = random.Random(1), 0
    begin, end = DATA_BYTES, -16 * SLOTS - 4
    memory, _ = write()
    for _ in range(20_000):
        trailer, index = bytearray(memory.data[begin:end]), bytearray(memory.data[end:-4])
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(2 * SLOTS)
            near = rng.choice(NUMBERS) + rng.randrange(-2, 3) * rng.randrange(2)
            struct.pack_into("<Q", index, 8 * place, near % 2**64)
        if rng.randrange(4) == 0:
            trailer[rng.randrange(len(trailer))] ^= 1 << rng.randrange(8)
        forged = memory.data[:begin] + trailer + index + struct.pack("<I", crc32c(bytes(index)))
        try:
            tail = tail_of(forged)
        except DamagedStoreError:
            continue
        accepted += 1
        assert all(0 <= begin <= end <= DATA_BYTES for begin, end in tail.bounds.tolist())
        assert max(tail.label.nonfinite, default=-1) < tail.label.rows
    assert accepted


@given(LABELS)
def test_a_label_comes_back(label):
    assert parse_label(label.header()) == label


@pytest.mark.parametrize(
    ("recorded", "accepted"),
    [
        (Place("c", 1, 5, 2), True),
        (Place("c", 1, None, 2), True),
        (Place("c", 1, 6, 2), False),
        (Place("c", 0, 5, 2), False),
        (Place("c", 1, 5, 3), False),
        (Place("d", 1, 5, 2), False),
    ],
)
def test_a_place_accepts_itself_and_its_layer_unnamed(recorded, accepted):
    assert Place("c", 1, 5, 2).accepts(recorded) is accepted
    assert Place("c", 1, None, 2).accepts(Place("c", 1, 5, 2))
