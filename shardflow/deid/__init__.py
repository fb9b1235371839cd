"""De-identification: what may leave the hospital, and under which name.

Surrogates replace identifiers (`pseudonyms`); technical attributes pass an allowlist that fails closed (`allowlist`).
"""

from shardflow.deid.pseudonyms import SecretKey

__all__ = ["SecretKey"]
