"""Training job of a checkout, under torchrun: ``torchrun ... -m pipelines.train --config FILE``."""

from __future__ import annotations

import sys

from shardflow.training.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
