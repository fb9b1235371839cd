"""How fast a corpus is packed, and that its memory does not grow with its lines.

    python -m benchmarks.corpora.run --output benchmarks/results/corpora.json

Contestants, each in a fresh process, their order turned from round to round; processor time of all threads
and processes, which says more than wall time on a machine that others use:

- ``job``: the whole job with one packing process, texts kept: from the start of its interpreters to the
  manifest. ``parquet``, ``conversations``, ``distinct`` (policy.duplicates = "skip") and ``scrub`` (a tenth
  of the lines) are the same job with one thing changed.
- ``loop``: `json.loads` of each line and webdataset's ShardWriter, which is what most people write.
- ``limit``: `json.loads` and a write of headers and texts with nothing else: no keys, checksums, digests.

Memory is the largest sum of private and shared anonymous pages of the job and its process, sampled, for more
and more lines of the same kind: pages of files come and go with the page cache and are nobody's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.about import about_run

REPOSITORY = Path(__file__).resolve().parents[2]
CONTESTANTS = ("job", "loop", "limit", "parquet", "conversations", "distinct", "scrub")
WORDS = ("the", "heart", "is", "normal", "lungs", "are", "clear", "no", "effusion", "or", "stable", "seen")
SAMPLE_S = 0.02


def write_lines(path: Path, count: int, words: int, *, is_pair: bool = False) -> None:
    """Write lines whose texts differ."""
    rng = random.Random(7)
    some = [" ".join(rng.choices(WORDS, k=words)) for _ in range(997)]
    with path.open("w", encoding="ascii") as file:
        for number in range(count):
            text = f"{number} {some[number % 997]}"
            fields = {"prompt": text[:100], "response": text[100:]} if is_pair else {"text": text}
            file.write(json.dumps({"id": number, **fields}) + "\n")


def write_inputs(folder: Path, count: int) -> None:
    """Write what the contestants read."""
    import pyarrow as pa
    from pyarrow import parquet

    for name in ("lines", "parquet", "conversations", "few"):
        (folder / name).mkdir(parents=True)
    write_lines(folder / "lines" / "a.jsonl", count, 160)
    write_lines(folder / "few" / "a.jsonl", count // 10, 160)
    write_lines(folder / "conversations" / "a.jsonl", count, 160, is_pair=True)
    rows = [json.loads(line) for line in (folder / "lines" / "a.jsonl").open(encoding="ascii")]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "parquet" / "a.parquet", row_group_size=20_000)


def pack(name: str, inputs: Path, scratch: Path) -> int:
    """Run the job; return its lines."""
    from shardflow.packing.config import ExecutionConfig
    from shardflow.packing.corpora.config import (
        CorpusConfig,
        CorpusDeidConfig,
        CorpusInputsConfig,
        CorpusPolicyConfig,
        CorpusShardsConfig,
        FieldsConfig,
    )
    from shardflow.packing.corpora.job import pack_corpus

    folder = inputs / {"parquet": "parquet", "conversations": "conversations", "scrub": "few"}.get(
        name, "lines"
    )
    summary = pack_corpus(
        CorpusConfig(
            output=scratch / "corpus",
            private_dir=scratch / "private",
            inputs=CorpusInputsConfig(files=(folder,)),
            fields=FieldsConfig(kind="conversations" if name == "conversations" else "text"),
            policy=CorpusPolicyConfig(duplicates="skip" if name == "distinct" else "keep"),
            shards=CorpusShardsConfig(target_bytes=64 << 20, part_bytes=64 << 20),
            deid=CorpusDeidConfig(text="scrub" if name == "scrub" else "keep"),
            execution=ExecutionConfig(num_processes=1),
        )
    )
    return summary.inputs["packed"]


def loop(inputs: Path, scratch: Path) -> int:
    """Write what webdataset writes."""
    from webdataset import ShardWriter

    count = 0
    with (
        (inputs / "lines" / "a.jsonl").open("rb") as file,
        ShardWriter(str(scratch / "%06d.tar"), maxsize=64 << 20, maxcount=1 << 30, verbose=0) as writer,
    ):
        for line in file:
            writer.write({"__key__": f"{count:09d}", "txt": json.loads(line)["text"]})
            count += 1
    return count


def limit(inputs: Path, scratch: Path) -> int:
    """Write the bytes and nothing else."""
    from shardflow.format.tar import member_header, padding

    count = 0
    with (
        (inputs / "lines" / "a.jsonl").open("rb") as file,
        (scratch / "a.tar").open("wb", buffering=1 << 20) as out,
    ):
        for line in file:
            text = json.loads(line)["text"].encode()
            out.write(member_header(f"{count:026d}.report.txt", len(text)))
            out.write(text)
            out.write(padding(len(text)))
            count += 1
    return count


def contest(name: str, inputs: Path, scratch: Path) -> dict[str, float]:
    """Run a contestant in this process."""
    began = time.perf_counter()
    runs = {"loop": loop, "limit": limit}
    lines = runs[name](inputs, scratch) if name in runs else pack(name, inputs, scratch)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "lines": lines,
        "cpu_s": sum(each.ru_utime + each.ru_stime for each in used),
        "wall_s": time.perf_counter() - began,
    }


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """Start this script for one contestant."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "benchmarks.corpora.run", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=environment)


