"""Add to a run what its plan or its options ask for beside the replacement of processes.

Bundles have this file where one of the policies can be in them; see `policies`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .policies import IS_WATCHED

if TYPE_CHECKING:
    from .feeding import Feed
    from .host import Supervisor


def add_policies(run: Supervisor, feed: Feed | None) -> None:
    """Add the policies of a run, in the order in which they receive things."""
    job, parts = run.job, run.policies.parts
    if IS_WATCHED:
        from .catch_up import CatchUp  # only bundles of --with watch have these
        from .watch import LogLoss, Watch

        parts += Watch(run.crew, run.stopping), LogLoss(run.crew), CatchUp(run.crew)
    if job.suspect:
        from .suspicion import Suspicion, go_back  # only bundles of --with suspicion have it

        parts += [Suspicion(run.crew, run.spares, partial(go_back, run))]
    if job.replicas:
        from .peering import (
            Losing,  # only bundles with replicas have these
            Peering,
        )

        is_wanted = feed is None and job.every is None and not job.suspect
        about = run.crew, run.snapshots, run.votes, run.told.tell
        is_elastic = job.elastic or run.rescue is not None
        peering = Peering(*about, is_elastic=is_elastic, is_wanted=is_wanted)
        parts += peering, Losing(run.crew, run.votes, peering)
    if feed is not None:
        from .feeding import Feeding  # only the caller of a session has it

        parts += [Feeding(run.crew, feed, run.snapshots, run.ask_to_stop)]
