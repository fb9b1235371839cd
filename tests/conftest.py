"""What every test may use, and what no test may do.

Fixtures: ``shared_data`` (real input beside the repository), ``golden`` (values frozen in ``tests/golden``),
``packs_inline`` (packing without processes), ``once`` (what all pytest workers share).
Rules: a skipped test must stand in ``tests/allowed_skips.txt``; no test leaves a process behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import fnmatch
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.forks import SERVERS, ForkedChildren, leave_syncs_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPOSITORY = Path(__file__).resolve().parent.parent
GOLDEN_FOLDER = REPOSITORY / "tests" / "golden"
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
SKIPPED = pytest.StashKey[set[str]]()

# Nothing is downloaded in a test, and tokenizers must not start threads before a fork.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Workers share the cores: OpenMP threads that spin for one another make a training step a hundred times
# slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
leave_syncs_out()

# The same examples in every run; HYPOTHESIS_PROFILE=explore looks for new ones and remembers what failed.
settings.register_profile(
    "deterministic",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deterministic"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardflow")
    group.addoption("--update-golden", action="store_true", help="rewrite tests/golden instead of comparing")
    group.addoption(
        "--allowed-skips",
        metavar="FILE",
        type=Path,
        default=REPOSITORY / "tests" / "allowed_skips.txt",
        help="lines 'nodeid pattern | reason'; any other skipped test fails the session",
    )
    group.addoption(
        "--grace-s",
        metavar="SECONDS",
        type=float,
        default=300.0,  # a killed process may take long to end on a busy machine
        help="how long a process may take to end behind its test",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SKIPPED] = set()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m fast`` leave out files without such a test: importing them alone may take seconds (torch)."""
    if config.getoption("markexpr") == "fast" and collection_path.match("test_*.py"):
        return "mark.fast" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--update-golden`` run only the tests that hold a golden value."""
    if config.getoption("--update-golden"):
        kept = [item for item in items if "golden" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Look for no garbage while modules are imported: there is hardly any, and a search sees all objects."""
    gc.disable()
    try:
        _import_from_own_place(session)
        return (yield)
    finally:
        gc.enable()


