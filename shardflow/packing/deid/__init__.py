"""De-identification: which values may be published, and under which names.

Surrogates replace identifiers (`pseudonyms`), technical attributes pass an allowlist that fails closed
(`allowlist`), identifying text is removed from reports (`report_text`), and images that may show text or a
face are found by rules (`pixel_rules`).
"""

from __future__ import annotations

from shardflow.packing.deid.allowlist import KEYWORDS, allow_ordinal, allow_patient, allow_technical
from shardflow.packing.deid.pseudonyms import SecretKey

__all__ = [
    "KEYWORDS",
    "SecretKey",
    "allow_ordinal",
    "allow_patient",
    "allow_technical",
]
