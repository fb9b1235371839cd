"""De-identification: the values that may be published, and their surrogates.

Surrogates replace identifiers (`pseudonyms`), technical attributes pass an allowlist that fails closed
(`allowlist`), identifying text is removed from reports (`report_text`), and images that may show text or a
face are found by rules (`pixel_rules`).
"""

from __future__ import annotations

from shardflow.packing.deid.pseudonyms import SecretKey

__all__ = ["SecretKey"]
