"""Copies of the model on devices of their own: which devices, which micro-batches, what they sum.

    Cluster, how many ──▶ groups of devices ──▶ a plan for each ──▶ shares ──▶ one plan

This room joins plans of single replicas; it places no op and orders no instruction itself.
"""

from bigbrain_fx.plan.replicas.divide import (
    divide as divide,
    likeness as likeness,
    numbers as numbers,
    only as only,
)
from bigbrain_fx.plan.replicas.make import (
    plan_replicas as plan_replicas,
    replicate as replicate,
    require_sensible as require_sensible,
    wants_replicas as wants_replicas,
)
