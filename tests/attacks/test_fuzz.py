"""Mutated inputs of every reader: a result, or an error of ours; `make fuzz` looks on with libFuzzer."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fuzz.targets import FOUND, TARGETS, found_inputs, make_target, mutations

pytestmark = pytest.mark.filterwarnings("ignore")  # of parsers, about what is wrong with an input


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "number", [pytest.param(40, id="few"), pytest.param(4000, id="many", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", TARGETS)
def test_reader_answers_whatever_the_bytes_are(name: str, number: int, tmp_path: Path) -> None:
    target = make_target(name, tmp_path)
    seeds = list(target.seeds())
    for data in (*seeds, *found_inputs(name), *mutations(seeds, number, name)):
        target.run(data)


@pytest.mark.parametrize(
    "decode",
    [
        "from shardflow.format import decode_array\ndecode_array('png16', data)",
        "import numpy\nfrom shardflow.fields.decode import decode_file as d\nd(numpy.frombuffer(data, 'u1'))",
    ],
)
@pytest.mark.parametrize("number", [2, 4, 5], ids=["a chunk", "the last chunk", "behind an early end"])
def test_a_length_that_is_stated_and_not_there_is_not_allocated(decode: str, number: int) -> None:
    """A PNG of some 150 bytes with a chunk of 4 GiB, in one of them behind an end that holds 13 bytes."""
    code = f"""
import sys
from shardflow.errors import FormatError
data = open(sys.argv[1], "rb").read()[1:]
try:
{textwrap.indent(decode, "    ")}
except FormatError:
    print(*[line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")])
"""
    command = [sys.executable, "-c", code, str(FOUND / f"slices-{number}.bin")]
    done = subprocess.run(
        command, cwd=FOUND.parents[1], capture_output=True, text=True, check=True, timeout=300
    )
    assert int(done.stdout) < 1 << 20  # KiB