def tree(pid: int) -> Iterator[int]:
    """Yield a process and its children."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from tree(int(child))


def anonymous_bytes(pid: int) -> int:
    """Sum what a process and its children hold that belongs to no file."""
    found = 0
    for each in tree(pid):
        lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        found += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return found * 1024


def peak_memory(inputs: Path, scratch: Path, name: str) -> dict[str, float]:
    """Run the job over all lines of a folder, and look at its memory meanwhile."""
    process = start(["--one", name, str(inputs), str(scratch)])
    peak = 0
    while process.poll() is None:
        try:
            peak = max(peak, anonymous_bytes(process.pid))
        except OSError:
            continue
        finally:
            time.sleep(SAMPLE_S)
    if process.returncode or process.stdout is None:
        raise RuntimeError("a contestant failed")
    return {**json.loads(process.stdout.read()), "peak_anonymous_mb": peak / 1e6}


def main() -> None:
    """Run all rounds, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-lines", type=int, nargs="*", default=[100_000, 1_000_000, 3_000_000])
    parser.add_argument("--scratch", type=Path, help="folder for 4 KiB a line of --memory-lines")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, inputs, scratch = arguments.one
        print(json.dumps(contest(name, Path(inputs), Path(scratch))))
        return
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        result = measure(Path(folder), arguments.lines, arguments.rounds, arguments.memory_lines)
    text = json.dumps(result, indent=1) + "\n"
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    print(text, end="")


def measure(folder: Path, lines: int, rounds: int, memory_lines: list[int]) -> dict[str, Any]:
    """Run everything in a folder."""
    inputs = folder / "inputs"
    write_inputs(inputs, lines)
    seen: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for number in range(rounds):
        turned = CONTESTANTS[number % len(CONTESTANTS) :] + CONTESTANTS[: number % len(CONTESTANTS)]
        for name in turned:
            scratch = folder / "scratch"
            scratch.mkdir()
            process = start(["--one", name, str(inputs), str(scratch)])
            out, _ = process.communicate()
            facts = json.loads(out)
            seen[name].append(facts["cpu_s"] / facts["lines"] * 1e6)
            shutil.rmtree(scratch)
    shutil.rmtree(inputs)
    memory = []
    for count in memory_lines:
        for name in ("job", "distinct"):
            (inputs / "lines").mkdir(parents=True)
            (folder / "scratch").mkdir()
            write_lines(inputs / "lines" / "a.jsonl", count, 20)
            memory.append({"contestant": name, **peak_memory(inputs, folder / "scratch", name)})
            shutil.rmtree(inputs)
            shutil.rmtree(folder / "scratch")
    cost = {name: statistics.median(values) for name, values in seen.items() if values}
    return {
        "about": {**about_run(["pyarrow", "webdataset"]), "lines": lines, "load": os.getloadavg()[0]},
        "cpu_us_per_line": {name: round(value, 2) for name, value in cost.items()},
        "rounds_us_per_line": {name: [round(one, 2) for one in values] for name, values in seen.items()},
        "lines_per_core_s": {name: round(1e6 / value) for name, value in cost.items()},
        "job_times_loop": round(cost["loop"] / cost["job"], 2) if cost else None,
        "memory": memory,
    }


if __name__ == "__main__":
    main()
