"""cluster.json -> Cluster: unit strings, presets of common GPUs, a default link and exceptions.

This package knows the file; it knows nothing of models or plans, and imports no torch.
"""

from bigbrain_fx.cluster.assumptions import assumed as assumed
from bigbrain_fx.cluster.availability import read_availability as read_availability
from bigbrain_fx.cluster.file import schema as schema
from bigbrain_fx.cluster.presets import MEASURED as MEASURED, PRESETS as PRESETS
from bigbrain_fx.cluster.quantity import BadValueError as BadValueError, duration_s as duration_s
from bigbrain_fx.cluster.resolve import (
    parse_cluster as parse_cluster,
    read_cluster as read_cluster,
    to_json as to_json,
)
