"""Identity graph: patient identifiers of one person get one split, one key and one shift of dates.

Pairs that share evidence (`shardflow.packing.deid.identity`), an image, or a list of one patient's numbers in
a record are judged. Certain links join patients (union-find over their numbers); uncertain ones are listed in
the private folder with what agrees and what differs, counted, and decided by the operator's
``deid.identity_map``. All that are joined share the split. Patients whose link is certain beyond a shared
image appear under one identifier, the first of their surrogates: with its ``patient_key`` and its offsets of
dates (`Identities.publish`). Datasets without linked patients do not change.

A packed patient keeps split, key and dates, and brings patients that are linked to it later into them.
Persons that an earlier version already has in two splits, or under two keys, are counted; only packing anew
can change that.

Evidence is kept as keyed digests in the private folder beside the ledger of inputs, so that a later version
finds links with patients whose files are not among its inputs. Memory is 12 bytes for each value of a
patient, 16 for each pair, and some 300 for each list; no name or identifier reaches the job, except those of
the listed pairs.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, os_reason
from shardflow.packing.deid.identity import (
    MAX_SHARED,
    PatientEvidence,
    PublishedPerson,
    judge,
    may_be_issued_by,
    offsets_in,
    own_numbers,
    pairs_of_equal,
)
from shardflow.packing.deid.pseudonyms import DateOffsets
from shardflow.packing.header_rows import RowPlace, read_rows
from shardflow.packing.inventory import NO_STUDY
from shardflow.packing.scan import NUM_BUCKETS
from shardflow.packing.workspace import reading_private
from shardflow.storage.local import write_atomic

if TYPE_CHECKING:
    from pathlib import Path

    from shardflow.packing.deid.identity import Listed, Listing, SortedEvidence
    from shardflow.packing.deid.pseudonyms import SecretKey
    from shardflow.packing.inventory import FileTable, StudyTable
    from shardflow.packing.settings import UncertainIdentity
    from shardflow.packing.workspace import Workspace

KnownImages: TypeAlias = tuple[NDArray[np.uint64], NDArray[np.int32]]
"""Digests of the pixels, and studies, of the inputs of a version, ``(n,)`` each."""
_Judged: TypeAlias = Literal["certain", "uncertain", "same", "different"]
_COLUMNS: Final = ("decision", "patient_id", "other_patient_id", "link", "evidence")
_DECISIONS: Final = {"same": True, "different": False}
_MAX_LISTED: Final = 100_000
"""Pairs in the private list."""
_NOBODY: Final = -1


@dataclass(frozen=True, slots=True)
class Link:
    """A pair of patients that evidence links."""

    pair: tuple[int, int]
    """Numbers in the evidence."""
    judged: _Judged
    """By the evidence, or by the operator."""
    evidence: tuple[str, ...]

    @property
    def joins(self) -> bool:
        """Whether the link is certain, or was decided to be."""
        return self.judged in {"certain", "same"}

    @property
    def shares_key(self) -> bool:
        """Whether the patients appear under one key: not if they only share an image, and differ in more.

        Strangers in one split cost nothing; under one key, the one's study would be the other's prior.
        """
        is_doubtful = "pixels" in self.evidence and any(word.startswith("not_") for word in self.evidence)
        return self.judged == "same" or (self.judged == "certain" and not is_doubtful)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identities:
    """The persons of a job."""

    evidence: PatientEvidence
    links: tuple[Link, ...]
    persons: NDArray[np.int64]
    """``(num_patients,)``: number of the first patient of the person."""
    copies: NDArray[np.int64]
    """``(n, 2)``: pairs of studies of one patient that share an image."""
    published: dict[str, PublishedPerson] = field(default_factory=dict)
    """Patients that appear under the identifier of another, by surrogate; see `publish`."""
    counts: dict[str, int] = field(default_factory=dict)
    """For the summary: ``joined`` patient identifiers, ``uncertain`` pairs, ``decided`` pairs,
    ``in_two_splits`` and ``under_two_keys`` persons, ``copied_studies``; zeros are left out."""

    @property
    def uncertain(self) -> list[Link]:
        """Links that are neither certain nor decided, between patients that nothing else joins."""
        return [
            link
            for link in self.links
            if link.judged == "uncertain" and len({self.persons[one] for one in link.pair}) > 1
        ]

    def members(self) -> dict[int, list[str]]:
        """Return the patients of every person that has several, sorted."""
        return self._groups(self.persons)

    def _groups(self, persons: NDArray[np.int64]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        names, sizes = np.unique(persons, return_counts=True)
        several = np.isin(persons, names[sizes > 1])
        for number in np.flatnonzero(several).tolist():
            found.setdefault(int(persons[number]), []).append(self.evidence.patients[number])
        return {person: sorted(patients) for person, patients in found.items()}

    def keep_packed(self, packed: dict[str, str]) -> None:
        """Add patients who are one person with a packed patient to its split.

        Args:
            packed: Split of every packed patient, by surrogate; extended.
        """
        torn = 0
        for patients in self.members().values():
            splits = [packed[patient] for patient in patients if patient in packed]
            torn += len(set(splits)) > 1
            if splits:
                for patient in patients:
                    packed.setdefault(patient, splits[0])
        if torn:
            self.counts["in_two_splits"] = torn

    def publish(
        self, former: Mapping[str, PublishedPerson], packed: Mapping[str, str], splits: Mapping[str, str]
    ) -> None:
        """Let patients who are certainly one person appear under one identifier: set `published`.

        Packed patients keep key and dates. Others take those of a packed one of the person in their split,
        else of the first; or keep their own if an earlier release has not recorded its dates.

        Args:
            former: Patients that appear under another identifier in the previous version.
            packed: Split of every packed patient, by surrogate.
            splits: These, and the patients who were joined to them (`keep_packed`).
        """
        dates = {person.patient_key: person.dates for person in former.values()}
        ordered = self.evidence.sorted()

        def person_of(patient: str) -> PublishedPerson | None:
            """Return how a patient appears, before others are joined; None if its dates are unknown."""
            if patient in packed and patient in former:
                return former[patient]
            number = self.evidence.find(patient)
            found = None if number is None else offsets_in(ordered.of(number))
            found = found or dates.get(patient)
            return None if found is None else PublishedPerson(patient_key=patient, dates=found)

        self.published.update({one: person for one, person in former.items() if one in packed})
        pairs = [link.pair for link in self.links if link.shares_key]
        for patients in self._groups(join(len(self.evidence.patients), pairs)).values():
            known = [patient for patient in patients if patient in packed]
            for patient in patients:
                if patient in packed:
                    continue
                beside = [one for one in known if packed[one] == splits.get(patient)] if known else patients
                person = person_of(beside[0]) if beside else None
                if person is not None and person.patient_key != patient:
                    self.published[patient] = person
        several = sum(len({self._key(one) for one in patients}) > 1 for patients in self.members().values())
        if several:
            self.counts["under_two_keys"] = several
        parted = [link.pair for link in self.links if link.judged == "different"]
        strangers = sum(
            len({self._key(self.evidence.patients[number]) for number in pair}) == 1 for pair in parted
        )
        if strangers:
            self.counts["strangers_under_one_key"] = strangers

    def _key(self, patient: str) -> str:
        """Return the key that a patient appears under."""
        return self.published[patient].patient_key if patient in self.published else patient

    def join_splits(self, studies: StudyTable, packed: Mapping[str, str]) -> None:
        """Give the studies of a person one bucket: that of the official split, else of the first patient.

        Args:
            studies: Their buckets are set.
            packed: Patients whose split is already fixed, and their studies' buckets set.

        Raises:
            ConfigError: The layout assigns the patients of a person to several splits.
        """
        studies_of: dict[str, list[int]] = {}
        members = self.members()
        wanted = {patient for patients in members.values() for patient in patients}
        for study, patient in enumerate(studies.patients):
            if patient in wanted:
                studies_of.setdefault(patient, []).append(study)
        torn = 0
        for patients in members.values():
            present = [patient for patient in patients if patient in studies_of]
            if not present or patients[0] in packed:
                continue
            buckets = [studies.buckets[studies_of[patient][0]] for patient in present]
            official = {bucket for bucket in buckets if bucket >= NUM_BUCKETS}
            torn += len(official) > 1
            bucket = min(official, default=buckets[0])
            for patient in present:
                for study in studies_of[patient]:
                    studies.buckets[study] = bucket
        if torn:
            raise ConfigError(
                f"the layout assigns {torn} persons to two splits under several patient IDs, which "
                "identities.csv in private_dir lists; correct the splits, or give a copy of the list as "
                "deid.identity_map, with 'different' as the decision on pairs that are not one person."
            )

    def notes(self, policy: UncertainIdentity) -> Iterator[str]:
        """Yield what the operator should know, without an identifier."""
        counts = self.counts
        if counts.get("joined"):
            yield f"{counts['joined']} patient IDs are of persons with several; each person is in one split"
        if counts.get("uncertain") and policy == "warn":
            yield (
                f"{counts['uncertain']} pairs of patient IDs may be one person each, and in two splits; "
                "decide them in a copy of identities.csv in private_dir, given as deid.identity_map"
            )
        if counts.get("in_two_splits"):
            yield (
                f"{counts['in_two_splits']} persons are in two splits of the dataset, under several patient "
                "IDs: only packing anew moves them"
            )
        if counts.get("under_two_keys"):
            yield (
                f"{counts['under_two_keys']} persons have several patient keys, of patient IDs that were "
                "packed before they were linked, or that share only an image or an uncertain link: give "
                "`shardflow folds` the private folder (--private-dir), which keeps each person in one fold"
            )
        if counts.get("strangers_under_one_key"):
            yield (
                f"{counts['strangers_under_one_key']} pairs of patient IDs that were published as one person "
                "are of two, as deid.identity_map says: only packing anew parts them"
            )
        if counts.get("copied_studies"):
            yield (
                f"pairs of studies of one patient that share an image: {counts['copied_studies']}; both "
                "studies of a pair are packed, and copies.csv in private_dir lists them"
            )


def identify(
    files: FileTable,
    key: SecretKey,
    *,
    policy: UncertainIdentity,
    identity_map: Path | None,
    known: KnownImages | None = None,
) -> Identities:
    """Find the persons among the patients of a job.

    Args:
        files: The inventory; its evidence holds that of earlier versions too (`load_evidence`).
        key: Makes the surrogates of the map.
        policy: Treatment of uncertain links.
        identity_map: The operator's decisions.
        known: Images of the previous version, whose studies come first in the inventory.

    Raises:
        ConfigError: The map cannot be used, or calls patients different whom other links join.
    """
    evidence = files.studies.evidence
    copies, copied_studies = _copies(files, evidence, known)
    decided = {} if identity_map is None else read_map(identity_map, key, evidence)
    ordered = evidence.sorted().without_placeholders()
    same_pixels = set(map(tuple, copies.tolist()))
    listed = _listed_pairs(evidence, ordered)
    given = np.array([*decided, *listed], np.int64).reshape(-1, 2)
    candidates = np.unique(np.concatenate([ordered.pairs(), copies, given]), axis=0)
    links = []
    for first, second in candidates.tolist():
        pair = (first, second)
        found, words = judge(
            ordered.of(first), ordered.of(second), same_pixels=pair in same_pixels, listed=listed.get(pair)
        )
        verdict: _Judged | None = found
        if pair in decided:
            verdict = "same" if decided[pair] else "different"
        if verdict is not None:
            links.append(Link(pair, verdict, tuple(words)))
    joining = [link.pair for link in links if link.joins or (policy == "join" and link.judged == "uncertain")]
    persons = join(len(evidence.patients), joining)
    broken = sum(
        link.judged == "different" and persons[link.pair[0]] == persons[link.pair[1]] for link in links
    )
    if broken:
        raise ConfigError(
            f"deid.identity_map calls {broken} pairs of patient IDs different that further links make one "
            "person; decide those links too, they are in identities.csv in private_dir."
        )
    people = Identities(evidence=evidence, links=tuple(links), persons=persons, copies=copied_studies)
    counts = {
        "joined": sum(map(len, people.members().values())),
        "uncertain": len(people.uncertain),
        "decided": len(decided),
        "copied_studies": len(copied_studies),
    }
    people.counts.update({name: count for name, count in counts.items() if count})
    return people


def join(num_patients: int, pairs: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    """Return the first patient of everybody's person (union-find), ``(num_patients,)``."""
    parents = list(range(num_patients))

    def root_of(number: int) -> int:
        while parents[number] != number:
            parents[number] = parents[parents[number]]
            number = parents[number]
        return number

    for first, second in pairs:
        low, high = sorted((root_of(first), root_of(second)))
        parents[high] = low
    return np.array([root_of(number) for number in range(num_patients)], np.int64)


