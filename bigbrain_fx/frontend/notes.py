"""Warnings of a capture that later work may answer: by these words they are found again."""

TOO_LARGE = "too large to compare with the module here; `verify` compares them"

OF_ONE_LENGTH = "the trace holds for batches as long as the longest only"
