"""OpenCV, which decodes PNG and JPEG, converts color and resizes; installed by an extra.

It is more than half of what all dependencies take on disk, and volumes at their stored size, masks, texts,
tokens and tables are read without it.
"""

from __future__ import annotations

import functools
from typing import Any

from shardflow.errors import ConfigError


@functools.cache
def opencv() -> Any:
    """Import OpenCV for the first image: 0.2 s that listing a dataset need not pay.

    Raises:
        ConfigError: It is not installed, or cannot be loaded: no fault of a sample, so it ends a run.
    """
    try:
        import cv2
    except ModuleNotFoundError:
        raise ConfigError(
            "PNG, JPEG, color as gray and images of another size than stored need OpenCV, which is not "
            "installed; run: pip install 'shardflow[images]'."
        ) from None
    except ImportError as error:  # opencv-python instead of opencv-python-headless, mostly
        raise ConfigError(
            f"OpenCV must load, got: {error}; install opencv-python-headless, or the library that is missing."
        ) from None
    return cv2
