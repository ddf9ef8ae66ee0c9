"""cluster.json -> Cluster: unit strings, presets of common GPUs, a default link and exceptions.

This room knows the file; it knows nothing of models or plans, and imports no torch.
"""

from bigbrain_fx.cluster.assumed import assumed
from bigbrain_fx.cluster.file import schema
from bigbrain_fx.cluster.presets import MEASURED, PRESETS, Preset
from bigbrain_fx.cluster.quantity import BadValueError, duration_s
from bigbrain_fx.cluster.resolve import parse_cluster, read_cluster, to_json

__all__ = [
    "MEASURED",
    "PRESETS",
    "BadValueError",
    "Preset",
    "assumed",
    "duration_s",
    "parse_cluster",
    "read_cluster",
    "schema",
    "to_json",
]
