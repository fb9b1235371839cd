"""Tars of all writers are indexed as webdataset groups them; what does not fit is refused with its place."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardflow.errors import ConfigError, FormatError, ManifestError, NotFoundError, StorageError
from shardflow.format import Dataset, encode_array, verify
from shardflow.format.contents.pictures import image_header, picture_size
from shardflow.format.facts.columns import open_columns
from shardflow.format.foreign.build import (
    ForeignSource,
    IndexOptions,
    IndexReport,
    index_tars,
)
from shardflow.format.foreign.scan import expand_braces, split_member
from shardflow.format.tar import END_OF_ARCHIVE, encode_member
from tests.foreign_tars import (
    gnu_tar,
    make_members,
    picture,
    python_tar,
    webdataset_groups,
    write_samples,
)

LONG = "a/" * 60 + "x" * 90


def _index(out: Path, *paths: Path, **policy: Any) -> IndexReport:
    options = IndexOptions(**policy)
    return index_tars([ForeignSource(place=str(path)) for path in paths], out, options)


def _samples(out: Path) -> list[tuple[str, dict[str, bytes]]]:
    dataset = Dataset.open(out)
    return [
        (dataset.original_key(row), dataset.read_fields(row)) for row in range(dataset.samples.num_samples)
    ]


def _zoo(tmp_path: Path, writer: str) -> list[Path]:
    numbered = [make_members(range(first, first + 7)) for first in (0, 7, 14)]
    paths = [tmp_path / f"{writer}-{number}.tar" for number in range(3)]
    if writer == "webdataset":
        samples = [
            {"__key__": f"dir/{number}", "txt": f"text {number}", "json": {"n": number}, "cls": number}
            for number in range(20)
        ]
        write_samples(str(tmp_path / "webdataset-%d.tar"), samples, maxcount=7)
        return paths
    for path, members in zip(paths, numbered, strict=True):
        if writer.startswith("gnu"):
            options = {"gnu": ["--format=gnu"], "gnu-posix": ["--format=posix"], "gnu-v7": ["--format=v7"]}[
                writer
            ]
            gnu_tar(path, members, tmp_path / path.stem, *options)
        else:
            formats = {"ustar": tarfile.USTAR_FORMAT, "pygnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
            python_tar(path, members, formats[writer])
    return paths


@pytest.mark.parametrize("writer", ["webdataset", "gnu", "gnu-posix", "gnu-v7", "ustar", "pygnu", "pax"])
def test_samples_are_those_of_webdataset(tmp_path: Path, writer: str) -> None:
    paths = _zoo(tmp_path, writer)
    before = [path.read_bytes() for path in paths]
    report = _index(tmp_path / "out", *paths)
    expected = webdataset_groups(paths)
    assert _samples(tmp_path / "out") == expected
    assert (report.num_samples, report.num_shards) == (len(expected), 3)
    assert verify(tmp_path / "out").is_whole
    assert [path.read_bytes() for path in paths] == before


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_odd_names_are_cut_as_webdataset_does(tmp_path: Path, kind: int) -> None:
    names = [
        "./a.txt",
        "dir.v1/b.TXT",
        "dir.v1/b.seg.Png",
        f"{LONG}.txt",
        "\u00e4\u00f6.txt",
        "c d.txt",
        "README",
        "dir/noext",
        ".hidden.txt",
        "dir/.x.txt",
        "__meta__",
        "__info__.json",
        "__dir__/d.txt",
        "dir/__e__.txt",
        "f..txt",
    ]
    path = python_tar(tmp_path / "a.tar", [(name, name.encode()) for name in names[:-1]], kind)
    report = _index(tmp_path / "out", path)
    assert _samples(tmp_path / "out") == webdataset_groups([path])
    assert report.num_skipped == 5
    assert split_member(names[-1].encode()) == (b"f", ".txt")


def test_a_name_in_the_prefix_of_ustar_is_whole(tmp_path: Path) -> None:
    path = python_tar(tmp_path / "a.tar", [("p" * 80 + "/" + "n" * 70 + ".txt", b"1")])
    _index(tmp_path / "out", path)
    assert _samples(tmp_path / "out") == webdataset_groups([path])


def test_facts_are_what_plans_need(tmp_path: Path) -> None:
    path = python_tar(tmp_path / "a.tar", make_members(range(20)))
    _index(tmp_path / "out", path)
    dataset = Dataset.open(tmp_path / "out")
    for row in range(20):
        fields = dataset.read_fields(row)
        number = int(dataset.original_key(row)[-4:])
        shape = picture(number)[0].shape if number % 5 else (0, 0)
        facts = {
            name: int(dataset.samples.gather(name, row))
            for name in ("text_bytes", "num_slices", "rows", "columns")
        }
        assert facts == {
            "text_bytes": len(fields.get("txt", b"")),
            "num_slices": int(bool(number % 5)),
            "rows": shape[0],
            "columns": shape[1],
        }


def test_images_tell_their_size() -> None:
    for kind in ("png", "jpg"):
        pixels, data = picture(3, kind)
        assert picture_size(data) == pixels.shape[:2]
        for length in range(30):
            assert picture_size(data[:length]) in (None, pixels.shape[:2])
        grey, colour = (image_header(picture(number, kind)[1]) for number in (3, 4))
        assert grey is not None
        assert colour is not None
        assert (grey.is_gray, colour.is_gray) == (True, False)
    deep = image_header(encode_array("png16", np.full((4, 5), 40_000, np.uint16)))
    assert deep is not None
    assert not deep.is_gray
    assert picture_size(b"") is None
    assert picture_size(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff\xff\xff\xff\xff\xff\xff\xff") is None


# ---- what does not fit ---------------------------------------------------------------------------


INTERLEAVED = [("a.txt", b"1"), ("b.txt", b"2"), ("a.cls", b"3"), ("b.cls", b"4")]
DOUBLED = [("a.txt", b"1"), ("a.cls", b"2"), ("b.txt", b"3"), ("a.txt", b"4"), ("a.cls", b"5")]


def test_interleaved_members_are_refused_or_joined(tmp_path: Path) -> None:
    path = python_tar(tmp_path / "a.tar", INTERLEAVED)
    with pytest.raises(FormatError, match=r"train-000000, member 2.*--interleaved repair"):
        _index(tmp_path / "out", path)
    report = _index(tmp_path / "out", path, interleaved="repair")
    assert _samples(tmp_path / "out") == [
        ("a", {"txt": b"1", "cls": b"3"}),
        ("b", {"txt": b"2", "cls": b"4"}),
    ]
    assert report.num_repaired == 2
    assert verify(tmp_path / "out").is_whole


def test_a_key_twice_is_refused_or_renamed(tmp_path: Path) -> None:
    path = python_tar(tmp_path / "a.tar", DOUBLED)
    with pytest.raises(FormatError, match=r"train-000000, member 3.*--duplicate-keys rename"):
        _index(tmp_path / "out", path)
    report = _index(tmp_path / "out", path, duplicate_keys="rename")
    assert [key for key, _ in _samples(tmp_path / "out")] == ["a", "b", "a"]
    assert _samples(tmp_path / "out")[2][1] == {"txt": b"4", "cls": b"5"}
    assert report.num_renamed == 1
    # Twice in a row is two samples, not one with a member that wins.
    path = python_tar(tmp_path / "b.tar", [("a.txt", b"1"), ("a.txt", b"2")])
    with pytest.raises(FormatError, match="member 1"):
        _index(tmp_path / "twice", path)
    _index(tmp_path / "twice", path, duplicate_keys="rename")
    assert _samples(tmp_path / "twice") == [("a", {"txt": b"1"}), ("a", {"txt": b"2"})]


def test_a_key_in_two_shards_is_refused_or_renamed(tmp_path: Path) -> None:
    paths = [python_tar(tmp_path / f"{name}.tar", [("a.txt", name.encode())]) for name in "xyz"]
    with pytest.raises(FormatError, match=r"sample 0 of train-000001 in train-000000"):
        _index(tmp_path / "out", *paths)
    assert not any(path.is_file() for path in (tmp_path / "out").rglob("*"))
    _index(tmp_path / "out", *paths, duplicate_keys="rename")
    assert _samples(tmp_path / "out") == [("a", {"txt": b"x"}), ("a", {"txt": b"y"}), ("a", {"txt": b"z"})]
    keys = Dataset.open(tmp_path / "out").samples.column("sample_key")
    assert len({*keys.tolist()}) == 3


def test_a_key_of_many_shards_is_renamed_in_each_but_the_first(tmp_path: Path) -> None:
    names = ["a", "b", "c"], ["d"], ["c", "e", "a"], ["a"]
    members = [[(f"{name}.cls", b"%d" % row) for row, name in enumerate(some)] for some in names]
    paths = [python_tar(tmp_path / f"{number}.tar", some) for number, some in enumerate(members)]
    with pytest.raises(FormatError, match=r"sample 0 of train-000002 in train-000000"):
        _index(tmp_path / "out", *paths)
    assert not any(path.is_file() for path in (tmp_path / "out").rglob("*"))
    report = _index(tmp_path / "out", *paths, duplicate_keys="rename")
    assert (report.num_renamed, report.columns) == (3, ("members.cls",))
    dataset = Dataset.open(tmp_path / "out")
    assert [dataset.original_key(row) for row in range(8)] == [name for some in names for name in some]
    assert open_columns(dataset).stored("members.cls").values.tolist() == [0, 1, 2, 0, 0, 1, 2, 0]
    keys = dataset.samples.column("sample_key").tolist()
    assert [len({*keys[:4]}), len({*keys})] == [4, 8]
    # The index of a shard and the samples table know a renamed sample by the same key.
    assert verify(tmp_path / "out").is_whole


def test_a_sample_takes_a_few_bytes(tmp_path: Path) -> None:
    def peak(num_tars: int) -> int:
        paths = [tmp_path / f"{number}.tar" for number in range(num_tars)]
        for number, path in enumerate(paths):
            members = [encode_member(f"{number}k{row}.txt", b"x") for row in range(1_000)]
            path.write_bytes(b"".join(members) + END_OF_ARCHIVE)
        sources = [ForeignSource(place=str(path)) for path in paths]
        tracemalloc.start()
        index_tars(sources, tmp_path / f"out{num_tars}", num_threads=1)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    # As objects they took 1,200 bytes each.
    assert peak(10) - peak(2) < 8_000 * 60


def test_odd_fields_are_refused_or_skipped(tmp_path: Path) -> None:
    path = python_tar(
        tmp_path / "a.tar", [("a.txt", b"1"), ("a.Jane Doe", b"2"), ("a.", b"3"), ("f..txt", b"4")]
    )
    with pytest.raises(FormatError, match=r"train-000000, member 1.*--other-members skip") as caught:
        _index(tmp_path / "out", path)
    assert "Jane" not in str(caught.value)
    assert _index(tmp_path / "out", path, other_members="skip").num_skipped == 3
    assert _samples(tmp_path / "out") == [("a", {"txt": b"1"})]


def _special(kind: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        info = tarfile.TarInfo("Jane_Doe.txt")
        info.type, info.linkname = kind, "target"
        tar.addfile(info)
    return stream.getvalue()


GOOD = encode_member("a.txt", b"hello") + encode_member("b.txt", b"x" * 600)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        pytest.param(_special(tarfile.SYMTYPE), "a symbolic link .*member 0.*dereference", id="symlink"),
        pytest.param(_special(tarfile.LNKTYPE), "a hard link", id="hard link"),
        pytest.param(_special(tarfile.FIFOTYPE), "a special file", id="fifo"),
        pytest.param(_special(tarfile.GNUTYPE_SPARSE), "a sparse file", id="sparse"),
        pytest.param(gzip.compress(GOOD), "gzip; decompress", id="gzip"),
        pytest.param(b"BZh91AY&SY", "bzip2", id="bzip2"),
        pytest.param(b"", "empty file", id="nothing"),
        pytest.param(GOOD, "got the end of the file .member 2", id="cut at a member"),
        pytest.param(GOOD[:600], "member 0|member 1", id="cut in padding"),
        pytest.param(GOOD[:1200], "header.*end of the file .member 1", id="cut in a header"),
        pytest.param(GOOD[:1800], "payload of 600 bytes.*member 1", id="cut in a payload"),
        pytest.param(
            GOOD[:1024] + b"y" + GOOD[1025:] + END_OF_ARCHIVE, "checksum.*member 1", id="damaged header"
        ),
        pytest.param(GOOD + END_OF_ARCHIVE + GOOD + END_OF_ARCHIVE, "several tars", id="two tars"),
        pytest.param(b"no tar" * 200, "checksum|octal", id="no tar"),
        pytest.param(END_OF_ARCHIVE, "must hold samples", id="no members"),
    ],
)
def test_a_tar_that_cannot_be_trusted_is_refused(tmp_path: Path, data: bytes, match: str) -> None:
    path = tmp_path / "Jane_Doe.tar"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=match) as caught:
        _index(tmp_path / "out", path)
    assert "Jane" not in str(caught.value)
    with pytest.raises(ManifestError, match="found none"):
        Dataset.open(tmp_path / "out")


def test_every_cut_and_every_flipped_header_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    whole = GOOD + END_OF_ARCHIVE
    for length in range(0, len(GOOD), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError):
            _index(tmp_path / "out", path)
    for bit in range(0, 8 * 345, 31):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(FormatError):
            _index(tmp_path / "out", path)


def test_an_empty_tar_beside_others_is_an_empty_shard(tmp_path: Path) -> None:
    empty = tmp_path / "empty.tar"
    empty.write_bytes(bytes(10240))
    full = python_tar(tmp_path / "full.tar", make_members(range(3)))
    _index(tmp_path / "out", empty, full)
    assert _samples(tmp_path / "out") == webdataset_groups([full])
    assert verify(tmp_path / "out").is_whole


# ---- the dataset ---------------------------------------------------------------------------------


def test_sample_keys_say_nothing_of_foreign_keys(tmp_path: Path) -> None:
    path = python_tar(tmp_path / "a.tar", [("12345678.txt", b"1"), ("JaneDoe.txt", b"2")])
    _index(tmp_path / "out", path)
    dataset = Dataset.open(tmp_path / "out")
    keys = [dataset.samples.sample_key(row) for row in range(2)]
    assert all(len(key) == 32 and "12345678" not in key for key in keys)
    # Keys depend on nothing but the foreign key: another set of shards has the same ones.
    _index(tmp_path / "again", python_tar(tmp_path / "b.tar", [("JaneDoe.txt", b"2")]))
    assert Dataset.open(tmp_path / "again").samples.sample_key(0) == keys[1]


def test_the_result_is_the_same_for_any_number_of_threads(tmp_path: Path) -> None:
    paths = _zoo(tmp_path, "ustar")
    sources = [ForeignSource(place=str(path), split="ab"[number % 2]) for number, path in enumerate(paths)]
    reports = [index_tars(sources, tmp_path / f"out{n}", num_threads=n) for n in (1, 3)]
    assert reports[0] == reports[1]
    dataset = Dataset.open(tmp_path / "out1")
    assert {name: len(rows) for name, rows in dataset.splits.items()} == {"a": 14, "b": 7}


def test_it_goes_on_after_a_kill_and_never_twice(tmp_path: Path) -> None:
    path = python_tar(tmp_path / "a.tar", make_members(range(3)))
    report = _index(tmp_path / "out", path)
    (tmp_path / "out" / "manifest-000001.json").unlink()
    assert _index(tmp_path / "out", path) == report
    with pytest.raises(ConfigError, match="hold no dataset"):
        _index(tmp_path / "out", path)
    (tmp_path / "out" / "manifest-000001.json").unlink()
    with pytest.raises(ConfigError, match="of another dataset"):
        _index(tmp_path / "out", python_tar(tmp_path / "b.tar", make_members(range(4))))


def test_a_folder_moves_with_its_tars_and_a_moved_tar_is_named(tmp_path: Path) -> None:
    (tmp_path / "all" / "tars").mkdir(parents=True)
    path = python_tar(tmp_path / "all" / "tars" / "a.tar", make_members(range(3)))
    _index(tmp_path / "all" / "index", path)
    (tmp_path / "all").rename(tmp_path / "moved")
    assert len(_samples(tmp_path / "moved" / "index")) == 3
    # A tar at the shard's own path counts first: a copy is a dataset by itself.
    (tmp_path / "moved" / "tars" / "a.tar").rename(
        tmp_path / "moved" / "index" / "shards" / "train-000000.tar"
    )
    assert len(_samples(tmp_path / "moved" / "index")) == 3
    (tmp_path / "moved" / "index" / "shards" / "train-000000.tar").unlink()
    with pytest.raises(NotFoundError, match=r"train-000000\.tar must lie in the dataset or where"):
        _samples(tmp_path / "moved" / "index")


def test_every_damaged_byte_of_a_foreign_shard_is_found(tmp_path: Path) -> None:
    path = python_tar(tmp_path / "a.tar", make_members(range(2)))
    _index(tmp_path / "out", path)
    whole = path.read_bytes()
    for offset in range(0, len(whole), 211):
        damaged = bytearray(whole)
        damaged[offset] ^= 1
        path.write_bytes(damaged)
        (damage,) = verify(tmp_path / "out").damages
        assert damage.path == "shards/train-000000.tar"
    path.write_bytes(whole[:-512])
    assert "bytes instead of" in verify(tmp_path / "out").damages[0].problem


def test_a_missing_tar_is_told_without_its_name(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="the tar of train-000000 must be readable") as caught:
        _index(tmp_path / "out", tmp_path / "Jane_Doe.tar")
    assert "Jane" not in str(caught.value)


# ---- patterns ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("{a,b}-{0..1}", ["a-0", "a-1", "b-0", "b-1"]),
        ("{2..0}", ["2", "1", "0"]),
        ("{9..10}", ["9", "10"]),
    ],
)
def test_braces_expand(pattern: str, expected: list[str]) -> None:
    braceexpand = pytest.importorskip("braceexpand").braceexpand
    assert list(expand_braces(pattern)) == expected == list(braceexpand(pattern))


@pytest.mark.parametrize("pattern", ["a{", "a}", "{a}", "{{0..1},2}", "{0..99999999}"])
def test_other_braces_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="pattern"):
        list(expand_braces(pattern))


def test_nothing_and_the_same_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        _index(tmp_path / "out")
    with pytest.raises(ConfigError, match="twice"):
        _index(tmp_path / "out", tmp_path / "a.tar", tmp_path / "a.tar")
