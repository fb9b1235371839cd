"""The officer's page: what de-identification did to one version of a dataset, signed, for the private folder.

It shows images that were held back or blanked, which are pixels of patients and may show their names: the page never
belongs in the dataset. The signature is a keyed hash of the page with the dataset's secret key: whoever has
the private folder can tell a page that was changed.

Source: DICOM PS3.15 Annex E (Table E.1-1) and PS3.16 CID 7050, edition 2024b; 45 CFR 164.514(b)(2).
"""
# ruff: noqa: E501, ISC004 - sentences of the page stand in one line each

from __future__ import annotations

import csv
import hashlib
import hmac
import json
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, Final

from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.manifest import Manifest
from shardflow.format.reasons import HELD_BACK, Reason
from shardflow.packing.deid.allowlist import MAX_AGE_YEARS
from shardflow.packing.deid.pixel_rules import PAGE, TEXT
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.people import read_evidence
from shardflow.packing.studies.pictures import MOST_OF_A_KIND, read_pictures
from shardflow.packing.workspace import Workspace, reading_private
from shardflow.viewing.markup import document, note, section, table

_BURNED_IN, _FACE_RISK = Reason.BURNED_IN_ANNOTATION.value, Reason.FACE_RISK.value
_NOT_IMAGES: Final = ("attachment", "report")
"""Kinds of inputs that show nothing."""
_MARK: Final = "<p class=note>Signature <code>"
_END: Final = "</code></p>\n</main>"
_KIND: Final = "privacy-page-1"
_STYLE: Final = (
    "section .scroll+.scroll{margin-top:22px}.gallery img{max-width:100%}header code{white-space:nowrap}"
)
"""Beside that of the dataset's page."""
_OPTIONS: Final = (
    (
        "113100",
        "Basic Application Confidentiality Profile",
        "only listed attributes are read into the dataset",
    ),
    (
        "113101",
        "Clean Pixel Data Option",
        "boxes of the rules are blanked; suspect images are held back, or searched for text (deid.pixel_text)",
    ),
    (
        "113102",
        "Clean Recognizable Visual Features Option",
        "volumes of heads are flagged, held back, or freed of the face, by deid.face_risk",
    ),
    ("113103", "Clean Graphics Option", "overlays, curves and graphics are never kept"),
    (
        "113104",
        "Clean Structured Content Option",
        "of structured documents only codes, numbers and scrubbed texts",
    ),
    ("113105", "Clean Descriptors Option", "descriptions are not kept; reports are scrubbed"),
    ("113106", "Retain Longitudinal Temporal Information Full Dates Option", "never"),
    ("113107", "Retain Longitudinal Temporal Information Modified Dates Option", "by deid.dates"),
    ("113108", "Retain Patient Characteristics Option", "sex, and age in years up to 89"),
    ("113109", "Retain Device Identity Option", "never; the manufacturer alone is kept"),
    ("113110", "Retain UIDs Option", "never; keyed surrogates"),
    ("113111", "Retain Safe Private Option", "never"),
    ("113112", "Retain Institution Identity Option", "never"),
)
_ALWAYS: Final = frozenset({"113103", "113104"})
"""Options that hold because nothing of the kind is kept; they are no code of the dataset."""
_DATES: Final = {
    "days": "days between studies, from an origin of the person's own; no calendar date",
    "shift": "calendar dates, moved by a number of days of the person's own",
    "remove": "none",
}
_RULES: Final = {
    (_BURNED_IN, "declared"): "the file declares text (BurnedInAnnotation = YES)",
    (_BURNED_IN, "screen_save"): "the image type is that of a screen save or dose report",
    (_BURNED_IN, "report_page"): "the series is called a report, protocol, screen save or form",
    (_BURNED_IN, "protocol_page"): "the protocol is called so",
    (_BURNED_IN, "secondary_capture"): "secondary capture",
    (_BURNED_IN, "called_secondary_capture"): "the series is called a secondary capture",
    (_BURNED_IN, "converted"): "converted from video, film, paper or a workstation",
    (_BURNED_IN, "ultrasound"): "ultrasound",
    (_BURNED_IN, "ultrasound_class"): "ultrasound, by the kind of object",
    (_BURNED_IN, "fluoroscopy"): "fluoroscopy or angiography",
    (_BURNED_IN, "photography"): "photograph, endoscopy, document or other",
    (_BURNED_IN, "colour_slices"): "CT or MR in color",
    (_BURNED_IN, "rendering"): "rendering of a volume, or a report",
    (_BURNED_IN, PAGE): "page of text, by its pixels",
    (_BURNED_IN, TEXT): "text was found in the pixels",
    (_FACE_RISK, "head"): "the volume is called a head",
    (_FACE_RISK, "declared"): "the file declares a face (RecognizableVisualFeatures = YES)",
    (_FACE_RISK, "volume"): "a head was found in the volume",
}
"""What the shipped rules look for, by reason and name."""
_COUNTS: Final = {
    "blackout_slices": ("slices with boxes that a rule of the site blanks", "slices"),
    "defaced_slices": ("slices of heads without their faces", "slices"),
    "face_risk_series": ("series of heads", "series"),
    "text_blanked_slices": ("slices with text that was found and blanked", "slices"),
    "text_searched_slices": ("slices that were searched for text", "slices"),
}
"""What is counted, and what it is a part of."""
_FACES: Final = {"flag": "no, flagged", "quarantine": "held back", "deface": "defaced"}
_PATIENTS: Final = "patient IDs"
_APART: Final = "of them under several patient keys"
_UNDECIDED: Final = "pairs of patient IDs that may be one person, undecided"
_MOST_PICTURES: Final = 96
"""Of images that were held back or blanked; the last ones are shown."""
_MIN_RECALL: Final = 0.995
_MIN_PIXEL_RECALL: Final = 0.99


