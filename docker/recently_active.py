"""Health check of a job: succeed if anything below the given folders was written not long ago.

python recently_active.py --within-s 1300 FOLDER...

Standard library only, stops at the first file that is new enough. Exit codes: 0 active, 1 not active.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path


def is_active(folder: str, since: float) -> bool:
    """Say whether a folder, or anything below it, was modified after ``since`` (seconds since the epoch)."""
    try:
        if Path(folder).stat().st_mtime >= since:
            return True
        with os.scandir(folder) as entries:
            folders = []
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.stat(follow_symlinks=False).st_mtime >= since:
                    return True
    except OSError:  # a job moves and removes its own files
        return False
    return any(is_active(below, since) for below in folders)


def main() -> int:
    """Check the folders of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--within-s", type=float, required=True, metavar="SECONDS")
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    arguments = parser.parse_args()
    since = time.time() - arguments.within_s
    return 0 if any(is_active(folder, since) for folder in arguments.folders) else 1


if __name__ == "__main__":
    sys.exit(main())