def _import_from_own_place(session: pytest.Session) -> None:
    """Import test modules, each worker from another place of their order on.

    In a new clone all workers would else rewrite the assertions of the same module at the same time, and
    compile the same libraries. So each finds most of them as bytecode that another one has written.
    """
    config = session.config
    worker = getattr(config, "workerinput", {"workerid": "gw0", "workercount": 1})
    number = int(worker["workerid"].removeprefix("gw"))
    if number == 0:
        return  # where collecting begins
    places = [Path(argument.partition("::")[0]).absolute() for argument in config.args]
    files = sorted(
        {file for place in places for file in (place, *place.rglob("test_*.py")) if file.is_file()}
    )
    start = len(files) * number // worker["workercount"]
    for path in (*files[start:], *files[:start]):
        if not config.hook.pytest_ignore_collect(collection_path=path, config=config):
            with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting says what is wrong
                _ = pytest.Module.from_parent(session, path=path).obj


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what test modules have imported, half of it torch, out of all later collections of garbage."""
    gc.collect()
    gc.freeze()


# ---- skipped tests -------------------------------------------------------------------------------


class SkipLedger:
    """Collects skips on the controlling process and fails the session on one that is not listed."""

    def __init__(self, config: pytest.Config) -> None:
        self.skipped: set[str] = config.stash[SKIPPED]
        self.allowed = _read_allowed_skips(config.getoption("--allowed-skips"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._record(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._record(report)

    def _record(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self.skipped.add(f"{report.nodeid} | {reason.removeprefix('Skipped: ')}")

    def unlisted(self) -> list[str]:
        """Skips that no line of the allowed list covers."""
        return sorted(line for line in self.skipped if not any(_covers(rule, line) for rule in self.allowed))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unlisted() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        unlisted = self.unlisted()
        if unlisted:
            terminalreporter.section("skipped tests that tests/allowed_skips.txt does not list", red=True)
            for line in unlisted:
                terminalreporter.write_line(line)


def _read_allowed_skips(path: Path) -> list[str]:
    if not path.is_file():
        raise pytest.UsageError(f"--allowed-skips must be a file, got {path}")
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _covers(rule: str, line: str) -> bool:
    """Whether a rule covers a skip: the node id may use ``*``, the reason must be equal."""
    rule_node, _, rule_reason = (part.strip() for part in rule.partition("|"))
    node, _, reason = (part.strip() for part in line.partition("|"))
    pattern = rule_node.replace("[", "[[]")  # a parameter's brackets are no character class
    return rule_reason == reason and fnmatch.fnmatchcase(node, pattern)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(SkipLedger(session.config), "skip-ledger")
    _adopt_orphans()


# ---- processes left behind -----------------------------------------------------------------------

PR_SET_CHILD_SUBREAPER = 36
# Python's own long-lived servants; they end with the interpreter.
SERVANTS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def _adopt_orphans() -> None:
    """Make this process the parent of orphaned grandchildren, so that they are seen (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        setattr(subprocess, "Popen", ForkedChildren)  # noqa: B010 - a class that is one of another type


def _processes() -> dict[int, str]:
    """Running processes that this one started itself or by a server of `tests.forks`, pid to command line."""
    started = {pid: text for pid, text in _children("self").items() if pid not in SERVERS}
    for between in (pid for server in SERVERS for pid in _children(server)):
        started |= {pid: f"forked: {text}" for pid, text in _children(between).items()}
    return started


def _children(parent: int | str) -> dict[int, str]:
    """Running children of a process, pid to command line; not those that ended and wait to be reaped."""
    children: dict[int, str] = {}
    for pid in _child_pids(f"/proc/{parent}/task"):
        with contextlib.suppress(OSError):
            # The state follows the name in brackets; what has just begun has no command line yet.
            is_ended = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            text = command.decode(errors="replace").strip()
            if not is_ended and not any(servant in text for servant in SERVANTS):
                children[pid] = text
    return children


def _child_pids(tasks: str) -> list[int]:
    """What the threads of a process have started; asked twice a test; `pathlib` takes four times as long."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(tasks):  # noqa: PTH208
            with contextlib.suppress(OSError), open(f"{tasks}/{thread}/children", "rb") as listing:  # noqa: PTH123
                found += map(int, listing.read().split())
    return found


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Seed torch, which else draws anew in every process: what passes once must pass always."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_process_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process running, and end that process."""
    before = _processes()
    yield
    deadline = time.monotonic() + request.config.getoption("--grace-s")
    while (left := {pid: text for pid, text in _processes().items() if pid not in before}) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.02)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if left:
        pytest.fail(
            "processes left behind: " + "; ".join(text[:200] or "(starting)" for text in left.values())
        )


# ---- fixtures ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real, redistributable input beside the repository; read only."""
    if not SHARED_DATA.is_dir():
        pytest.skip("shared data folder is absent")
    return SHARED_DATA


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all pytest workers of this session share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if base.name.startswith("popen-") else base


@pytest.fixture(scope="session")
def once(shared_folder: Path) -> Callable[[str, Callable[[Path], object]], Path]:
    """``once(name, make)``: the folder that ``make`` fills, by whichever pytest worker asks first."""

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = shared_folder / name, shared_folder / f"{name}.done"
        with (shared_folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of one that failed
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return made


@pytest.fixture(scope="module")
def packs_inline() -> Iterator[None]:
    """Packing jobs of the file run in the test's process: where processes are not what is tested."""
    from tests.inline_engine import packing_inline

    with packing_inline():
        yield


@pytest.fixture(scope="session")
def _s3_address() -> Iterator[str]:
    from tests.object_stores import s3_server

    with s3_server() as address:
        yield address


@pytest.fixture
def s3(_s3_address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an S3 server, one for each test process; the environment leads a client to it."""
    for name, value in {
        "AWS_ENDPOINT_URL": _s3_address,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    return _s3_address


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """``golden(name, value)``: equals the JSON ``tests/golden/<name>.json``, which ``make golden`` writes."""

    def check(name: str, value: object) -> None:
        path = GOLDEN_FOLDER / f"{name}.json"
        text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True) + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.is_file():
            pytest.fail(f"tests/golden/{name}.json is missing; make it with: make golden")
        expected = json.loads(path.read_text(encoding="utf-8"))
        assert json.loads(text) == expected, (
            f"tests/golden/{name}.json differs; if that is meant: make golden"
        )

    return check
