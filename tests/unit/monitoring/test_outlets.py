"""What tells others of a run, opened by its settings."""

from __future__ import annotations

import errno
import logging
import os
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from shardflow.errors import ConfigError
from shardflow.monitoring import MetricsServer
from shardflow.monitoring.outlets import TOKEN_NAME, check_outlets, open_outlets
from tests.run_factory import write_run

pytestmark = pytest.mark.fast


def test_the_port_that_was_chosen_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), open_outlets(write_run(tmp_path), "127.0.0.1:0", (), "none"):
        (url,) = re.findall(r"http://\S+", caplog.text)
        with urllib.request.urlopen(url, timeout=300) as answer:
            assert b"shardflow_steps_total 60.0\n" in answer.read()


def test_users_of_the_same_machine_need_the_token_that_the_run_keeps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_run(tmp_path)
    tokens = set()
    for _ in range(2):  # a start and its next one, for which no scrape configuration changes
        caplog.clear()
        with caplog.at_level(logging.INFO), open_outlets(run, "127.0.0.1:0", ()):
            (url,) = re.findall(r"http://\S+", caplog.text)
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(url, timeout=300)
            token = (run / TOKEN_NAME).read_text().strip()
            asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(asked, timeout=300) as answer:
                assert answer.status == 200
        tokens.add(token)
        assert token not in caplog.text
    assert len(tokens) == 1
    assert (run / TOKEN_NAME).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "planted", ["link", "dangling link", "open file", "another's", "folder", "empty file"]
)
def test_a_token_that_others_may_know_is_not_used(
    tmp_path: Path, planted: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, other = write_run(tmp_path / "run"), tmp_path / "other"
    path = run / TOKEN_NAME
    if planted == "folder":
        path.mkdir()
    elif planted == "dangling link":
        path.symlink_to(other)
    else:
        other.write_text("" if planted == "empty file" else "0123456789abcdef\n")
        if planted == "link":
            path.symlink_to(other)
        else:
            other.chmod(0o666 if planted == "open file" else 0o600)
            if planted == "another's":
                if os.geteuid():
                    pytest.skip("only root gives a file to another user")
                os.chown(other, 1234, -1)
            other.rename(path)
    with caplog.at_level(logging.INFO), open_outlets(run, "127.0.0.1:0", ()):
        assert "The run continues without it." in caplog.text
        assert not re.findall(r"http://\S+", caplog.text)
    assert not other.exists() or planted == "link"


def test_a_token_is_kept_where_files_have_no_modes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Some network file systems show the same mode for everything."""
    run = write_run(tmp_path)
    (run / TOKEN_NAME).write_text("0123456789abcdef\n")
    for path in (run, run / TOKEN_NAME):
        path.chmod(0o777)
    with caplog.at_level(logging.INFO), open_outlets(run, "127.0.0.1:0", ()):
        assert re.findall(r"http://\S+", caplog.text)


def test_a_full_disk_costs_the_metrics_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = write_run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with open_outlets(run, "127.0.0.1:0", ()):
            pass
    assert "The run continues without it." in caplog.text
    assert not (run / TOKEN_NAME).exists()


def test_a_token_is_asked_for_and_never_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token, path = "0123456789abcdef", tmp_path / "token"
    path.write_text(f"{token}\n")
    run = write_run(tmp_path / "run")
    with caplog.at_level(logging.INFO), open_outlets(run, "127.0.0.1:0", (), str(path)):
        (url,) = re.findall(r"http://\S+", caplog.text)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(url, timeout=300)
        with urllib.request.urlopen(f"{url}?token={token}", timeout=300) as answer:
            assert answer.status == 200
    assert token not in caplog.text


def test_a_port_in_use_is_a_warning_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with MetricsServer(tmp_path, "127.0.0.1:0") as server:
        address = server.url.removeprefix("http://").removesuffix("/metrics")
        with open_outlets(tmp_path, address, ()):
            pass
    assert "The run continues without it." in caplog.text


def test_what_is_missing_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    check_outlets("", ())
    check_outlets("127.0.0.1:9464", ("wandb", "mlflow"))
    with pytest.raises(ConfigError, match=r"monitor\.prometheus must be an address and a port"):
        check_outlets("9464", ())
    with pytest.raises(ConfigError, match=r"monitor\.sinks names the unknown service"):
        check_outlets("", ("tensorboard",))
    with pytest.raises(ConfigError, match=r"monitor\.prometheus beyond this machine needs"):
        check_outlets("0.0.0.0:9464", ())
    check_outlets("0.0.0.0:9464", (), "none")
    with pytest.raises(
        ConfigError, match=r"monitor\.prometheus_token_file must be a file that holds a token"
    ):
        check_outlets("0.0.0.0:9464", (), "no-such-file")
    monkeypatch.setattr("shardflow.monitoring.prometheus.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install 'shardflow\[prometheus\]'"):
        check_outlets("127.0.0.1:9464", ())
