"""What was found of a model, on disk: the next `split` of the same model need not find it again."""