def privacy_page_path(private: Path, version: int) -> Path:
    """Return where the page of a version is written: ``privacy-000001.html`` in the private folder."""
    return private / f"privacy-{version:06d}.html"


def render_privacy_page(
    dataset: Dataset,
    private: Path,
    key: SecretKey,
    measured: Mapping[str, Any],
    pixels: Mapping[str, Any] | None = None,
) -> bytes:
    """Write the page of a version.

    Args:
        dataset: The version.
        private: Its private folder.
        key: Its secret key.
        measured: Results on the planted corpus with the settings of the version, as
            `shardflow.synthetic.identifiers.Measured.table` returns them.
        pixels: Likewise of text in pixels, as `shardflow.synthetic.identifiers.MeasuredPixels.table` returns
            them; None if pixels are not searched.

    Returns:
        HTML in UTF-8, self-contained. The same version, key, measurement and inputs give the same bytes.

    Raises:
        ConfigError: The dataset was not packed with this key, or records no de-identification.
    """
    manifest = dataset.manifest
    deid, config = manifest.extra.get("deidentification"), manifest.extra.get("config")
    if not isinstance(deid, dict) or not isinstance(config, dict):
        raise ConfigError("this dataset records no de-identification; only datasets of shardflow pack do.")
    if manifest.key_id != key.key_id:
        raise ConfigError("this secret key is not the dataset's; give that of its private folder.")
    settings = config["deid"]
    persons, totals = _count_persons(manifest, private), _totals(dataset)
    images = _count_images(manifest, private)
    body = "".join(
        [
            f"<header><h1>De-identification</h1><p class=id>{dataset.dataset_id}</p>"
            f"<p>Version {dataset.manifest_version} of the dataset, key {escape(key.key_id)}. For its privacy officer, in the private "
            "folder: it shows what was held back, and must not go where the dataset goes. <code>shardflow report DATASET "
            "--privacy PRIVATE_DIR --check</code> tells whether the page is as it was signed with the secret key.</p></header>",
            _cards(persons, totals, images),
            section("Open questions", _questions(manifest, settings, measured, pixels, persons)),
            section("Images held back or blanked", _images(images)),
            section("Texts and slices", _counts(deid, totals)),
            section("Persons", table(("in the evidence of identity", "#number"), [(escape(name), f"{count:,}") for name, count in persons.items()])),
            section("Dates and ages", _dates(settings)),
            section("Profile and options of DICOM PS3.15 Annex E", _profile(deid, settings)),
            section("Measured on generated texts", _measured(measured, settings)),
            section("Measured on generated images", _measured_pixels(settings, pixels)),
            section("Pictures of what was held back or blanked", _thumbnails(manifest, private)),
            section("Settings", _settings(settings)),
            section("Software that made this version", table(("package", "version"), [(escape(a), escape(b)) for a, b in sorted(manifest.created_with.items())])),
        ]
    )  # fmt: skip
    style = resources.files("shardflow.viewing").joinpath("assets", "page.css").read_text(encoding="utf-8")
    page = document(
        f"De-identification of version {dataset.manifest_version}",
        body,
        style=style + _STYLE,
        policy="style-src 'unsafe-inline'; img-src data:",
    )
    return _sign(page, key).encode("utf-8")


