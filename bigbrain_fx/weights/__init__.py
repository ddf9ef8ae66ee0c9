"""Weights on disk: checkpoints in, a bundle's weights/, one checkpoint out; a piece at a time.

This package moves bytes and names; folders of work under way are made here, too (`Scratch`). It
imports no torch and knows no plans, processes or devices.
"""

from bigbrain_fx.weights.checkpoint import (
    Checkpoint as Checkpoint,
    read_checkpoint as read_checkpoint,
    require_one_save as require_one_save,
)
from bigbrain_fx.weights.folder import (
    FromCheckpoint as FromCheckpoint,
    note_trained as note_trained,
    rewrite_index as rewrite_index,
    source_of_weights as source_of_weights,
    stored_tensors as stored_tensors,
    trained_steps as trained_steps,
    unused_file as unused_file,
    write_index as write_index,
)
from bigbrain_fx.weights.join import Joined as Joined, state as state, write_joined as write_joined
from bigbrain_fx.weights.match import match as match, names_in as names_in
from bigbrain_fx.weights.modes import (
    as_umask_says as as_umask_says,
    new_folder as new_folder,
    replace_file as replace_file,
    replace_folder as replace_folder,
    scratch_folder as scratch_folder,
)
from bigbrain_fx.weights.scratch import Scratch as Scratch, is_scratch as is_scratch
from bigbrain_fx.weights.slices import (
    cut_bytes as cut_bytes,
    cut_file as cut_file,
    part_name as part_name,
    part_shape as part_shape,
    whole_tensors as whole_tensors,
)
from bigbrain_fx.weights.stored import (
    CODES as CODES,
    DTYPES as DTYPES,
    Stored as Stored,
    read_header as read_header,
)
from bigbrain_fx.weights.write import (
    Copy as Copy,
    tensors_apart as tensors_apart,
    write_file as write_file,
    write_tensors as write_tensors,
)
