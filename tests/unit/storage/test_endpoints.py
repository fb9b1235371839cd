"""Which servers may be asked, and keys from shared files: no refusal repeats what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardflow.errors import ConfigError, StorageError
from shardflow.storage import open_store
from shardflow.storage.client import check_endpoint, endpoint_of, profile_settings

pytestmark = pytest.mark.fast

_VARIABLES = (
    "SHARDFLOW_ENDPOINTS",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT",
    "AWS_PROFILE",
    "AWS_ACCESS_KEY_ID",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_SKIP_SIGNATURE",
)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


def test_an_address_leads_to_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert endpoint_of("http://Host/a") == "http://host:80"
    assert endpoint_of("https://[fe80::1]:9000/a") == "https://[fe80::1]:9000"
    assert endpoint_of("gs://bucket/a") == "gs://"
    assert endpoint_of("s3://bucket/a") == "s3://"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://ceph.local:7480/")
    assert endpoint_of("s3://bucket/a") == "https://ceph.local:7480"


def test_only_what_is_listed_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFLOW_ENDPOINTS", "s3://, https://ceph.local:7480,http://127.0.0.1")
    for url in ("s3://any/a", "https://CEPH.local:7480/b", "http://127.0.0.1:80/x"):
        check_endpoint(url)
    for url in (
        "https://ceph.local/b",
        "http://ceph.local:7480/b",
        "gs://bucket",
        "https://ceph.local.evil.org:7480",
        "http://127.0.0.1:8080",
    ):
        with pytest.raises(StorageError, match="SHARDFLOW_ENDPOINTS") as caught:
            check_endpoint(url)
        assert "evil" not in str(caught.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://elsewhere.org")
    with pytest.raises(StorageError, match="SHARDFLOW_ENDPOINTS"):
        check_endpoint("s3://any/a")


@pytest.mark.parametrize(
    "entry", ["ceph.local", "https://", "https://u:p@host", "s3://bucket", "https://h/a"]
)
def test_a_list_that_is_none_is_refused(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFLOW_ENDPOINTS", f"s3://,{entry}")
    with pytest.raises(ConfigError, match="SHARDFLOW_ENDPOINTS must list"):
        check_endpoint("https://host/a")


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "2852039166",
        "0xa9fea9fe",
        "0251.0376.0251.0376",
        "[fe80::1]",
        "[::ffff:169.254.169.254]",
        "metadata.google.internal",
        "metadata.google.internal.",
    ],
)
def test_servers_that_hand_out_credentials_are_not_asked(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="link-local or metadata"):
        open_store(f"http://{host}/a").read("b")
    monkeypatch.setenv("SHARDFLOW_ENDPOINTS", f"http://{host}")
    check_endpoint(f"http://{host}/a")


def test_a_private_server_is_asked() -> None:
    for host in ("10.0.0.7", "192.168.1.2:9000", "127.0.0.1", "pacs", "[fd00::1]"):
        check_endpoint(f"https://{host}/a")


# ---- profiles ------------------------------------------------------------------------------------


def _write(tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = D\naws_secret_access_key = d%(x)s\n"
        "[ward]\naws_access_key_id = W\naws_secret_access_key = w\naws_session_token = t\n"
    )
    (tmp_path / "config").write_text(
        "[profile ward]\nregion = eu-north-1\n[profile sso]\nsso_session = hospital\n"
    )


def test_keys_come_from_the_profile_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert profile_settings() == {}
    _write(tmp_path)
    assert profile_settings() == {"access_key_id": "D", "secret_access_key": "d%(x)s"}
    monkeypatch.setenv("AWS_PROFILE", "ward")
    ward = {"access_key_id": "W", "secret_access_key": "w", "session_token": "t"}
    assert profile_settings() == ward | {"region": "eu-north-1"}
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert profile_settings() == ward
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "E")
    assert profile_settings() == {}


def test_a_profile_without_keys_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path)
    for name in ("sso", "nothing"):
        monkeypatch.setenv("AWS_PROFILE", name)
        with pytest.raises(StorageError, match="export-credentials"):
            profile_settings()


def test_a_broken_file_is_named_and_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text("TOPSECRET without a section\n")
    with pytest.raises(StorageError, match="AWS_SHARED_CREDENTIALS_FILE is not") as caught:
        profile_settings()
    assert "TOPSECRET" not in str(caught.value)
    assert caught.value.__suppress_context__
