"""Copies of datasets: whole ones with what lies beside them, parts, and volumes in another storage."""
