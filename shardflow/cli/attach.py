"""``shardflow attach``, ``entities`` and ``folds``: tables and views beside the shards of a dataset."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from shardflow.cli.common import (
    add_dataset,
    add_json,
    add_threads,
    add_where,
    choose_samples,
    natural_number,
    open_dataset,
    positive_number,
    show_lines,
    show_table,
    step_progress,
    write_json,
    write_result,
)
from shardflow.errors import ConfigError
from shardflow.format.entities import EntityRules, EntityText
from shardflow.logs import counted

if TYPE_CHECKING:
    from shardflow.format import Dataset
    from shardflow.packing.tables.folds import Folds
    from shardflow.packing.tables.joining import AttachedTable
    from shardflow.storage import LocalStore


DESCRIPTION = """\
Joins the columns of FILE (CSV, JSON lines, each also .gz; Parquet) to the samples of DATASET, as the table
NAME: its columns are NAME.COLUMN in where= and in fields such as sf.Column. No shard is touched. Attaching
again under the same name makes a new version, which the next loader reads; runs resume with theirs.

Rows are found by a key. Sample keys need nothing else; UIDs, accession numbers, patient IDs and paths need
the private folder of packing, where rows that do not fit are listed. Keys never enter the dataset, and
neither do columns that look like identifiers, dates or free text, unless --columns names them.

With --name NAME --remove the table is gone for loaders that open the dataset from then on; earlier versions
stay for runs that resume. --delete-old --runs DIR deletes all versions but the newest, of NAME or of all
tables, except those that a loader.lock.json below DIR names.

With --facts instead of FILE, writes the tables of facts from study.json, which fields of images and
expressions need: one row per series (role, geometry, codec, flags) and one per study (age, sex, body part,
day, the person's earlier study). Packing writes both. A job that was stopped resumes where it was. What the
study.json of an earlier version lacks is read again from the headers of the DICOM files that were packed,
with --source DIR and --private-dir.

With --voxels, writes at most 256 voxels of each class of annotations in each series, around which
sf.Volume(center="foreground") cuts regions, and the box around them, and the same of the body of each volume.
Packing writes it too. Samples that an earlier version had are taken from its table.
"""
EXAMPLES = """\
examples:
  shardflow attach my-dataset labels.csv --name chexpert --on study_instance_uid --private-dir private
  shardflow attach my-dataset scores.parquet --name scores --on sample_key --columns risk,age_years
  shardflow attach my-dataset --name chexpert --remove
  shardflow attach my-dataset --delete-old --runs /scratch/runs
  shardflow attach my-dataset --facts
  shardflow attach my-dataset --facts --source dicom --private-dir private
  shardflow attach my-dataset --voxels
"""
_KEYS = (
    "study_instance_uid",
    "accession_number",
    "patient_id",
    "series_instance_uid",
    "sop_instance_uid",
    "sample_key",
    "path",
)
_UNITS = ("study", "series", "image")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow attach``."""
    add_dataset(parser)
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, help="table to join")
    parser.add_argument("--name", help="name of the table: a-z, 0-9 and _")
    parser.add_argument("--on", choices=_KEYS, help="what its rows are found by")
    parser.add_argument("--key-column", metavar="COLUMN", help="column of the keys (the one named like --on)")
    parser.add_argument("--unit", choices=_UNITS, help="what a row describes (what the key names)")
    parser.add_argument(
        "--columns", metavar="A,B", help="columns to take (all but identifiers, dates, free text)"
    )
    parser.add_argument(
        "--type",
        action="append",
        default=[],
        metavar="COLUMN=KIND",
        help="kind of a column: bool, int, float, category, string or floats; may be repeated",
    )
    parser.add_argument(
        "--private-dir", metavar="DIR", type=Path, help="private folder that the dataset was packed with"
    )
    parser.add_argument("--key", metavar="FILE", type=Path, help="its secret key (secret.key in the folder)")
    parser.add_argument(
        "--to", metavar="DIR", type=Path, help="folder for the table, beside a read-only dataset"
    )
    parser.add_argument("--facts", action="store_true", help="write the tables of facts from study.json")
    parser.add_argument(
        "--voxels", action="store_true", help="write the table of voxels of classes and bodies"
    )
    parser.add_argument("--remove", action="store_true", help="remove the table of --name")
    parser.add_argument(
        "--delete-old", action="store_true", help="delete earlier versions of tables that no run needs"
    )
    parser.add_argument(
        "--runs",
        metavar="DIR",
        action="append",
        default=[],
        help="with --delete-old: folder of runs that must be able to resume, or none; may be repeated",
    )
    parser.add_argument(
        "--source", metavar="DIR", type=Path, help="with --facts: the packed DICOM files, to read headers of"
    )
    add_threads(parser, "shards read at once")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    wanted = (
        arguments.file is not None,
        arguments.facts,
        arguments.voxels,
        arguments.remove,
        arguments.delete_old,
    )
    if sum(wanted) != 1:
        raise ConfigError(
            "attach needs one of a file, --facts, --voxels, --remove and --delete-old; write: shardflow "
            "attach DATASET FILE --name NAME --on KEY"
        )
    if arguments.source is not None and not (arguments.facts and arguments.private_dir):
        raise ConfigError(
            "--source reads facts from headers, and needs the private folder to find their samples; write: "
            "shardflow attach DATASET --facts --source DIR --private-dir DIR"
        )
    dataset = open_dataset(arguments.dataset)
    if arguments.facts:
        _attach_facts(dataset, arguments)
        return 0
    if arguments.voxels:
        _attach_voxels(dataset, arguments)
        return 0
    if arguments.remove:
        _remove(dataset, arguments)
        return 0
    if arguments.delete_old:
        _delete_old(dataset, arguments)
        return 0
    done = _attach_file(dataset, arguments)
    write_result(arguments, asdict(done), _described(done, listed=arguments.private_dir is not None))
    return 0


