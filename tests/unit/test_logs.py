"""Logging: ranks can be told apart, foreign text stays inside, event files survive kills."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardflow.errors import ConfigError, StorageError
from shardflow.logs import EventLog, configure_logging, describe_exception, read_events

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    own_level = logging.getLogger("shardflow").level
    yield
    logging.captureWarnings(False)
    root.setLevel(level)
    root.handlers[:] = handlers
    logging.getLogger("shardflow").setLevel(own_level)


def test_lines_carry_rank_level_and_name() -> None:
    stream = io.StringIO()
    configure_logging(rank=0, stream=stream)
    logging.getLogger("shardflow.loading").info("epoch %d", 3)
    assert stream.getvalue().endswith(" rank 0 INFO shardflow.loading: epoch 3\n")


def test_other_ranks_only_warn() -> None:
    stream = io.StringIO()
    configure_logging(rank=2, stream=stream)
    logging.getLogger("shardflow.loading").info("quiet")
    logging.getLogger("shardflow.loading").warning("loud")
    assert stream.getvalue().count("\n") == 1
    assert "rank 2 WARNING shardflow.loading: loud" in stream.getvalue()


def test_configuring_again_replaces_the_handler() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging(stream=first)
    configure_logging(stream=second)
    logging.getLogger("shardflow").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_foreign_text_is_withheld() -> None:
    stream = io.StringIO()
    configure_logging(withhold_foreign_text=True, stream=stream)
    logging.getLogger("pydicom").warning("Invalid value for VR PN: DOE^JANE")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("DOE^JANE again", stacklevel=1)
    logging.getLogger("shardflow").warning("ours")
    assert "DOE" not in stream.getvalue()
    assert "WARNING pydicom: text of a third-party library withheld" in stream.getvalue()
    assert "WARNING shardflow: ours" in stream.getvalue()


def test_exceptions_are_logged_without_their_text() -> None:
    stream = io.StringIO()
    configure_logging(withhold_foreign_text=True, stream=stream)
    try:
        raise ValueError("DOE^JANE")
    except ValueError:
        logging.getLogger("shardflow").exception("failed")
    assert "DOE" not in stream.getvalue()
    assert "ValueError at tests/unit/test_logs.py" in stream.getvalue()


def test_foreign_text_is_shown_where_there_is_no_patient_data() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    logging.getLogger("elsewhere").warning("a hint")
    assert "WARNING elsewhere: a hint" in stream.getvalue()


def test_described_exceptions_hold_our_text_only() -> None:
    try:
        try:
            raise KeyError("DOE^JANE")
        except KeyError as error:
            raise ConfigError("a setting must be right, got another.") from error
    except ConfigError as error:
        text = describe_exception(error)
    assert "DOE" not in text
    assert "ConfigError at tests/unit/test_logs.py" in text
    assert "a setting must be right, got another." in text
    assert "caused by KeyError at" in text


def test_a_suppressed_context_is_not_described() -> None:
    def fail() -> None:
        try:
            raise KeyError("x")
        except KeyError:
            raise ConfigError("ours.") from None

    with pytest.raises(ConfigError) as caught:
        fail()
    assert "KeyError" not in describe_exception(caught.value)


def test_events_are_appended_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, clock=lambda: 12.5) as log:
        log.write("step", step=1, loss=0.5, nested={"list": [1, math.nan]}, text="line\nbreak")
    with EventLog(path, clock=None) as log:
        log.write("step", step=2, loss=math.inf)
    first, second = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(first) == {
        "event": "step",
        "time_s": 12.5,
        "step": 1,
        "loss": 0.5,
        "nested": {"list": [1, None]},
        "text": "line\nbreak",
    }
    assert json.loads(second) == {"event": "step", "step": 2, "loss": None}


def test_a_torn_line_is_closed_off_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"a"}\n{"event":"to', encoding="utf-8")
    with EventLog(path, clock=None) as log:
        log.write("b")
    assert [record["event"] for record in read_events(path)] == ["a", "b"]


def test_every_line_before_a_kill_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    code = (
        "import sys, itertools; from shardflow.logs import EventLog; log = EventLog(sys.argv[1])\n"
        "for i in itertools.count(): log.write('tick', i=i); i == 50 and print(flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    numbers = [record["i"] for record in read_events(path)]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 50


def test_mode_of_a_new_file(tmp_path: Path) -> None:
    EventLog(tmp_path / "private.jsonl", mode=0o600).close()
    assert (tmp_path / "private.jsonl").stat().st_mode & 0o777 == 0o600


def test_line_that_does_not_fit_on_the_disk_is_an_error(tmp_path: Path) -> None:
    """The kernel takes the part that fits without an error; a ledger must not lose a line that way."""
    path = tmp_path / "events.jsonl"
    log = EventLog(path, clock=None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        log.write("step", number=1)
        with pytest.raises(StorageError, match="cannot write an event file"):
            log.write("step", number=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.write("step", number=3)  # who can do without the line goes on
    log.close()
    with EventLog(path, clock=None) as again:
        again.write("step", number=4)
    assert [event["number"] for event in read_events(path)] == [1, 3, 4]


def test_file_that_cannot_be_opened_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file") as caught:
        EventLog(tmp_path / "none" / "events.jsonl")
    assert str(tmp_path) not in str(caught.value)
