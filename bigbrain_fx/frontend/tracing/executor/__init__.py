"""Graphs run op by op in one process: whole, as tensor-parallel ranks, in trials, in memory."""