def _listed_pairs(evidence: PatientEvidence, ordered: SortedEvidence) -> dict[tuple[int, int], Listing]:
    """Return the pairs of patients whose numbers records list together, also by a third number.

    A number in more than `MAX_SHARED` different lists is a placeholder. A third one may be a family's, an
    insurer's or a donor's: if nobody is said to have issued it, or if the issuer of both patients' numbers
    is one, who gives a patient one number, the pair is no more than possible.
    """
    lists = _linking_lists(evidence, ordered)
    owners = ordered.owners_of({number for one in lists for number, _ in one})
    nodes: dict[tuple[int, ...], int] = {}
    lists_of: dict[int, set[int]] = {}
    chains: dict[Listing, list[tuple[int, int]]] = {"possible": [], "certain": []}
    for place, one in enumerate(lists):
        sure = [entry for entry in one if entry[1] or entry[0] in owners]
        for chain, entries in zip(chains.values(), (one, sure), strict=True):
            chain += pairwise(nodes.setdefault(entry, len(nodes)) for entry in entries)
        for number, _ in one:
            if number in owners:
                lists_of.setdefault(number, set()).add(place)
    issuers: dict[int, set[int]] = {}
    for number, issuer in nodes:
        issuers.setdefault(number, set()).add(issuer)

    def share_issuer(first: int, second: int) -> bool:
        """Return whether one issuer numbered two patients, in no list together."""
        numbers = [
            [one for one in own_numbers(ordered.of(patient)) if one in lists_of]
            for patient in (first, second)
        ]
        return any(
            (issuers[one] & issuers[other]) - {0} and lists_of[one].isdisjoint(lists_of[other])
            for one in numbers[0]
            for other in numbers[1]
        )

    found = [
        (node, patient, len(owners[number]) == 1 and may_be_issued_by(ordered.of(patient), issuer))
        for (number, issuer), node in nodes.items()
        for patient in owners.get(number, ())
    ]
    at = np.array([one[0] for one in found], np.int64)
    patients = np.array([one[1] for one in found], np.int64)
    is_sure = np.array([one[2] for one in found], np.bool_)
    pairs: dict[tuple[int, int], Listing] = {}
    steps: tuple[tuple[Any, Listing, Listing], ...] = (
        (slice(None), "possible", "possible"),
        (slice(None), "certain", "uncertain"),
        (is_sure, "certain", "certain"),
    )
    groups = {linked: join(len(nodes), chain).astype(np.uint64)[at] for linked, chain in chains.items()}
    for chosen, linked, verdict in steps:
        for first, second in pairs_of_equal(groups[linked][chosen], patients[chosen]).tolist():
            numbers = own_numbers(ordered.of(first)), own_numbers(ordered.of(second))
            if numbers[0].isdisjoint(numbers[1]):
                pairs[first, second] = "possible" if share_issuer(first, second) else verdict
    return pairs


