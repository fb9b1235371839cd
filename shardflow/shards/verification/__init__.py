"""Verification of a dataset: every byte, every file, the first damage of each with its place."""

from __future__ import annotations

from shardflow.shards.verification.report import Damage, VerifyReport
from shardflow.shards.verification.run import verify

__all__ = ["Damage", "VerifyReport", "verify"]
