"""An append or a retry that is killed anywhere goes on by the same command, and comes to the same bytes."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from shardflow.errors import ConfigError
from shardflow.format.checks.verification import verify
from shardflow.format.manifest import versions
from shardflow.packing.job import PackMode
from shardflow.storage import LocalStore
from tests.dicom_factory import make_study, truncate
from tests.pack_case import PackCase, tree_digests
from tests.pack_faults import HANDLERS as FAULTY
from tests.sweeps import sampled

pytestmark = pytest.mark.usefixtures("packs_inline")

NUM_NEW = 4
POINTS = [
    "phase:headers",
    "advance:headers:1",
    "phase:reports",
    "phase:studies",
    "advance:studies:1",
    f"advance:studies:{NUM_NEW - 1}",
    "phase:samples",
    "phase:ledger",
    "phase:facts",
    "phase:manifest",
    "cleaning",
    "half",
]
WRITES = [
    ("fragment", 1),
    ("fragment", 3),
    ("tar", 1),
    ("tar", 2),
    ("index", 1),
    ("record", 1),
    ("record", 2),
]


def _prepare(folder: Path, mode: PackMode) -> PackCase:
    """Make a first version, and what the next one is to be made of."""
    case = PackCase(folder)
    case.prepare(has_reports=True)
    text = case.config_path.read_text(encoding="utf-8").replace('"10KiB"', '"4KiB"')
    case.config_path.write_text(text + "[policy]\nmax_quarantined_share = 1.0\n", encoding="utf-8")
    case.write_faults()
    old = [make_study(case.dicom / f"old{n}", patient=f"P{n}", num_slices=2, seed=n) for n in range(2)]
    reports = [(old[0].study_instance_uid, "Old.")]
    changed = []
    if mode == "retry":
        changed = [make_study(case.dicom / f"new{n}", patient=f"N{n}", num_slices=2) for n in range(NUM_NEW)]
        for study in changed:
            truncate(study.files[0])
    case.write_reports(reports)
    case.pack()
    for number in range(NUM_NEW):
        study = make_study(case.dicom / f"new{number}", patient=f"N{number}", num_slices=2)
        reports.append((study.study_instance_uid, f"New {number}."))
    if mode == "append":
        case.write_reports(reports)
    return case


@pytest.fixture(scope="module", params=["append", "retry"])
def expected(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PackMode, Path, dict[str, str]]:
    """The mode, everything before the job, and the digests of what an undisturbed job makes of it."""
    mode: PackMode = request.param
    folder = tmp_path_factory.mktemp(mode)
    before = _prepare(folder, mode).folder.parent / f"{folder.name}-before"
    shutil.copytree(folder, before)
    case = PackCase(folder)
    assert case.pack(mode=mode).manifest_version == 2
    assert not verify(str(case.output)).damages
    return mode, before, tree_digests(case.output)


@pytest.fixture
def case(tmp_path: Path, expected: tuple[PackMode, Path, dict[str, str]]) -> PackCase:
    """The same inputs and first version in a folder of the test's own."""
    case = PackCase(tmp_path / "job")
    shutil.copytree(expected[1], case.folder)
    # Else a retry would read the files of the folder that this one is a copy of.
    for ledger in case.private.glob("inputs-*.jsonl"):
        former = str(expected[1]).removesuffix("-before")
        text = ledger.read_text(encoding="ascii").replace(former, str(case.folder))
        ledger.write_text(text, encoding="ascii")
    return case


@pytest.mark.parametrize("point", sampled(POINTS, {"advance:studies:1", "cleaning"}))
def test_a_killed_job_goes_on_to_the_same_bytes(
    case: PackCase, expected: tuple[PackMode, Path, dict[str, str]], point: str
) -> None:
    mode, before, digests = expected
    done = case.drive(point, mode=mode)
    assert done.returncode == -signal.SIGKILL, done.stderr
    is_published = point in {"cleaning", "half"}
    assert versions(LocalStore(case.output)) == ([1, 2] if is_published else [1])
    # Readers see a whole version: nothing of the old one was touched.
    now = tree_digests(case.output)
    old = tree_digests(before / "out")
    assert {name: now[name] for name in old} == old
    if not is_published:
        with pytest.raises(ConfigError, match=f"resume it with --{mode}"):
            case.pack()
    summary = case.pack(mode=mode)
    assert summary.status == ("nothing_new" if is_published else "packed")
    assert tree_digests(case.output) == digests


@pytest.mark.parametrize(
    ("point", "number"),
    sampled(WRITES, {("tar", 1)}),
)
def test_a_job_killed_at_a_write_of_a_process_goes_on(
    case: PackCase, expected: tuple[PackMode, Path, dict[str, str]], point: str, number: int
) -> None:
    mode, _, digests = expected
    case.write_faults(kill_group=[point, number])
    done = case.drive("none", FAULTY, mode)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert versions(LocalStore(case.output)) == [1]
    case.pack(mode=mode)
    assert tree_digests(case.output) == digests


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2, 5])
def test_killed_twenty_times_at_random_it_is_one_and_the_same_dataset(
    case: PackCase, expected: tuple[PackMode, Path, dict[str, str]], num_processes: int
) -> None:
    mode, _, digests = expected
    case.kill_at_random(20, num_processes=num_processes, mode=mode)
    case.pack(f"execution.num_processes={num_processes}", mode=mode)
    assert tree_digests(case.output) == digests
