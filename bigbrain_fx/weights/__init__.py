"""Weights on disk: checkpoints in, a bundle's weights/, one checkpoint out; a piece at a time.

This room moves bytes and names. It imports no torch and knows no plans, processes or devices.
"""

from bigbrain_fx.weights.checkpoint import Checkpoint, read_checkpoint
from bigbrain_fx.weights.folder import (
    FromCheckpoint,
    note_trained,
    rewrite_index,
    source_of_weights,
    stored_tensors,
    trained_steps,
    unused_file,
    write_index,
)
from bigbrain_fx.weights.join import Joined, state, write_joined
from bigbrain_fx.weights.match import Matched, match
from bigbrain_fx.weights.modes import as_umask_says, new_folder
from bigbrain_fx.weights.slices import cut_file, part_name, whole_tensors
from bigbrain_fx.weights.stored import Stored, read_header
from bigbrain_fx.weights.write import Copy, write_file

__all__ = [
    "Checkpoint",
    "Copy",
    "FromCheckpoint",
    "Joined",
    "Matched",
    "Stored",
    "as_umask_says",
    "cut_file",
    "match",
    "new_folder",
    "note_trained",
    "part_name",
    "read_checkpoint",
    "read_header",
    "rewrite_index",
    "source_of_weights",
    "state",
    "stored_tensors",
    "trained_steps",
    "unused_file",
    "whole_tensors",
    "write_file",
    "write_index",
    "write_joined",
]
