"""Batches that differ from the example: constants, ragged rows, rows that depend on each other."""
