"""Checks: pure functions of records, one file a chapter of the specification. No torch."""
