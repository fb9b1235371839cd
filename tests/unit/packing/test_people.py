"""The identity graph: who is joined, what the operator decides, which split a person gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.errors import ConfigError, FormatError
from shardflow.packing.deid.identity import (
    MAX_SHARED,
    PatientEvidence,
    StatedPerson,
    evidence_of,
    listed_together,
    offsets_in,
)
from shardflow.packing.deid.pseudonyms import DateOffsets, SecretKey
from shardflow.packing.inventory import FileTable, ScannedFile
from shardflow.packing.people import Identities, identify, join, load_evidence, write_evidence
from shardflow.packing.scan import NUM_BUCKETS
from shardflow.packing.settings import UncertainIdentity

pytestmark = pytest.mark.fast

KEY = SecretKey(bytes(range(32)))
BORN = "19701231"


def _files(
    people: Sequence[StatedPerson], buckets: Sequence[int] = (), pixels: Sequence[int] = ()
) -> FileTable:
    """One study for each."""
    table = FileTable(len(people))
    rows = [
        ScannedFile(
            surrogate=f"s{number:025d}",
            reason=None,
            study=f"study{number}",
            patient=KEY.surrogate("patient", person.patient_id),
            bucket=buckets[number] if buckets else number,
            decoded_bytes=1,
            num_slices=1,
            instance=number,
            series=0,
            digest=number,
            modified_ns=0,
            row_offset=0,
            row_num_bytes=0,
            pixels=pixels[number] if pixels else 0,
            evidence=evidence_of(KEY, person),
        )
        for number, person in enumerate(people)
    ]
    table.add(0, rows)
    return table


def _identify(files: FileTable, path: Path | None = None, policy: UncertainIdentity = "warn") -> Identities:
    return identify(files, KEY, policy=policy, identity_map=path)


def _people(*ids: str, born: str = BORN) -> list[StatedPerson]:
    return [StatedPerson(patient_id=one, birth_date=born) for one in ids]


def test_a_person_has_one_bucket_and_strangers_keep_theirs() -> None:
    files = _files(_people("7", "X", "007", "7^EAST", "Y"))
    people = _identify(files)
    people.join_splits(files.studies, {})
    first = min(files.studies.patients[n] for n in (0, 2, 3))
    bucket = files.studies.patients.index(first)
    assert files.studies.buckets == [bucket, 1, bucket, bucket, 4]
    assert people.counts == {"joined": 3}


def test_a_further_identifier_of_many_makes_no_link_certain() -> None:
    """*NONE* as everybody's other identifier: two namesakes of one age are no more certain by it."""
    namesake: dict[str, Any] = {"name": "Lovelace^Ada", "age": "055Y", "study_date": "20260301"}
    stated = [
        StatedPerson(patient_id=f"P{number}", other_ids=("NONE",), **(namesake if number < 2 else {}))
        for number in range(MAX_SHARED + 1)
    ]
    assert _identify(_files(stated)).counts == {"uncertain": 1}
    assert _identify(_files(stated[:2])).counts == {"joined": 2}


def _listed(files: FileTable, *lists: Sequence[tuple[str, str]]) -> FileTable:
    files.studies.evidence.add_lists(listed_together(KEY, tuple(one)) for one in lists)
    return files


def test_records_that_list_one_patients_numbers_join_them() -> None:
    stated = [StatedPerson(patient_id=one) for one in ("A1", "27", "C3")]
    own = [("A1", "X"), ("0027", "Y")]
    identities = _identify(_listed(_files(stated), own))
    assert identities.counts == {"joined": 2}
    assert identities.links[0].evidence == ("record",)
    # By a third number that no image has; not by one of another issuer.
    chain = [[("A1", ""), ("D4", "X")], [("D4", "X"), ("27", "")]]
    assert _identify(_listed(_files(stated), *chain)).counts == {"joined": 2}
    apart = [[("A1", ""), ("D4", "X")], [("D4", "Y"), ("27", "")]]
    assert _identify(_listed(_files(stated), *apart)).counts == {}


