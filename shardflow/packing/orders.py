"""Find the studies that a report belongs to: by what it names them, else by its order.

An order is an accession number together with a patient: other hospitals use the same accession numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from shardflow.packing.inventory import NO_STUDY
from shardflow.packing.links import digest64
from shardflow.sources.reasons import Reason
from shardflow.sources.reports import BrokenReport, ReportRecord

if TYPE_CHECKING:
    from shardflow.deid.pseudonyms import SecretKey
    from shardflow.packing.inventory import StudyTable

__all__ = ["StudyFinder"]


class StudyFinder:
    """Finds studies of reports.

    Args:
        studies: The studies of the header pass.
        key: Makes the surrogates.
        copies: Whether a report of several studies is copied to each; else it is ambiguous.
    """

    def __init__(self, studies: StudyTable, key: SecretKey, *, copies: bool) -> None:
        self._studies = studies
        self._key = key
        self._copies = copies
        self._by_order: dict[tuple[str, int], list[int]] | None = None

    def find(
        self, record: ReportRecord | BrokenReport
    ) -> Iterator[tuple[ReportRecord | BrokenReport, str, int]]:
        """Return a report with the surrogate and number of its study, once for each study that it names."""
        named = self._key.surrogate("study", record.study_instance_uid)
        study = self._studies.find(named)
        if study != NO_STUDY or isinstance(record, BrokenReport) or not record.accessions:
            yield record, named, study
            return
        found = self._with_order(record)
        if not found:
            yield record, named, NO_STUDY
        for number in found:
            is_ambiguous = len(found) > 1 and not self._copies
            one = (
                BrokenReport(place=record.place, reason=Reason.AMBIGUOUS_LINK, detail="")
                if is_ambiguous
                else replace(record, accessions=())
            )
            yield one, self._studies.keys[number], number

    def _with_order(self, record: ReportRecord) -> list[int]:
        """Studies of the surest accession number that the patient has studies with."""
        if self._by_order is None:
            self._by_order = self._read_orders()
        patients = [self._key.surrogate("patient", patient.strip()) for patient in record.patient_ids]
        for accession in record.accessions:
            digest = digest64(accession.strip())
            found = {study for patient in patients for study in self._by_order.get((patient, digest), ())}
            if found:
                return sorted(found)
        return []

    def _read_orders(self) -> dict[tuple[str, int], list[int]]:
        orders: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for number, (patient, facts) in enumerate(
            zip(self._studies.patients, self._studies.facts, strict=True)
        ):
            if patient and facts.accession:
                orders[patient, facts.accession].append(number)
        return dict(orders)
