"""Copies of the model, on devices of their own or two on the same: who computes, what is summed.

    Cluster, how many ──▶ groups of devices ──▶ a plan for each ──▶ shares ──▶ one plan

This package joins plans of single replicas; it places no op and orders no instruction itself.
"""

from bigbrain_fx.plan.fastest import halved as halved
from bigbrain_fx.plan.replicas.divide import (
    Group as Group,
    by_speed as by_speed,
    divide as divide,
    has_many_messages as has_many_messages,
    likeness as likeness,
    numbers as numbers,
    only as only,
    replica_count as replica_count,
    with_replica_of as with_replica_of,
)
from bigbrain_fx.plan.replicas.make import (
    numbers_of as numbers_of,
    plan_replicas as plan_replicas,
    run_as_one as run_as_one,
)
from bigbrain_fx.plan.replicas.mirror import (
    plan_mirrored as plan_mirrored,
    wants_mirror as wants_mirror,
)