def test_a_listed_number_that_may_be_another_patients_is_uncertain() -> None:
    other = [StatedPerson(patient_id="A1"), StatedPerson(patient_id="B2", issuer="Z")]
    assert _identify(_listed(_files(other), [("A1", "X"), ("B2", "Y")])).counts == {"uncertain": 1}
    assert _identify(_listed(_files(other), [("A1", "X"), ("B2", "z")])).counts == {"joined": 2}
    # Two patients write the number.
    twice = [StatedPerson(patient_id=one) for one in ("A1", "27", "0027")]
    counts = _identify(_listed(_files(twice), [("A1", ""), ("27", "")])).counts
    assert counts == {"uncertain": 3}


def test_a_number_in_lists_of_many_links_nobody() -> None:
    stated = [StatedPerson(patient_id=f"P{number}1") for number in range(MAX_SHARED + 1)]
    lists = [[(one.patient_id, ""), ("4711", "")] for one in stated]
    assert _identify(_listed(_files(stated), *lists)).counts == {}
    assert _identify(_listed(_files(stated), *lists[:2])).counts == {"uncertain": 1}


def test_a_third_number_that_may_be_a_familys_joins_nobody() -> None:
    """Two of one family have an insurer's or a household's number in common, as twins have the birth date."""
    third = [[("A1", "H"), ("F9", "")], [("B2", "K"), ("F9", "")]]
    one_issuer = [[("A1", "H"), ("F9", "X")], [("B2", "H"), ("F9", "X")]]
    twins = [StatedPerson(patient_id=one, birth_date=BORN) for one in ("A1", "B2")]
    for stated in ([StatedPerson(patient_id=one) for one in ("A1", "B2")], twins):
        for lists in (third, one_issuer):
            assert _identify(_listed(_files(stated), *lists)).counts == {"uncertain": 1}
    # What else is certain stays so, and so does what one list holds, whoever else is in it.
    named = [
        StatedPerson(patient_id=one, birth_date=BORN, name="Lovelace^Ada", sex="F") for one in ("A1", "B2")
    ]
    assert _identify(_listed(_files(named), *third)).counts == {"joined": 2}
    merged = [("A1", "H"), ("B2", "H"), ("F9", "")]
    assert _identify(_listed(_files(twins), merged, *one_issuer)).counts == {"joined": 2}


def test_a_list_of_numbers_is_known_to_later_versions(tmp_path: Path) -> None:
    path = tmp_path / "people.jsonl"
    lists = [("A1", "X"), ("B2", "Y")], [("S5", ""), ("T6", "")]
    files = _listed(_files([StatedPerson(patient_id="A1")]), *lists)
    write_evidence(_identify(files), path)
    assert path.read_text(encoding="utf-8").count("listed") == 1
    later = _files([StatedPerson(patient_id="B2")])
    load_evidence(path, later.studies.evidence)
    assert len(later.studies.evidence.listed) == 1
    assert _identify(later).counts == {"joined": 2}


def test_what_is_written_does_not_depend_on_the_order_of_files(tmp_path: Path) -> None:
    lists = [[("A1", "X"), (f"B{number}7", "Y")] for number in range(5)]
    written = []
    for number, ordered in enumerate((lists, lists[::-1])):
        path = tmp_path / f"people{number}.jsonl"
        write_evidence(_identify(_listed(_files([StatedPerson(patient_id="A1")]), *ordered)), path)
        written.append(path.read_bytes())
    assert written[0] == written[1]


def test_a_packed_split_and_an_official_one_win() -> None:
    stated = _people("7", "007", "0007")
    patients = [KEY.surrogate("patient", one.patient_id) for one in stated]
    files = _files(stated, [3, NUM_BUCKETS + 1, 5])
    _identify(files).join_splits(files.studies, {})
    assert files.studies.buckets == [NUM_BUCKETS + 1] * 3
    files = _files(stated, [3, 4, 5])
    people, packed = _identify(files), {patients[2]: "val"}
    people.keep_packed(packed)
    assert packed == dict.fromkeys(patients, "val")
    people.join_splits(files.studies, packed)
    assert files.studies.buckets == [3, 4, 5]  # `keep_splits` sets them
    packed = {patients[0]: "train", patients[1]: "val"}
    people.keep_packed(packed)
    assert (packed[patients[0]], packed[patients[1]]) == ("train", "val")
    assert people.counts["in_two_splits"] == 1


def test_official_splits_that_tear_a_person_are_refused() -> None:
    files = _files(_people("7", "007"), [NUM_BUCKETS, NUM_BUCKETS + 1])
    with pytest.raises(ConfigError, match="1 persons to two splits"):
        _identify(files).join_splits(files.studies, {})


