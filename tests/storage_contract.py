"""What every storage must do. A backend passes by subclassing with a fixture ``storage`` that gives an empty one."""

import os
import threading
from collections.abc import Callable

import pytest

from dspark_store.format.damage import IrregularObjectError
from dspark_store.format.storage import Storage


class StorageContract:
    """The contract of `Storage`, `ObjectReader` and `ObjectWriter`."""

    @pytest.fixture
    def storage(self) -> Storage:
        raise NotImplementedError("a subclass gives the storage under test")

    def test_it_is_a_storage(self, storage: Storage) -> None:
        assert isinstance(storage, Storage)

    def test_what_was_put_is_read(self, storage: Storage) -> None:
        storage.put("a/b/c.0", b"bytes")
        assert storage.read("a/b/c.0") == b"bytes"

    def test_an_empty_object_is_an_object(self, storage: Storage) -> None:
        storage.put("a", b"")
        assert storage.exists("a")
        assert storage.read("a") == b""

    def test_put_replaces(self, storage: Storage) -> None:
        storage.put("a", b"a longer old one")
        storage.put("a", b"new")
        assert storage.read("a") == b"new"

    def test_reading_what_is_not_there_is_an_error(self, storage: Storage) -> None:
        with pytest.raises(FileNotFoundError):
            storage.read("a/b")

    def test_opening_what_is_not_there_is_an_error(self, storage: Storage) -> None:
        with pytest.raises(FileNotFoundError):
            storage.open("a/b")

    def test_existence_is_told(self, storage: Storage) -> None:
        storage.put("a/b", b"x")
        assert storage.exists("a/b")
        assert not storage.exists("a/c")

    def test_a_directory_is_no_object(self, storage: Storage) -> None:
        storage.put("a/b", b"x")
        assert not storage.exists("a")

    def test_a_listing_is_sorted_and_of_one_directory(self, storage: Storage) -> None:
        for key in ("d/c.10", "d/c.2", "d/c.1", "d/deeper/c.3", "e/c.4"):
            storage.put(key, b"x")
        assert storage.list("d") == ["c.1", "c.10", "c.2"]

    def test_the_listing_of_no_directory_is_empty(self, storage: Storage) -> None:
        assert storage.list("d") == []

    def test_the_listing_of_an_object_is_empty(self, storage: Storage) -> None:
        storage.put("d", b"x")
        assert storage.list("d") == []

    def test_put_new_writes(self, storage: Storage) -> None:
        storage.put_new("a/b", b"first")
        assert storage.read("a/b") == b"first"

    def test_put_new_never_replaces(self, storage: Storage) -> None:
        storage.put_new("a", b"first")
        with pytest.raises(FileExistsError):
            storage.put_new("a", b"second")
        assert storage.read("a") == b"first"
        assert storage.list("") == ["a"]

    def test_of_many_put_new_one_wins(self, storage: Storage) -> None:
        start = threading.Barrier(8)
        outcomes: list[int | None] = []

        def commit(number: int) -> None:
            start.wait()
            try:
                storage.put_new("row", str(number).encode() * 1000)
                outcomes.append(number)
            except FileExistsError:
                outcomes.append(None)

        threads = [threading.Thread(target=commit, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [number for number in outcomes if number is not None]
        assert len(outcomes) == 8
        assert storage.read("row") == str(winner).encode() * 1000

    def test_a_piecewise_object_is_its_pieces(self, storage: Storage) -> None:
        writer = storage.create("a/b")
        for piece in (b"one", memoryview(b"two"), bytearray(b"three")):
            writer.write(piece)
        writer.commit()
        assert storage.read("a/b") == b"onetwothree"

    def test_a_piecewise_object_is_invisible_until_its_commit(self, storage: Storage) -> None:
        writer = storage.create("a/b")
        writer.write(b"half")
        assert not storage.exists("a/b")
        assert storage.list("a") == []
        writer.commit()
        assert storage.list("a") == ["b"]

    def test_the_old_object_stands_until_the_commit(self, storage: Storage) -> None:
        storage.put("a", b"old")
        writer = storage.create("a")
        writer.write(b"new")
        assert storage.read("a") == b"old"
        writer.commit()
        assert storage.read("a") == b"new"

    def test_an_aborted_object_never_was(self, storage: Storage) -> None:
        writer = storage.create("a/b")
        writer.write(b"half")
        writer.abort()
        assert not storage.exists("a/b")
        assert storage.sweep() == 0

    def test_aborting_twice_or_after_the_commit_is_harmless(self, storage: Storage) -> None:
        writer = storage.create("a")
        writer.write(b"x")
        writer.commit()
        writer.abort()
        writer.abort()
        assert storage.read("a") == b"x"

    def test_ranges_are_read(self, storage: Storage) -> None:
        storage.put("a", bytes(range(100)))
        reader = storage.open("a")
        assert reader.size == 100
        assert reader.read(10, 5) == bytes(range(10, 15))
        reader.close()

    def test_a_range_ends_with_the_object(self, storage: Storage) -> None:
        storage.put("a", b"0123456789")
        reader = storage.open("a")
        assert reader.read(8, 10) == b"89"
        assert reader.read(10, 10) == b""
        assert reader.read(3, 0) == b""
        reader.close()

    def test_an_object_that_was_replaced_has_another_version(self, storage: Storage) -> None:
        storage.put("a", b"old")
        reader = storage.open("a")
        version = reader.version()
        assert reader.version() == version
        storage.put("a", b"new")
        assert version is None or storage.open("a").version() != version
        reader.close()

    def test_a_range_is_read_into_a_buffer(self, storage: Storage) -> None:
        storage.put("a", b"0123456789")
        reader, buffer = storage.open("a"), bytearray(4)
        assert reader.read_into(buffer, 3) == 4
        assert buffer == b"3456"
        assert reader.read_into(buffer, 8) == 2
        assert buffer == b"8956"
        reader.close()

    def test_a_range_is_read_into_several_buffers(self, storage: Storage) -> None:
        storage.put("a", b"0123456789")
        reader, buffers = storage.open("a"), [bytearray(3), bytearray(1), bytearray(2)]
        assert reader.read_vector(buffers, 2) == 6
        assert buffers == [b"234", b"5", b"67"]
        assert reader.read_vector(buffers, 8) == 2
        assert buffers[0] == b"894"
        reader.close()

    def test_more_buffers_than_one_system_call_takes_are_filled(self, storage: Storage) -> None:
        data = os.urandom(5000)
        storage.put("a", data)
        reader, buffers = storage.open("a"), [bytearray(1) for _ in data]
        assert reader.read_vector(buffers, 0) == len(data)
        assert b"".join(buffers) == data
        reader.close()

    def test_threads_share_a_reader(self, storage: Storage) -> None:
        data = os.urandom(64_000)
        storage.put("a", data)
        reader = storage.open("a")
        wrong: list[int] = []

        def read(first: int) -> None:
            wrong.extend(o for o in range(first, 64_000, 640) if reader.read(o, 64) != data[o : o + 64])

        threads = [threading.Thread(target=read, args=(first,)) for first in range(0, 640, 160)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reader.close()
        assert wrong == []

    def test_closing_a_reader_twice_is_harmless(self, storage: Storage) -> None:
        storage.put("a", b"x")
        reader = storage.open("a")
        reader.close()
        reader.close()

    def test_an_open_reader_keeps_the_object_that_it_opened(self, storage: Storage) -> None:
        storage.put("a", b"old")
        reader = storage.open("a")
        storage.put("a", b"new")
        assert reader.read(0, 3) == b"old"
        reader.close()

    def test_a_linked_object_is_the_same_bytes(self, storage: Storage) -> None:
        storage.put("a/b", b"shared")
        storage.link("a/b", "c/d")
        assert storage.read("c/d") == b"shared"
        assert storage.read("a/b") == b"shared"

    def test_replacing_one_of_two_linked_objects_leaves_the_other(self, storage: Storage) -> None:
        storage.put("a", b"shared")
        storage.link("a", "b")
        storage.put("a", b"changed")
        assert storage.read("b") == b"shared"

    def test_linking_replaces(self, storage: Storage) -> None:
        storage.put("a", b"source")
        storage.put("b", b"old")
        storage.link("a", "b")
        assert storage.read("b") == b"source"

    def test_linking_twice_is_harmless(self, storage: Storage) -> None:
        storage.put("a", b"source")
        storage.link("a", "b")
        storage.link("a", "b")
        assert storage.list("") == ["a", "b"]
        assert storage.sweep() == 0

    def test_linking_what_is_not_there_is_an_error(self, storage: Storage) -> None:
        with pytest.raises(FileNotFoundError):
            storage.link("a", "b")
        assert not storage.exists("b")

    def test_a_deleted_object_is_gone(self, storage: Storage) -> None:
        storage.put("a/b", b"x")
        storage.delete("a/b")
        assert not storage.exists("a/b")
        assert storage.list("a") == []

    def test_deleting_what_is_not_there_is_harmless(self, storage: Storage) -> None:
        storage.delete("a/b")

    def test_a_sweep_removes_what_was_never_committed(self, storage: Storage) -> None:
        storage.put("a/kept", b"x")
        interrupted = [storage.create("a/b"), storage.create("c/d")]
        assert storage.sweep() == 2
        assert storage.sweep() == 0
        assert storage.list("a") == ["kept"]
        for writer in interrupted:
            writer.abort()

    def test_free_space_is_told(self, storage: Storage) -> None:
        assert storage.free_bytes() > 0

    def test_an_object_of_at_most_the_limit_is_read_and_no_larger_one(self, storage: Storage) -> None:
        storage.put("a", b"12345")
        assert storage.read("a", 5) == b"12345"
        with pytest.raises(IrregularObjectError, match="object a has 5 bytes, expected at most 4"):
            storage.read("a", 4)

    @pytest.mark.parametrize("key", ["/etc/passwd", "../a", "a/../b", "a//b", "a/", "", ".", "./a", "a\0b"])
    def test_a_key_that_need_not_stay_in_the_store_is_refused(self, storage: Storage, key: str) -> None:
        storage.put("a/b", b"x")
        calls: list[Callable[[], object]] = [
            lambda: storage.open(key),
            lambda: storage.read(key),
            lambda: storage.exists(key),
            lambda: storage.put(key, b""),
            lambda: storage.put_new(key, b""),
            lambda: storage.create(key),
            lambda: storage.link(key, "c"),
            lambda: storage.link("a/b", key),
            lambda: storage.delete(key),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="is no key of a store"):
                call()
        assert storage.list("") == []
        assert storage.list("a") == ["b"]
