"""De-identification: what may leave the hospital, and under which name.

Surrogates replace identifiers (`pseudonyms`); technical attributes pass an allowlist that fails closed
(`allowlist`).
"""

from shardflow.deid.allowlist import KEYWORDS, allow_ordinal, allow_patient, allow_technical
from shardflow.deid.pseudonyms import SecretKey

__all__ = ["KEYWORDS", "SecretKey", "allow_ordinal", "allow_patient", "allow_technical"]