def is_signed(page: bytes, key: SecretKey) -> bool:
    """Return whether a page is exactly as it was written with this key."""
    text = page.decode("utf-8", "replace")
    before, mark, rest = text.partition(_MARK)
    signature, end, after = rest.partition(_END)
    if not mark or not end:
        return False
    signed = _signature(f"{before}</main>{after}", key)
    return hmac.compare_digest(signature.encode(), signed.encode())


def _sign(page: str, key: SecretKey) -> str:
    before, _, after = page.rpartition("</main>")
    return f"{before}{_MARK}{_signature(page, key)}{_END}{after}"


def _signature(page: str, key: SecretKey) -> str:
    return key.surrogate(_KIND, hashlib.sha256(page.encode("utf-8")).hexdigest())


def _totals(dataset: Dataset) -> dict[str, int]:
    """Count what the version holds, which counts of de-identification are a part of."""
    samples = dataset.samples
    return {
        "reports": int((samples.column("text_bytes") > 0).sum()),
        "series": int(samples.column("num_series").sum()),
        "slices": int(samples.column("num_slices").sum()),
        "studies": samples.num_samples,
    }


def _cards(persons: Mapping[str, int], totals: Mapping[str, int], images: _Images | None) -> str:
    shown = [
        (persons[_PATIENTS], "patient IDs"),
        (totals["studies"], "studies packed"),
        (totals["reports"], "reports packed"),
        (totals["slices"], "slices packed"),
    ]
    if images is not None:
        shown.append((images.num_held, "images held back"))
    cards = (f"<div class=card><b>{count:,}</b><span>{name}</span></div>" for count, name in shown)
    return f"<div class=cards>{''.join(cards)}</div>"