def _tables_store(dataset: Dataset, arguments: argparse.Namespace) -> LocalStore:
    """Return where the tables are whose versions change: beside the dataset, or in the folder of --to."""
    from shardflow.format.foreign.places import local_folder
    from shardflow.storage import LocalStore

    if arguments.to is not None:
        return LocalStore(arguments.to)
    store = local_folder(dataset.store)
    if store is None:
        raise ConfigError(
            "Tables are removed from a dataset in a local folder, this one is remote; write --to DIR for "
            "those of a folder beside it."
        )
    return store


def _remove(dataset: Dataset, arguments: argparse.Namespace) -> None:
    from shardflow.format.tables import remove_table

    if not arguments.name:
        raise ConfigError(
            "--remove needs --name, the name of the table; `shardflow info DATASET` lists them."
        )
    store = _tables_store(dataset, arguments)
    manifest = remove_table(store, dataset.manifest.dataset_id, arguments.name)
    line = (
        f"table {manifest.name} is removed; its earlier versions stay for runs that resume, see --delete-old"
    )
    write_result(arguments, {"name": manifest.name, "number": manifest.number, "status": "removed"}, [line])


def _delete_old(dataset: Dataset, arguments: argparse.Namespace) -> None:
    from shardflow.format.manifest import load, versions
    from shardflow.format.tables import collect_tables
    from shardflow.loading.rows.lock import locked_digests

    if not arguments.runs:
        raise ConfigError(
            "--delete-old needs --runs DIR, the folder of the runs that must be able to resume; write --runs "
            "none if there are none."
        )
    folders = [Path(one) for one in arguments.runs if one != "none"]
    owners = [load(dataset.store, number).dataset_id for number in versions(dataset.store)]
    deleted, kept = collect_tables(
        _tables_store(dataset, arguments), owners, named=locked_digests(folders), name=arguments.name
    )
    shown = {
        what: [{"name": one.name, "number": one.number, "digest": one.digest} for one in found]
        for what, found in (("deleted", deleted), ("kept", kept))
    }
    lines = [f"deleted {one.name}, version {one.number}" for one in deleted] or ["no version is deleted"]
    lines += [f"kept {one.name}, version {one.number}: a run resumes with it" for one in kept]
    write_result(arguments, shown, lines)


