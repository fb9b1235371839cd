"""The weights of the rules, as configuration with a digest.

The defaults are the published starting points (docs/alignment.md) where generated studies gave no reason to
change them; `benchmarks/alignment` measures them on studies that no weight was chosen with.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Annotated

from shardflow.configs import Bounds, check_fields

__all__ = ["RULES_VERSION", "AlignmentRules", "Share"]

RULES_VERSION = 2
"""Part of every digest: raised when the same weights give another answer."""

Share = Annotated[float, Bounds(0, 1)]
"""A weight or a factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignmentRules:
    """What each kind of evidence is worth, and what lowers it."""

    threshold: Share = 0.7
    """Entity samples are made of what lies strictly above."""
    cap: Share = 0.99
    """No confidence is higher."""

    series_and_image: Share = 0.98
    """E1: series and image are named and found; times the share of the fitting slices that lie there."""
    image_only: Share = 0.92
    """E2: an image without its series; times the same share."""
    crossing: Share = 0.15
    """E1, E2: how often an image shows what another one of its number shows, in a plane that crosses it (or
    lies nobody knows how)."""
    roi_finding: Share = 0.95
    """E3: a marked region whose label is the finding; divided by the regions or findings it fits."""
    roi_place: Share = 0.85
    """E4: a marked region in the same anatomy on the same side, its finding unsaid."""
    roi_sole: Share = 0.6
    """E4: the only marked region, and the only focal finding that is there."""
    organ_mask: Share = 0.75
    """E5: the outline of the organ that the finding is in."""
    single_image: Share = 0.97
    """E6: a study of one projection image."""
    view_named: Share = 0.98
    """E6: the words name the view or the side; divided by the parts of the body that such views are of."""
    view_unnamed: Share = 0.98
    """E6: several views, none named; divided by the parts of the body (and sides) that they are of."""
    level_prior: Annotated[float, Bounds(0, 0.6)] = 0.1
    """E7: where in the body part such anatomy lies. Capped: no such rule finds a slice (see the ADR)."""
    same_finding: Share = 0.95
    """Factor where the images are named at another mention of the same finding."""

    uncertain: Share = 0.85
    """Factor of what the report leaves open."""
    uncertain_unseen: Share = 0.3
    """The same where nothing but the study points at an image: E6 without a view."""
    other_side: Share = 0.3
    """Factor where the sides differ."""
    other_size: Share = 0.7
    """Factor where sizes differ by more than half of the larger one."""
    other_plane: Share = 0.8
    """Factor where the words name another plane than the series has."""
    disjoint: Share = 0.8
    """Factor of the strongest evidence where other evidence of the series names other slices."""

    neighbours: Annotated[int, Bounds(0, 64)] = 1
    """Slices on either side of a named one where the finding's size is unknown."""
    max_slices: Annotated[int, Bounds(1, 4096)] = 32
    """Slices of one entry; those of the highest weight stay."""

    def __post_init__(self) -> None:
        check_fields(self)

    def digest(self) -> str:
        """Return 16 hexadecimal digits; equal rules of one version have the same."""
        facts = {"version": RULES_VERSION, **asdict(self)}
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
