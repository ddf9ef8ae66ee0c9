"""Executors that run graphs op by op in one process: as one, as TP ranks, in trials, for memory."""