def _attach_file(dataset: Dataset, arguments: argparse.Namespace) -> AttachedTable:
    from shardflow.packing.tables.joining import TableSettings, attach_table
    from shardflow.packing.tables.keys import PrivateFolder, key_kind
    from shardflow.packing.tables.kinds import parse_kind

    if not arguments.name or not arguments.on:
        raise ConfigError(
            "A file needs --name, the name of the table, and --on, the key of its rows, such as "
            "--name labels --on study_instance_uid."
        )
    types = {}
    for text in arguments.type:
        column, sign, kind = text.partition("=")
        if not sign:
            raise ConfigError(f"--type is COLUMN=KIND, such as age=float, got {text!r}.")
        types[column] = parse_kind(kind)
    settings = TableSettings(
        name=arguments.name,
        on=key_kind(arguments.on),
        unit=arguments.unit,
        key_column=arguments.key_column,
        columns=None if arguments.columns is None else [one.strip() for one in arguments.columns.split(",")],
        types=types,
    )
    folder = arguments.private_dir
    private = None if folder is None else PrivateFolder(path=folder, key_file=arguments.key)
    return attach_table(dataset, arguments.file, settings, private=private, to=arguments.to)


def _described(done: AttachedTable, *, listed: bool) -> list[str]:
    unit = {"study": "samples", "series": "series", "image": "images"}[done.unit]
    version = (
        f"version {done.number}" if done.is_new else f"version {done.number}, which has the same content"
    )
    columns = ", ".join(f"{name} ({kind})" for name, kind in done.columns.items())
    joined = f"{counted(done.num_file_rows, 'row')} joined to {done.num_rows:,} {unit}"
    lines = [
        f"table {done.name}, {version}: {joined}",
        f"columns: {columns}",
    ]
    counts = (
        (done.num_without_row, f"{unit} have no row; their values are missing"),
        (done.num_unmatched, f"rows name none of the {unit}"),
        (done.num_ambiguous, "rows have a key that several patients or samples share; they name none"),
        (done.num_without_key, "rows have no key"),
        (
            done.num_through_float,
            "keys were stored as floating-point numbers; export the file with text keys",
        ),
        (done.num_duplicates, "rows repeat an earlier one with equal values"),
        *(
            (count, f"values of {name} do not fit its type, {done.columns[name]}; they are missing")
            for name, count in done.type_conflicts.items()
        ),
    )
    found = [f"{count:,} {what}" for count, what in counts if count]
    lines += found
    if found and listed:
        lines.append(f"they are listed in tables/{done.name}.jsonl of the private folder")
    lines += [
        f"warning: {name} looks like what must stay out ({reason}); it was taken because it was named"
        for name, reason in done.taken_anyway.items()
    ]
    if done.left_out:
        names = ", ".join(f"{name} ({reason})" for name, reason in done.left_out.items())
        lines.append(f"left out: {names}; --columns takes columns by name")
    return lines


def _attach_facts(dataset: Dataset, arguments: argparse.Namespace) -> None:
    from shardflow.format.facts.making import attach_facts

    source = None
    if arguments.source is not None:
        from shardflow.packing.tables.keys import PrivateFolder
        from shardflow.packing.tables.source_facts import SourceFacts

        attach_facts(dataset, num_threads=arguments.threads)  # where it has none yet
        private = PrivateFolder(path=arguments.private_dir, key_file=arguments.key)
        source = SourceFacts(dataset, arguments.source, private)
    with step_progress("shards") as on_shard:
        complete = None if source is None else source.complete
        done = attach_facts(dataset, num_threads=arguments.threads, on_shard=on_shard, complete=complete)
    read = {} if source is None else {"source_files": source.num_files, "source_images": source.num_images}
    lines = []
    if source is not None:
        lines.append(f"{counted(source.num_files, 'header')} read, {source.num_images:,} of its images")
    kept = f", {counted(done.num_shards_kept, 'shard')} known before" if done.num_shards_kept else ""
    roles = ", ".join(f"{count:,} {role}" for role, count in sorted(done.roles.items()))
    lines.append(f"{done.num_series:,} series of {counted(done.num_samples, 'sample')}{kept}")
    lines.append(f"roles of series: {roles or 'none'}")
    write_result(arguments, {**asdict(done), **read}, lines)


