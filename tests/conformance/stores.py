"""What every byte store must do; each store's tests subclass `StoreConformance`."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest

from shardflow.errors import AlreadyExistsError, NotFoundError, ShortReadError, StorageError
from shardflow.storage import ByteRange, ByteStore, open_store

CONTENT = bytes(range(256)) * 64


class StoreConformance:
    """Inherit, and give a fixture ``store`` that is empty and writable."""

    @pytest.fixture
    def filled(self, store: ByteStore) -> ByteStore:
        store.put_new("shards/a.tar", CONTENT)
        return store

    def test_an_object_reads_as_it_was_put(self, filled: ByteStore) -> None:
        assert filled.read("shards/a.tar") == CONTENT
        assert filled.size("shards/a.tar") == len(CONTENT)
        assert filled.map("shards/a.tar") == CONTENT

    def test_an_empty_object_is_an_object(self, store: ByteStore) -> None:
        store.put_new("empty", b"")
        assert store.read("empty") == b""
        assert store.size("empty") == 0
        assert store.map("empty").nbytes == 0
        store.read_ranges("empty", [ByteRange(0, 0)], [memoryview(bytearray())])

    def test_a_map_cannot_be_written_to(self, filled: ByteStore) -> None:
        assert filled.map("shards/a.tar").readonly

    def test_an_object_is_written_once(self, filled: ByteStore) -> None:
        with pytest.raises(AlreadyExistsError, match=r"a\.tar must be new"):
            filled.put_new("shards/a.tar", b"other")
        assert filled.read("shards/a.tar") == CONTENT

    @pytest.mark.parametrize("call", ["size", "read", "map"])
    def test_what_is_missing_is_not_found(self, filled: ByteStore, call: str) -> None:
        for path in ("nothing", "shards/nothing", "shards/a.tar/below"):
            with pytest.raises(NotFoundError, match=path):
                getattr(filled, call)(path)
        with pytest.raises(NotFoundError):
            filled.read_ranges("nothing", [ByteRange(0, 1)], [memoryview(bytearray(1))])

    @pytest.mark.parametrize(
        "spans",
        [
            pytest.param([(0, 16384)], id="all of it"),
            pytest.param([(5, 0), (7, 3)], id="an empty one"),
            pytest.param([(0, 10), (10, 10), (20, 1)], id="adjacent"),
            pytest.param([(0, 10), (522, 10), (1100, 7)], id="tar headers between"),
            pytest.param([(0, 10), (9000, 10)], id="far apart"),
            pytest.param([(9000, 10), (0, 10), (512, 3)], id="backwards"),
            pytest.param([(0, 100), (50, 100), (50, 100)], id="overlapping"),
            pytest.param([(at, 1) for at in range(0, 9000, 3)], id="more than one call takes"),
            pytest.param([(at, 2) for at in range(0, 9000, 2)], id="more than one call takes, adjacent"),
            pytest.param([], id="none"),
        ],
    )
    def test_ranges_fill_their_buffers(self, filled: ByteStore, spans: list[tuple[int, int]]) -> None:
        buffers = [bytearray(b"?" * num_bytes) for _, num_bytes in spans]
        filled.read_ranges(
            "shards/a.tar", [ByteRange(*span) for span in spans], [memoryview(b) for b in buffers]
        )
        assert buffers == [CONTENT[offset : offset + num_bytes] for offset, num_bytes in spans]

    def test_ranges_fill_parts_of_one_array(self, filled: ByteStore) -> None:
        slots = np.zeros((4, 32), "<i2")
        ranges = [ByteRange(64 * number, 64) for number in (3, 1, 2, 0)]
        filled.read_ranges("shards/a.tar", ranges, [slot.data for slot in slots])
        expected = np.frombuffer(CONTENT, "<i2", 128).reshape(4, 32)[[3, 1, 2, 0]]
        assert (slots == expected).all()

    @pytest.mark.parametrize("span", [(16383, 2), (16384, 1), (99999, 5), (0, 16385)])
    def test_a_range_past_the_end_is_a_short_read(self, filled: ByteStore, span: tuple[int, int]) -> None:
        ranges = [ByteRange(0, 4), ByteRange(*span)]
        buffers = [memoryview(bytearray(item.num_bytes)) for item in ranges]
        with pytest.raises(ShortReadError, match=r"a\.tar"):
            filled.read_ranges("shards/a.tar", ranges, buffers)

    @pytest.mark.parametrize(
        ("ranges", "buffers", "match"),
        [
            ([ByteRange(0, 2)], [], "one per range"),
            ([ByteRange(0, 2)], [memoryview(bytearray(3))], "2 bytes"),
            ([ByteRange(0, 2)], [memoryview(b"ab")], "readonly=True"),
            ([ByteRange(0, 2)], [memoryview(bytearray(4))[::2]], "contiguous"),
            ([ByteRange(-1, 2)], [memoryview(bytearray(2))], "negative"),
        ],
    )
    def test_ranges_that_do_not_fit_are_refused(
        self, filled: ByteStore, ranges: list[ByteRange], buffers: list[memoryview], match: str
    ) -> None:
        with pytest.raises(StorageError, match=match):
            filled.read_ranges("shards/a.tar", ranges, buffers)

    @pytest.mark.parametrize(
        "path",
        [
            "",
            "/etc/passwd",
            "../a",
            "a/../../b",
            "a//b",
            "a/",
            "./a",
            ".hidden",
            "a/.b",
            "a\0b",
            "a b",
            "-a",
            "a\n",
        ],
    )
    def test_a_path_cannot_leave_the_store(self, store: ByteStore, path: str) -> None:
        with pytest.raises(StorageError, match="relative"):
            store.read(path)
        with pytest.raises(StorageError, match="relative"):
            store.put_new(path, b"")

    def test_names_are_listed_sorted_below_a_prefix(self, store: ByteStore) -> None:
        for path in (
            "shards/b.tar",
            "shards/a.tar",
            "shards-2",
            "manifest-000001.json",
            "manifest-000002.json",
        ):
            store.put_new(path, b"")
        assert store.list("manifest-") == ["manifest-000001.json", "manifest-000002.json"]
        assert store.list("shards/") == ["shards/a.tar", "shards/b.tar"]
        assert store.list("shards") == ["shards-2", "shards/a.tar", "shards/b.tar"]
        assert store.list("nothing/here") == []
        assert len(store.list("")) == 5

    def test_it_crosses_a_process_boundary_as_its_place(self, filled: ByteStore) -> None:
        twin = pickle.loads(pickle.dumps(filled))
        assert twin.read("shards/a.tar") == CONTENT
        assert open_store(filled.url).read("shards/a.tar") == CONTENT

    def test_threads_read_at_once(self, store: ByteStore) -> None:
        contents = {f"o{number}": bytes([number]) * 5000 for number in range(12)}
        for path, content in contents.items():
            store.put_new(path, content)
        wrong: list[str] = []

        def read_all(start: int) -> None:
            for turn in range(60):
                path = f"o{(start + turn * 5) % 12}"
                buffer = bytearray(4000)
                store.read_ranges(path, [ByteRange(1000, 4000)], [memoryview(buffer)])
                if bytes(buffer) != contents[path][1000:]:
                    wrong.append(path)

        threads = [threading.Thread(target=read_all, args=(start,)) for start in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_one_of_many_writers_wins(self, store: ByteStore) -> None:
        outcomes: list[bytes | None] = []
        barrier = threading.Barrier(6)

        def put(content: bytes) -> None:
            barrier.wait()
            try:
                store.put_new("contended", content)
            except AlreadyExistsError:
                outcomes.append(None)
            else:
                outcomes.append(content)

        threads = [threading.Thread(target=put, args=(bytes([n]) * 3000,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [content for content in outcomes if content is not None]
        assert len(winners) == 1
        assert store.read("contended") == winners[0]
        assert store.list("") == ["contended"]
