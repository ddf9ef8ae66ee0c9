"""One small training in the words of each peer, as short as its own documentation has it."""