def _attach_voxels(dataset: Dataset, arguments: argparse.Namespace) -> None:
    from shardflow.format.facts.voxels import attach_voxels

    with step_progress("samples") as on_samples:
        done = attach_voxels(dataset, num_threads=arguments.threads, on_samples=on_samples)
    kept = f", {counted(done.num_samples_kept, 'sample')} known before" if done.num_samples_kept else ""
    classes = ", ".join(f"{count:,} {name or 'without a label'}" for name, count in done.classes.items())
    lines = [
        f"{done.num_annotated:,} of {counted(done.num_samples, 'sample')} with voxels of a class{kept}",
        f"series of each class: {classes or 'none'}",
        f"{done.num_bodies:,} series with a body",
    ]
    write_result(arguments, asdict(done), lines)


ENTITIES_DESCRIPTION = """\
Goes through what packing aligned (alignment.json of each study) and writes a row for each present or
uncertain finding whose probability times the confidence of its slices is above the threshold; one that only
equals it is left out. Usually these are findings of the sections findings and impression: --where selects by
kind (finding, symptom, history, device, procedure, recommendation), section, assertion, label, anatomy,
laterality, certainty, change, severity, size_mm, probability and confidence. What is left out is counted,
and so are the rows, by what they are and, where reports were read by several rules, by these. The rows are
stored in views/<name>/<dataset_id>/ of the dataset and point into its shards: no shard is touched and no byte
of an image copied.

Train on them with `data.view = "entity"`, alone or in a blend with whole studies (`view` of a component), or
open them in Python with shardflow.loading.open_view. Start a stopped job again to resume it. Needs
the extra `pack`.
"""
_MOST_TOLD = 10
ENTITIES_EXAMPLES = """\
examples:
  shardflow entities my-dataset
  shardflow entities my-dataset --threshold 0.9 --context 0 --name sure
  shardflow entities my-dataset --where "kind == 'device' and section != 'indication'" --name devices
  shardflow entities my-dataset --where "label == 'fracture' and change == 'new'" --name new-fractures
"""


def add_entities_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow entities``."""
    usual = EntityRules()
    add_dataset(parser)
    add = parser.add_argument
    add("--name", default="entity", metavar="NAME", help="name of the view (entity)")
    add(
        "--threshold",
        type=float,
        default=usual.threshold,
        metavar="P",
        help="probability times confidence that must be exceeded, from 0 to 1 (0.7)",
    )
    add(
        "--where",
        default=usual.where,
        metavar="EXPRESSION",
        help="which findings; '' for all (findings of the sections findings and impression)",
    )
    add(
        "--corrections",
        metavar="FILE",
        type=Path,
        help="corrections of a person, written by `shardflow reports review` and filled in",
    )
    add(
        "--context",
        type=natural_number,
        default=usual.context_slices,
        metavar="N",
        help="neighbors on either side of each slice that belong to the row too (1)",
    )
    add(
        "--text",
        choices=get_args(EntityText),
        default=usual.text,
        help="what of the report goes with the slices (sentence)",
    )
    add(
        "--processes",
        metavar="N",
        type=positive_number,
        default=os.cpu_count() or 1,
        help="processes that read (one a core); the rows do not depend on it",
    )
    add_json(parser)


def run_entities(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    from shardflow.reports.entity_views import build_view
    from shardflow.reports.review import read_corrections

    rules = EntityRules(
        threshold=arguments.threshold,
        context_slices=arguments.context,
        text=arguments.text,
        where=arguments.where,
    )
    corrections = None if arguments.corrections is None else read_corrections(arguments.corrections)
    dataset = open_dataset(arguments.dataset, with_studies=True)
    with step_progress("shards") as on_shard:
        built = build_view(
            dataset,
            rules,
            name=arguments.name,
            num_processes=arguments.processes,
            on_shard=on_shard,
            corrections=corrections,
        )
    amount = f"{counted(built.num_entities, 'row')} of {built.num_studies:,} studies"
    made = "" if built.is_new else ", made before"
    lines = [f"view {built.name}: {amount} above {built.threshold}{made}", f"view_id {built.view_id}"]
    for column, counts in built.composition.items():
        # One reader is what one expects; of labels there are hundreds.
        if len(counts) > (column == "reader"):
            told = ", ".join(f"{num:,} {value or 'unknown'}" for value, num in [*counts.items()][:_MOST_TOLD])
            more = len(counts) - _MOST_TOLD
            lines.append(f"by {column}: {told}{f', and {more:,} more' if more > 0 else ''}")
    left_out = sorted(built.left_out.items(), key=lambda one: (-one[1], one[0]))
    lines += [f"left out: {num:,} {reason}" for reason, num in left_out if num]
    write_result(arguments, asdict(built), lines)
    return 0


FOLDS_DESCRIPTION = """\
Deals the studies of DATASET into folds of cross-validation, as a table: NAME.fold is 0 to K-1.
All studies of a person are in one fold, and classes of --stratify have equal shares in all, as far as persons
allow. Run again after the dataset has grown, it keeps the folds of known persons and deals the new ones.

