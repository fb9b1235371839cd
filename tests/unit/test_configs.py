"""Settings: every mistake is named, nothing is ignored, what is written reads back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from shardflow.config import (
    Bounds,
    ByteSize,
    TypeKey,
    check_fields,
    dump_config,
    load_config,
    parse_byte_size,
)
from shardflow.errors import ConfigError

pytestmark = pytest.mark.fast


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    count: Annotated[int, Bounds(1, 10)] = 3
    mode: Literal["drop", "mask"] = "drop"
    rate: float = 0.5
    paths: tuple[Path, ...] = ()
    folder: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    name: str
    output: Path | None = None
    flag: bool = False
    size: Annotated[ByteSize, Bounds(1)] = 1024
    limit: Annotated[ByteSize, Bounds(1)] | None = None
    inner: Inner = field(default_factory=Inner)
    parts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbered:
    by_epoch: dict[Any, float]


def test_tables_by_number_are_written_with_their_numbers_as_keys(tmp_path: Path) -> None:
    path = _write(tmp_path, dump_config(Numbered(by_epoch={0: 1.0, 10: 2.5})))
    assert load_config(Numbered, path).by_epoch == {"0": 1.0, "10": 2.5}


@dataclass(frozen=True, kw_only=True, slots=True)
class Required:
    inner: Outer


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "expected"), [("count", "a number"), ("rate", "a number"), ("folder", "a pathlib.Path")]
)
def test_text_in_the_place_of_a_number_or_a_path_is_refused_in_code_too(name: str, expected: str) -> None:
    values: dict[str, Any] = {name: "7"}
    with pytest.raises(ConfigError, match=f"{name} must be {expected}, got text"):
        Inner(**values)


def test_values_tables_and_sizes_are_read(tmp_path: Path) -> None:
    text = """
    name = "a"
    output = "out"
    size = "512MiB"
    limit = "2kB"
    [inner]
    count = 7
    mode = "mask"
    rate = 2
    paths = ["x", "/abs"]
    [parts]
    train = 9
    """
    config = load_config(Outer, _write(tmp_path, text))
    assert config == Outer(
        name="a",
        output=tmp_path / "out",
        size=512 * 1024**2,
        limit=2000,
        inner=Inner(count=7, mode="mask", rate=2.0, paths=(tmp_path / "x", Path("/abs"))),
        parts={"train": 9},
    )
    assert isinstance(config.inner.rate, float)


def test_home_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load_config(Outer, _write(tmp_path, 'name="a"\noutput="~/x"')).output == Path("/home/somebody/x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('name = "a"\nouptut = "x"', "'ouptut' (job.toml, top level); the nearest known key is 'output'"),
        (
            'name = "a"\n[inner]\ncuont = 1',
            "'cuont' (job.toml, table [inner]); the nearest known key is 'count'",
        ),
        ("flag = true", "name must be set, got nothing"),
        ("name = 3", "name must be text, got an integer"),
        ('name = "a"\nflag = 1', "flag must be true or false, got an integer"),
        ('name = "a"\n[inner]\ncount = true', "inner.count must be an integer, got a boolean"),
        ('name = "a"\n[inner]\ncount = 11', "inner.count must be from 1 to 10, got 11"),
        ('name = "a"\n[inner]\nmode = "mark"', "inner.mode must be one of 'drop', 'mask', got 'mark'"),
        ('name = "a"\n[inner]\nrate = nan', "inner.rate must be a finite number, got nan"),
        ('name = "a"\n[inner]\nrate = "x"', "inner.rate must be a number, got text"),
        ('name = "a"\n[inner]\npaths = "x"', "inner.paths must be a list, got text"),
        ('name = "a"\n[inner]\npaths = [1]', "inner.paths.0 must be a path, got an integer"),
        ('name = "a"\noutput = ""', "output must be a path, got an empty text"),
        ('name = "a"\nsize = "12 parsecs"', "size must be a size such as 512MiB"),
        ('name = "a"\nsize = 0', "size must be at least 1, got 0"),
        ('name = "a"\ninner = 3', "inner must be a table, got an integer"),
        ('name = "a"\nparts = 3', "parts must be a table, got an integer"),
        ('name = "a"\nparts = {x = "y"}', "parts.x must be an integer, got text"),
        ("name = ", "must be TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, _write(tmp_path, text))
    assert expected in caught.value.message


def test_a_path_is_never_repeated(tmp_path: Path) -> None:
    """A path may tell whose data this is."""
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, _write(tmp_path, 'name = "a"\noutput = ["/data/DOE^JANE"]'))
    assert "DOE" not in caught.value.message


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"got no file of the name 'none\.toml'"):
        load_config(Outer, tmp_path / "none.toml")


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="readable"):
        load_config(Outer, tmp_path)


def test_overrides_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    path = _write(tmp_path, 'name = "a"\n[inner]\ncount = 1')
    overrides = ["inner.count=2", "name=b", "inner.mode=mask", "output=rel", "size=3KiB", "inner.paths=one"]
    config = load_config(Outer, path, overrides)
    assert (config.inner.count, config.name, config.inner.mode) == (2, "b", "mask")
    # People type paths where they are; the file's paths belong to the file.
    assert config.output == Path("/tmp/rel")
    assert config.inner.paths == (Path("/tmp/one"),)
    assert config.size == 3072


def test_override_of_text_that_looks_like_a_number(tmp_path: Path) -> None:
    assert load_config(Outer, _write(tmp_path, ""), ["name=42"]).name == "42"


def test_override_replaces_a_table(tmp_path: Path) -> None:
    path = _write(tmp_path, 'name = "a"\n[parts]\ntrain = 1')
    assert load_config(Outer, path, ["parts={val=2}"]).parts == {"val": 2}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("inner.count", "--set must be table.key=value"),
        ("=3", "--set must be table.key=value"),
        ("inner.cuont=3", "'cuont' (--set, table [inner]); the nearest known key is 'count'"),
        ("iner.count=3", "'iner' (--set, top level); the nearest known key is 'inner'"),
        ("name.x=3", "which is a value"),
        ("inner.count=many", "inner.count must be an integer, got text (--set)"),
    ],
)
def test_mistaken_overrides_are_named(tmp_path: Path, override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, _write(tmp_path, 'name = "a"'), [override])
    assert expected in caught.value.message


def test_a_missing_key_of_a_required_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"inner\.name must be set"):
        load_config(Required, _write(tmp_path, ""))


def test_checks_of_the_class_say_where(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Even:
        number: int = 0

        def __post_init__(self) -> None:
            if self.number % 2:
                raise ConfigError(f"number must be even, got {self.number}.")

    with pytest.raises(ConfigError, match=r"number must be even, got 3 \(job\.toml\)\."):
        load_config(Even, _write(tmp_path, "number = 3"))


def test_bounds_are_written_with_all_their_digits() -> None:
    assert Bounds(1, 2**24).describe() == "from 1 to 16777216"
    assert Bounds(minimum=0.25).describe() == "at least 0.25"
    assert Bounds(maximum=1e-12).describe() == "at most 1e-12"


def test_checks_hold_without_a_file() -> None:
    with pytest.raises(ConfigError, match="count must be from 1 to 10, got 0"):
        Inner(count=0)
    with pytest.raises(ConfigError, match="mode must be one of"):
        Inner(mode="other")  # type: ignore[arg-type]


def test_what_is_dumped_reads_back(tmp_path: Path) -> None:
    config = Outer(
        name='quote " back \\ tab\t snow \u2603 del \x7f',
        output=tmp_path / "o ut",
        flag=True,
        inner=Inner(rate=0.1 + 0.2, paths=(Path("/a"), Path("/b"))),
        parts={"train": 1, "odd key": 2},
    )
    assert load_config(Outer, _write(tmp_path, dump_config(config))) == config


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("1 KiB", 1024),
        ("1.5GB", 1_500_000_000),
        ("2TiB", 2 << 40),
        ("3kB", 3000),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_byte_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "1XB", "-1", "1e3", "1 MiB extra"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_byte_size(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Crop:
    size: tuple[int, ...] = ()
    count: int | Literal["all"] = 1


def _find(name: str) -> type[_Crop]:
    if name != "crop":
        raise ConfigError(f"There is no step {name!r}; there are crop.")
    return _Crop


def _name(kind: type[Any]) -> str:
    return kind.__name__.strip("_").lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Steps:
    steps: dict[str, Annotated[_Crop, TypeKey(_find, _name)]] = field(default_factory=dict)


def test_a_key_names_the_type_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "steps.toml"
    path.write_text('[steps.a]\ntype = "crop"\nsize = [2, 3]\n[steps.b]\ntype = "crop"\ncount = "all"\n')
    steps = load_config(_Steps, path)
    assert steps.steps == {"a": _Crop(size=(2, 3)), "b": _Crop(count="all")}
    path.write_text(dump_config(steps))
    assert load_config(_Steps, path) == steps
    assert load_config(_Steps, path, ["steps.a.count=4"]).steps["a"] == _Crop(size=(2, 3), count=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('type = "corp"', r"steps\.a\.type: There is no step 'corp'; there are crop \(steps\.toml\)"),
        ("size = [2]", r"steps\.a\.type must be the name of a type, got nothing"),
        ("type = 3", r"steps\.a\.type must be the name of a type, got an integer"),
        ('type = "crop"\nsiez = [2]', r"got 'siez'.*the nearest known key is 'size'"),
        ('type = "crop"\ncount = "some"', r"steps\.a\.count must be an integer, got text"),
        ('type = "crop"\ncount = 1.5', r"steps\.a\.count must be an integer, got a number"),
    ],
)
def test_a_slip_in_a_typed_table_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "steps.toml"
    path.write_text(f"[steps.a]\n{text}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_config(_Steps, path)