@dataclass(kw_only=True, slots=True)
class _Images:
    """Images among the inputs of a version, and what rules did to them."""

    num_images: int = 0
    num_held: int = 0
    num_blanked: int = 0
    held: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Images by reason and rule; several rules may hold one back."""
    blanked: Counter[tuple[str, str]] = field(default_factory=Counter)


def _count_images(manifest: Manifest, private: Path) -> _Images | None:
    """Count images by the rule that held them back or found text; None without a private ledger."""
    path = Workspace(output=private, private=private).private_ledger(
        str(manifest.extra.get("plan_digest", ""))
    )
    if not path.is_file():
        return None
    found = _Images()
    with reading_private("the private ledger (inputs-*.jsonl)"), path.open("rb") as lines:
        for entry in map(json.loads, lines):
            if entry["kind"] in _NOT_IMAGES:
                continue
            found.num_images += 1
            rules, reason = entry.get("rules", ()), entry["reason"]
            if reason in HELD_BACK:
                found.num_held += 1
                found.held.update((reason, rule) for rule in rules)
            elif "blanked" in entry:
                found.num_blanked += 1
                found.blanked.update((_BURNED_IN, rule) for rule in rules)
    return found


def _images(images: _Images | None) -> str:
    if images is None:
        return "<p>The private folder has no ledger of this version (inputs-*.jsonl): images cannot be counted by rule.</p>"
    total = images.num_images
    rows = [
        (f"<code>{escape(rule)}</code>", _RULES.get((reason, rule), "rule of the site"),
         f"{images.held[reason, rule]:,}", f"{images.blanked[reason, rule]:,}")
        for reason, rule in sorted({*images.held, *images.blanked})
    ]  # fmt: skip
    said = (
        f"Of {total:,} images among the inputs {images.num_held:,} ({_percent(images.num_held, total)}) were held back, and "
        f"{images.num_blanked:,} ({_percent(images.num_blanked, total)}) were packed with text blanked. Several rules may apply to an "
        "image. deid.accept, or [[accept]] in deid.rules_file for a device, packs what a rule holds back."
    )
    columns = ("rule", "what it looks for", "#held back", "#blanked")
    return note(escape(said)) + (table(columns, rows) if rows else "")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.2f} %"


def _counts(deid: Mapping[str, Any], totals: Mapping[str, int]) -> str:
    rows = []
    for name, count in sorted(deid.get("counts", {}).items()):
        if name in _COUNTS:
            what, whole = _COUNTS[name]
            rows.append((what, f"{count:,}", f"of {totals[whole]:,} {whole}"))
        else:
            category = name.removeprefix("report_").replace("_", " ")
            what = f"places replaced by [{escape(category.upper())}]"
            rows.append((what, f"{count:,}", f"in {totals['reports']:,} reports"))
    if not rows:
        return "<p>Nothing was replaced in a report, and no slice changed.</p>"
    return table(("what was done", "#number", "in all"), rows)


def _settings(settings: Mapping[str, Any]) -> str:
    rows = [
        (f"<code>deid.{escape(name)}</code>", escape(json.dumps(value)))
        for name, value in sorted(settings.items())
    ]
    return note("As recorded in the manifest; docs/deidentification.md explains each.") + table(
        ("setting", "value"), rows
    )


def _count_persons(manifest: Manifest, private: Path) -> dict[str, int]:
    """Count patients and persons in the evidence of the version, and undecided pairs of the newest job."""
    evidence = Workspace(output=private, private=private).people_ledger(
        str(manifest.extra.get("plan_digest", ""))
    )
    keys_of: defaultdict[str, set[str]] = defaultdict(set)
    num_patients = 0
    for entry in read_evidence(evidence):
        num_patients += 1
        if "person" in entry:
            keys_of[entry["person"]].add(entry.get("patient_key", entry["patient"]))
    listed = private / "identities.csv"
    undecided = 0
    if listed.is_file():
        with listed.open(encoding="utf-8", errors="surrogatepass", newline="") as file:
            undecided = sum(row["link"] == "uncertain" for row in csv.DictReader(file))
    return {
        _PATIENTS: num_patients,
        "persons with several patient IDs": len(keys_of),
        _APART: sum(len(keys) > 1 for keys in keys_of.values()),
        _UNDECIDED: undecided,
    }


def _dates(settings: Mapping[str, Any]) -> str:
    rows = [
        ("dates", _DATES[settings["dates"]]),
        ("consistency", "one origin or shift a person, from key and patient identifier (several that are certainly linked share"
         " it): the same in studies, reports, records, waveforms and later versions"),
        ("times between images and records", "whole days" if settings.get("times") == "day"
         else f"to the {escape(str(settings.get('times', 'second')))}; no time of day"),
        ("ages", f"whole years; {MAX_AGE_YEARS} stands for every age above {MAX_AGE_YEARS - 1}; removed from texts above"
         f" {MAX_AGE_YEARS - 1}; no date of a record that would tell one"),
    ]  # fmt: skip
    return table(("what", "how"), rows)


def _profile(deid: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    codes = {str(code) for code in deid.get("profile_codes", ())}
    rows = []
    for code, name, how in _OPTIONS:
        state = "yes" if code in codes or code in _ALWAYS else "no"
        if code == "113102":
            state = _FACES.get(str(settings.get("face_risk")), "no")
        rows.append((code, escape(name), escape(state), escape(how)))
    return table(("code", "profile or option", "applied", "how"), rows)


def _measured(measured: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    languages = list(measured["by_language"])
    rows = [
        (escape(category), *(f"{found} of {planted}" for found, planted in (row[name] for name in languages)))
        for category, row in measured["by_category"].items()
    ]
    rows.append(("<b>all</b>", *(f"{measured['by_language'][name]['recall']:.4f}" for name in languages)))
    model = (
        "The model of deid.model, which only adds to that, was not asked. "
        if "model_sha256" in settings
        else ""
    )
    text = (
        f"{measured['identifiers']:,} generated identifiers of 18 categories, with this dataset's settings and nothing "
        f"known from headers: recall {measured['recall']:.4f}; lost: {100 * measured['clinical_words_lost_share']:.2f} % of the words of "
        f"findings, {100 * measured['other_words_lost_share']:.2f} % of those around identifiers. {model}Generated sentences are no measure of "
        "your reports: read a sample of these before a release."
    )
    return note(escape(text)) + table(("category", *(f"#found, {escape(name)}" for name in languages)), rows)


def _measured_pixels(settings: Mapping[str, Any], pixels: Mapping[str, Any] | None) -> str:
    if pixels is None:
        return "<p>Pixels are not searched for text (deid.pixel_text): images that a rule suspects are held back.</p>"
    text = (
        f"{pixels['lines']:,} lines of text in {pixels['images']:,} generated CT, MR, radiographs and ultrasound, with this dataset's models: "
        f"recall {pixels['recall']:.4f}; {100 * pixels['wrong_area_share']['mean']:.3f} % of the area blanked where there is no text; "
        f"{pixels['markers_kept'][0]} of {pixels['markers_kept'][1]} markers kept. Of images that no rule suspects {100 * float(settings['pixel_text_share']):g} % "
        "were searched. Look at a sample of your own images before a release."
    )
    rows = [
        (escape(by), escape(name), f"{found} of {planted}")
        for by, groups in pixels["by"].items()
        for name, (found, planted) in groups.items()
    ]
    return note(escape(text)) + table(("by", "group", "#lines found"), rows)


def _questions(
    manifest: Manifest,
    settings: Mapping[str, Any],
    measured: Mapping[str, Any],
    pixels: Mapping[str, Any] | None,
    persons: Mapping[str, int],
) -> str:
    done: Any = manifest.extra["deidentification"]
    counts: Mapping[str, int] = done.get("counts", {})
    flags, blanked = int(counts.get("face_risk_series", 0)), int(counts.get("text_blanked_slices", 0))
    defaced = int(counts.get("defaced_slices", 0))
    asked = [
        (settings["report_text"] == "keep", "Reports are unchanged (deid.report_text = keep): who de-identified them?"),
        (settings["report_text"] == "scrub", "Reports keep words on no list (deid.report_text = scrub): are names in them known from headers?"),
        (bool(settings["accept"]), f"Images of these rules were packed although they may show text: {', '.join(settings['accept'])}. Who looked at them?"),
        (bool(settings["trust_declared_clean"]), "BurnedInAnnotation = NO was trusted. Is it true on every device?"),
        (pixels is None, "Pixels were not searched for text: do devices without a rule write names into images?"),
        (pixels is not None and float(settings.get("pixel_text_share", 1)) < 1, "Images that no rule suspects were searched in part: do the pictures below show text in any of them?"),
        (pixels is not None and float(pixels["recall"]) < _MIN_PIXEL_RECALL, f"Recall on generated text in images is below {_MIN_PIXEL_RECALL}: who looks at a sample of the images that rules suspect?"),
        (defaced > 0, f"Faces were cut off in {defaced:,} slices: does a sample show a face, or a cut through the brain?"),
        (blanked > 0, f"Text was blanked in {blanked:,} slices: do the boxes hide anything that a reader needs?"),
        (flags > 0 and settings["face_risk"] == "flag", f"{flags:,} series of heads were packed with a flag: may their faces be published?"),
        (settings["dates"] != "remove" and settings.get("times", "second") == "second", "Intervals are exact to the second: does the dataset leave the circle of those who may see the records?"),
        (persons[_UNDECIDED] > 0, f"{persons[_UNDECIDED]:,} pairs of patient IDs may be one person each, and in two splits (identities.csv in the private folder): are they?"),
        (persons[_APART] > 0, f"{persons[_APART]:,} persons have several patient keys: are folds dealt with --private-dir?"),
        (float(measured["recall"]) < _MIN_RECALL, f"Recall on generated identifiers is below {_MIN_RECALL}: which settings lower it?"),
        (True, "Combinations (a rare disease, a small hospital) may identify a person. Has an expert judged that?"),
    ]  # fmt: skip
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for is_open, text in asked if is_open) + "</ul>"


def _thumbnails(manifest: Manifest, private: Path) -> str:
    path = Workspace(output=private, private=private).pictures(str(manifest.extra.get("plan_digest", "")))
    if not path.is_file():
        return "<p>This version was packed without pictures of what was held back or blanked.</p>"
    # A version's own pictures are behind those of the versions before it.
    entries, num_pictures = deque[dict[str, Any]](maxlen=_MOST_PICTURES), 0
    for num_pictures, entry in enumerate(read_pictures(path), start=1):  # noqa: B007 - their number
        entries.append(entry)
    if not num_pictures:
        return "<p>No image was held back or blanked.</p>"
    shown = [
        f'<figure><img alt="" src="data:image/png;base64,{entry["png"]}"><figcaption>{escape(entry["reason"] or "packed, boxes blanked")}<br>'
        f"{escape(', '.join(entry['rules']))}<br><code>{escape(entry['input'])}</code></figcaption></figure>"
        for entry in entries
    ]
    remark = f"Some images of each kind: up to {MOST_OF_A_KIND} of each job, two of a study. Boxes that were blanked are red. "
    remark += (
        "The code of an image stands in inputs-*.jsonl of the private folder, with the path of its file."
    )
    if num_pictures > len(entries):
        remark += f" Shown are the last {len(entries)} of {num_pictures:,}; all are in {path.name}."
    return f"<div class=gallery>{''.join(shown)}</div>{note(escape(remark))}"