Use it in where=: "folds.fold != 0" trains without the first fold, "folds.fold == 0" validates on it.
"""
FOLDS_EXAMPLES = """\
examples:
  shardflow folds my-dataset --k 5 --stratify labels.finding
  shardflow folds my-dataset --k 10 --stratify facts.modality --name tenfold --split train+val
"""


def add_folds_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow folds``."""
    add_dataset(parser)
    parser.add_argument("--k", metavar="K", type=int, required=True, help="number of folds")
    parser.add_argument(
        "--stratify", metavar="COLUMN", required=True, help="column of classes whose shares are kept alike"
    )
    parser.add_argument("--name", default="folds", help="name of the table (folds)")
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="decides among equal choices (0); any whole number"
    )
    parser.add_argument("--split", metavar="SPLIT", help="splits to deal, such as train+val (all)")
    parser.add_argument(
        "--private-dir",
        metavar="DIR",
        type=Path,
        help="folder that the dataset was packed with, for persons who have several patient keys",
    )
    add_where(parser)
    add_json(parser)


def run_folds(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    from shardflow.packing.tables.folds import write_folds
    from shardflow.packing.tables.keys import PrivateFolder

    dataset = open_dataset(arguments.dataset)
    rows, _ = choose_samples(dataset, arguments.split, arguments.where, arguments.keys)
    private = None if arguments.private_dir is None else PrivateFolder(path=arguments.private_dir)
    done = write_folds(
        dataset,
        rows,
        name=arguments.name,
        k=arguments.k,
        stratify=arguments.stratify,
        seed=arguments.seed,
        same_persons=() if private is None else private.same_persons(dataset),
    )
    if arguments.json:
        write_json(asdict(done))
    else:
        _show(done)
    return 0


def _show(done: Folds) -> None:
    version = (
        f"version {done.number}" if done.is_new else f"version {done.number}, which has the same content"
    )
    persons = counted(done.num_persons, "person")
    dealt = f"{done.num_studies:,} studies of {persons} in {len(done.studies)} folds"
    notes = (
        (done.num_kept, "studies keep their fold"),
        (done.num_without_person, "studies name no person; each counts as one of its own"),
        (done.num_without_class, "studies have no value to stratify by; they are one class"),
    )
    show_lines(
        [f"table {done.name}, {version}: {dealt}", *(f"{count:,} {what}" for count, what in notes if count)]
    )
    rows = [("studies", *(f"{count:,}" for count in done.studies))]
    rows += [(label, *(f"{count:,}" for count in counts)) for label, counts in done.classes.items()]
    show_table("folds", ("", *map(str, range(len(done.studies)))), rows)