def test_the_operator_decides(tmp_path: Path) -> None:
    files = _files(_people("7", "007", born=""))
    assert _identify(files).counts == {"uncertain": 1}
    assert _identify(files, policy="join").counts == {"joined": 2}
    path = tmp_path / "map.csv"
    for decision, counts in (("same", {"joined": 2, "decided": 1}), ("Different", {"decided": 1})):
        path.write_text(f"patient_id,decision,other_patient_id,note\n007,{decision},7,x\n", encoding="utf-8")
        assert _identify(files, path, "join").counts == counts
    # Other people's lines are of other data; an undecided one decides nothing.
    path.write_text("decision,patient_id,other_patient_id\nsame,7,8\n,7,007\n", encoding="utf-8")
    assert _identify(files, path).counts == {"uncertain": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("decision,patient_id\nsame,1\n", "line 2"),
        ("decision,patient_id,other_patient_id\nmaybe,7,007\n", "line 2"),
        ("decision,patient_id,other_patient_id\nsame,7,007\ndifferent,007,7\n", "line 3 twice"),
    ],
)
def test_a_map_that_cannot_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    files = _files(_people("7", "007"))
    path = tmp_path / "map.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as refused:
        _identify(files, path)
    assert "007" not in str(refused.value)
    with pytest.raises(ConfigError, match="No such file"):
        _identify(files, tmp_path / "missing.csv")