def _linking_lists(evidence: PatientEvidence, ordered: SortedEvidence) -> list[Listed]:
    """Return the lists, of those numbers alone that are a patient's, or in another list, if two remain.

    Most lists of a hospital are of one patient of the images and a number that nothing else names: they cost
    no memory beyond their own.
    """

    def distinct() -> Iterator[set[int]]:
        return ({number for number, _ in one} for one in evidence.listed)

    numbers = np.fromiter((number for one in distinct() for number in one), np.uint64)
    places = np.repeat(np.arange(len(evidence.listed)), np.fromiter(map(len, distinct()), np.int64))
    _, which, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    num_lists = counts[which]
    matters = (num_lists <= MAX_SHARED) & ((num_lists > 1) | ordered.are_own(numbers))
    is_kept = np.bincount(places[matters], minlength=len(evidence.listed)) > 1
    kept = set(numbers[matters & is_kept[places]].tolist())
    return [
        tuple(entry for entry in one if entry[0] in kept)
        for one, is_linking in zip(evidence.listed, is_kept.tolist(), strict=True)
        if is_linking
    ]


def _copies(
    files: FileTable, evidence: PatientEvidence, known: KnownImages | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return pairs of patients that share an image, and the pairs of studies of one that do."""
    studies = files.studies
    patient_of = np.full(len(studies) + 1, _NOBODY, np.int64)  # NO_STUDY selects the last
    for study in range(len(studies)):
        patient = studies.patient_of(study)
        if patient:
            patient_of[study] = evidence.add(patient, ())
    pixels, study_of = files.pixels, files.study
    if known is not None:
        pixels = np.concatenate([pixels, known[0]])
        study_of = np.concatenate([study_of, known[1]])
    chosen = (pixels != 0) & (study_of != NO_STUDY)
    chosen &= patient_of[study_of] != _NOBODY
    pixels, study_of = pixels[chosen], study_of[chosen].astype(np.int64)
    of_studies = pairs_of_equal(pixels, study_of)
    is_one = patient_of[of_studies[:, 0]] == patient_of[of_studies[:, 1]]
    return pairs_of_equal(pixels, patient_of[study_of]), of_studies[is_one]


def read_map(path: Path, key: SecretKey, evidence: PatientEvidence) -> dict[tuple[int, int], bool]:
    """Read the operator's decisions on pairs of patients that the job knows.

    Args:
        path: CSV with the columns ``decision`` (``same``, ``different``, or empty), ``patient_id`` and
            ``other_patient_id`` (patient IDs as in the headers, or surrogates); others are not read.
        key: Makes the surrogates.
        evidence: Patients that the job knows; other lines are of other data.

    Raises:
        ConfigError: It cannot be read, or a line is not of this form.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"))))
    except (OSError, UnicodeError, csv.Error) as error:
        raise ConfigError(
            f"deid.identity_map must be a readable CSV file in UTF-8, got {os_reason(error)}."
        ) from None
    decided: dict[tuple[int, int], bool] = {}
    for line, row in enumerate(rows, start=2):
        decision = (row.get("decision") or "").strip().lower()
        pair = [(row.get(name) or "").strip() for name in _COLUMNS[1:3]]
        if not all(pair) or decision not in {"", *_DECISIONS}:
            raise ConfigError(
                f"deid.identity_map must have the columns {', '.join(_COLUMNS[:3])}, with same, different or "
                f"nothing as the decision, but line {line} has not; correct it."
            )
        numbers = [_patient(one, key, evidence) for one in pair]
        if not decision or None in numbers or numbers[0] == numbers[1]:
            continue
        first, second = sorted(number for number in numbers if number is not None)
        if decided.setdefault((first, second), _DECISIONS[decision]) is not _DECISIONS[decision]:
            raise ConfigError(f"deid.identity_map decides the pair of line {line} twice; remove one.")
    return decided


def _patient(text: str, key: SecretKey, evidence: PatientEvidence) -> int | None:
    number = evidence.find(text)
    return evidence.find(key.surrogate("patient", text)) if number is None else number


def write_list(identities: Identities, files: FileTable, workspace: Workspace) -> None:
    """Write the links into the private folder, as a table that may be given back as ``deid.identity_map``.

    ``copies.csv`` lists the pairs of studies of one patient that share an image, by their sample keys.

    Raises:
        StorageError: It cannot be written, or a header row cannot be read back.
    """
    copies, keys = workspace.private / "copies.csv", files.studies.keys
    lines = [f"{keys[first]},{keys[second]}\n" for first, second in identities.copies[:_MAX_LISTED].tolist()]
    if lines:
        table = "".join(["sample_key,other_sample_key\n", *sorted(lines)]).encode("ascii")
        write_atomic(copies, [table], replace=True, mode=0o600)
    else:
        copies.unlink(missing_ok=True)
    listed = identities.links[:_MAX_LISTED]
    path = workspace.private / "identities.csv"
    if not listed:
        path.unlink(missing_ok=True)
        return
    names = _patient_ids({one for link in listed for one in link.pair}, identities, files, workspace)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for link in listed:
        decision = link.judged if link.judged in _DECISIONS else ""
        judged = link.judged if not decision else "decided"
        writer.writerow([decision, *(names[one] for one in link.pair), judged, " ".join(link.evidence)])
    data = text.getvalue().encode("utf-8", "surrogatepass")
    write_atomic(path, [data], replace=True, mode=0o600)


def _patient_ids(
    wanted: set[int], identities: Identities, files: FileTable, workspace: Workspace
) -> dict[int, str]:
    """Return patient IDs as the headers write them; the surrogate of a patient whose files were not read."""
    evidence = identities.evidence
    names = {number: evidence.patients[number] for number in wanted}
    row_of: dict[int, int] = {}
    for row in np.flatnonzero(files.study != NO_STUDY).tolist():
        number = evidence.find(files.studies.patients[files.study[row]])
        if number in wanted and number not in row_of and files.row_num_bytes[row]:
            row_of[number] = row
    numbers = sorted(row_of)
    places = [RowPlace.of(files, row_of[number]) for number in numbers]
    for number, read in zip(numbers, read_rows(workspace.headers, places), strict=True):
        stated = read.patient_id if read.header is None else read.header.patient_id
        names[number] = stated or names[number]
    return names


def write_evidence(identities: Identities, path: Path) -> None:
    """Write the evidence of all patients: one JSON line for each, with its surrogate and keyed digests.

    The line of a patient who is one person with others names the person (``person``), and the identifier
    that it appears under, if that is another (``patient_key``), with the offsets of its ``dates``. ``listed``
    holds digests of the numbers that records list together with the patient's.

    Raises:
        StorageError: It cannot be written.
    """
    ordered = identities.evidence.sorted()
    lists: dict[int, list[Listed]] = {}
    for listed in identities.evidence.listed:
        for number in {number for number, _ in listed}:
            lists.setdefault(number, []).append(listed)
    person_of = {one: patients[0] for patients in identities.members().values() for one in patients}

    def lines() -> Iterator[bytes]:
        for number, patient in enumerate(identities.evidence.patients):
            tokens = ordered.of(number)
            entry: dict[str, Any] = {"patient": patient, "evidence": [f"{token:016x}" for token in tokens]}
            named = sorted(one for own in own_numbers(tokens) for one in lists.get(own, ()))
            if named:
                entry["listed"] = named
            if patient in person_of:
                entry["person"] = person_of[patient]
            if patient in identities.published:
                published = identities.published[patient]
                entry |= {"patient_key": published.patient_key, "dates": published.dates.to_int()}
            yield encode_evidence(entry)

    write_atomic(path, lines(), replace=True, mode=0o600)


def encode_evidence(entry: Mapping[str, Any]) -> bytes:
    """Encode the line of a patient."""
    return json.dumps(entry, separators=(",", ":")).encode("ascii") + b"\n"


def read_evidence(path: Path) -> Iterator[dict[str, Any]]:
    """Read back the lines that `write_evidence` wrote; none for a version of an earlier release.

    Raises:
        FormatError: The file is damaged.
        StorageError: It cannot be read.
    """
    if not path.exists():
        return
    with reading_private("the evidence of identity (people-*.jsonl)"), path.open("rb") as file:
        for line in file:
            entry = json.loads(line)
            kept = {name: str(entry[name]) for name in ("person", "patient_key") if name in entry}
            dates = {"dates": int(entry["dates"])} if "patient_key" in kept else {}
            listed = [[[int(one), int(by)] for one, by in each] for each in entry.get("listed", ())]
            evidence = [*map(str, entry["evidence"])]
            named = {"listed": listed} if listed else {}
            yield {"patient": str(entry["patient"]), "evidence": evidence, **named, **kept, **dates}


def load_evidence(path: Path, evidence: PatientEvidence) -> dict[str, PublishedPerson]:
    """Add the evidence of a version to that of the inputs.

    Returns:
        Patients that appear under the identifier of another, by surrogate.

    Raises:
        FormatError: The file is damaged.
        StorageError: It cannot be read.
    """
    found = {}
    for entry in read_evidence(path):
        evidence.add(entry["patient"], tuple(int(token, 16) for token in entry["evidence"]))
        evidence.add_lists(tuple(map(tuple, one)) for one in entry.get("listed", ()))
        if "patient_key" in entry:
            dates = DateOffsets.from_int(entry["dates"])
            found[entry["patient"]] = PublishedPerson(patient_key=entry["patient_key"], dates=dates)
    return found
