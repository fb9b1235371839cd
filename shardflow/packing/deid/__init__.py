"""De-identification: what may leave the hospital, and under which name.

Surrogates replace identifiers (`pseudonyms`); technical attributes pass an allowlist that fails closed
(`allowlist`).
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
