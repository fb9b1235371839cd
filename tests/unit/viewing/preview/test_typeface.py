"""Text of any script is wrapped to a width, and characters without a glyph are counted, never lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardflow.errors import ConfigError
from shardflow.viewing.typeface import Typeface

pytestmark = pytest.mark.fast


def test_lines_keep_to_the_width_and_lose_nothing() -> None:
    face = Typeface(16)
    text = "Kein Erguss. " * 20 + "\n\nRecessus: " + "x" * 300 + " \u5de6\u80ba\u4e0b\u53f6\u7ed3\u8282" * 30
    lines = face.wrap(text, 200)
    assert all(face.width(line) <= 200 for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_control_characters_and_tabs_become_spaces() -> None:
    assert Typeface(16).wrap("a\x00b\x1b[31mc\td\r\ne\rf", 500) == ["a b [31mc    d", "e", "f"]


def test_characters_in_no_font_are_counted() -> None:
    face = Typeface(16)
    face.wrap("Gr\u00f6\u00dfe 5 mm", 500)
    assert face.missing == set()
    face.wrap("\U000f0123", 500)
    assert face.missing == {"\U000f0123"}


def test_wrong_font_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "font.ttf").write_bytes(b"no font")
    for path in (tmp_path / "font.ttf", tmp_path / "missing.ttf"):
        with pytest.raises(ConfigError, match="--font"):
            Typeface(16, path)


def test_missing_pillow_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "import shardflow.viewing, shardflow.cli.view\n"
        "from shardflow.errors import ConfigError\n"
        "from shardflow.viewing.typeface import Typeface\n"
        "try:\n    Typeface(16)\n"
        "except ConfigError as error:\n    print(error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert "shardflow[pack]" in done.stdout
