"""Captures on disk: the next `split` of the same model need not capture it again."""
