"""Plan -> bundle: readable plain Python, weights, and a README.

The package knows the plan and how code is written. The package imports no torch and starts no
processes.
"""

from bigbrain_fx.emit.files.bare import is_bare as is_bare
from bigbrain_fx.emit.files.bundle import (
    Weights as Weights,
    check_out as check_out,
    cut_weights as cut_weights,
    write_bundle as write_bundle,
)
from bigbrain_fx.emit.files.copied import (
    room_files as room_files,
    runtime_files as runtime_files,
)
from bigbrain_fx.emit.files.local_modules import imports_of_module as imports_of_module
from bigbrain_fx.emit.files.model_file import (
    batch_specs as batch_specs,
    takes_file as takes_file,
    training_texts as training_texts,
)
from bigbrain_fx.emit.files.parts import (
    CHECKS as CHECKS,
    EXTRAS as EXTRAS,
    GENERATORS as GENERATORS,
    KNOWN as KNOWN,
    PARTS as PARTS,
    REPLACING as REPLACING,
    SESSION as SESSION,
    UNIMPORTED as UNIMPORTED,
    WHOLE_DEVICE as WHOLE_DEVICE,
    Part as Part,
    extras_of as extras_of,
    is_chain as is_chain,
    ways_into as ways_into,
)
from bigbrain_fx.emit.files.texts import (
    bundle_texts as bundle_texts,
    stage_texts as stage_texts,
    weight_files as weight_files,
    weight_index as weight_index,
)
from bigbrain_fx.emit.modules.classes import StageText as StageText
from bigbrain_fx.emit.modules.kept import (
    opaque_modules as opaque_modules,
    user_names as user_names,
)