def test_a_contradicting_decision_is_refused(tmp_path: Path) -> None:
    files = _files(_people("7", "007", "0007"))
    path = tmp_path / "map.csv"
    path.write_text("decision,patient_id,other_patient_id\ndifferent,7,007\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="different that further links make one person"):
        _identify(files, path)


def test_equal_images_join_and_copies_are_counted() -> None:
    people = [*_people("A", "B", "B", "C", born="")]
    identities = _identify(_files(people, pixels=[5, 5, 5, 6]))
    assert identities.counts == {"joined": 2, "copied_studies": 1}
    assert identities.links[0].evidence == ("pixels",)


def _published(identities: Identities, packed: Sequence[str] = (), former: Any = None) -> dict[str, str]:
    splits = dict.fromkeys(identities.evidence.patients, "train")
    identities.publish(former or {}, dict.fromkeys(packed, "train"), splits)
    return {patient: person.patient_key for patient, person in identities.published.items()}


def test_patients_of_a_person_appear_under_the_first(tmp_path: Path) -> None:
    ids = ["7", "007", "X", "0007"]
    keys = dict(zip(ids, (KEY.surrogate("patient", one) for one in ids), strict=True))
    first, *others = sorted(keys[one] for one in ("7", "007", "0007"))
    identities = _identify(_files(_people(*ids)))
    assert _published(identities) == dict.fromkeys(others, first)
    leader = next(one for one in ids if keys[one] == first)
    dates = {person.dates for person in identities.published.values()}
    assert dates == {DateOffsets.of(KEY, leader)}
    assert "under_two_keys" not in identities.counts

    # Who is packed already keeps the key, and decides for those who come later.
    assert _published(_identify(_files(_people(*ids))), [others[0]]) == {
        first: others[0],
        others[1]: others[0],
    }
    apart = _identify(_files(_people(*ids)))
    assert _published(apart, others) == {first: others[0]}
    assert apart.counts["under_two_keys"] == 1
    assert any("--private-dir" in note for note in apart.notes("warn"))

    # A later version without their files, and without the first, who was removed, knows all that.
    path = tmp_path / "people.jsonl"
    write_evidence(identities, path)
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if f'"patient":"{first}"' not in line
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = _files(_people("07", "Y"))
    former = load_evidence(path, files.studies.evidence)
    later = _identify(files)
    found = _published(later, others, former)
    assert found == dict.fromkeys([*others, KEY.surrogate("patient", "07")], first)
    assert {person.dates for person in later.published.values()} == dates


def test_strangers_who_were_published_as_one_person_are_counted(tmp_path: Path) -> None:
    files = _files(_people("7", "007"))
    before = _identify(files)
    (joined,) = _published(before)
    path = tmp_path / "map.csv"
    path.write_text("decision,patient_id,other_patient_id\ndifferent,7,007\n", encoding="utf-8")
    later = _identify(files, path)
    _published(later, [joined], dict(before.published))
    assert later.counts["strangers_under_one_key"] == 1
    assert any("only packing anew parts them" in note for note in later.notes("warn"))
    fresh = _identify(files, path)
    _published(fresh)
    assert "strangers_under_one_key" not in fresh.counts


def test_doubtful_links_share_the_split_and_not_the_key() -> None:
    """An uncertain link that is joined, and equal images under names that differ."""
    uncertain = _identify(_files(_people("7", "007", born="")), policy="join")
    assert uncertain.counts["joined"] == 2
    assert _published(uncertain) == {}
    assert uncertain.counts["under_two_keys"] == 1
    named = [
        StatedPerson(patient_id=one, name=name, birth_date=born)
        for one, name, born in (("A", "Doe^Jane", BORN), ("B", "Roe^Mary", "19500102"))
    ]
    assert _published(_identify(_files(named, pixels=[5, 5]))) == {}
    assert len(_published(_identify(_files(_people("A", "B", born=""), pixels=[5, 5])))) == 1


def test_evidence_of_an_earlier_release_has_no_dates_and_joins_splits_alone() -> None:
    files = _files(_people("7"))
    old = KEY.surrogate("patient", "007")
    stated = StatedPerson(patient_id="007", birth_date=BORN)
    tokens = [one for one in evidence_of(KEY, stated) if offsets_in([one]) is None]
    assert len(tokens) == len(evidence_of(KEY, stated)) - 1
    files.studies.evidence.add(old, tokens)
    identities = _identify(files)
    assert identities.counts == {"joined": 2}
    assert _published(identities, [old]) == {}
    assert identities.counts["under_two_keys"] == 1


def test_evidence_is_read_back(tmp_path: Path) -> None:
    identities = _identify(_files(_people("7", "X")))
    path = tmp_path / "people.jsonl"
    write_evidence(identities, path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert BORN.encode() not in path.read_bytes()
    files = _files(_people("007"))
    load_evidence(path, files.studies.evidence)
    assert _identify(files).counts == {"joined": 2}
    load_evidence(tmp_path / "none.jsonl", PatientEvidence())
    path.write_text('{"patient": "x"}\n', encoding="utf-8")
    with pytest.raises(FormatError, match="KeyError"):
        load_evidence(path, PatientEvidence())


PAIRS = st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=40)


def _reachable(pairs: Iterable[tuple[int, int]], start: int) -> set[int]:
    found, waiting = {start}, [start]
    while waiting:
        one = waiting.pop()
        near = {b for a, b in pairs if a == one} | {a for a, b in pairs if b == one}
        waiting += near - found
        found |= near
    return found


@given(PAIRS, st.randoms())
def test_persons_are_the_connected_patients_in_any_order(pairs: list[tuple[int, int]], rng: object) -> None:
    persons = join(20, pairs).tolist()
    shuffled = [*pairs]
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert join(20, shuffled).tolist() == persons
    assert [min(_reachable(pairs, one)) for one in range(20)] == persons


SPELLINGS = st.sampled_from(["7", "007", "7^EAST", "8", "08", "9", "A-1", "a1", "A01", "B"])
STATED = st.builds(
    StatedPerson,
    patient_id=SPELLINGS,
    birth_date=st.sampled_from(["", BORN, "19800202"]),
    other_ids=st.sampled_from([(), ("7",), ("b",)]),
)


@given(st.lists(STATED, min_size=1, max_size=8), st.randoms())
def test_splits_of_persons_do_not_depend_on_the_order_of_files(
    people: list[StatedPerson], rng: object
) -> None:
    def buckets(order: list[int]) -> dict[str, int]:
        ordered = [people[one] for one in order]
        keyed = [KEY.bucket("split", one.patient_id, NUM_BUCKETS) for one in ordered]
        files = _files(ordered, keyed)
        identities = _identify(files)
        identities.join_splits(files.studies, {})
        for members in identities.members().values():
            found = {
                bucket
                for patient, bucket in zip(files.studies.patients, files.studies.buckets, strict=True)
                if patient in members
            }
            assert len(found) == 1
        return dict(zip(files.studies.patients, files.studies.buckets, strict=True))

    order = list(range(len(people)))
    first = buckets(order)
    rng.shuffle(order)  # type: ignore[attr-defined]
    assert buckets(order) == first
