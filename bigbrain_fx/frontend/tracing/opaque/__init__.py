"""Modules, lines of forward and losses that no trace can hold: each is one op of the graph."""
