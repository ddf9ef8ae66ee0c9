"""What processes say for all others to read: notes on the board, and who was first.

Notes of commits count when it is clean what their states were computed with.
"""

from __future__ import annotations

import json

from .crew import Crew
from .policies import END, PeerStates, SpareChecks
from .processes import Member
from .stopping import Stopping
from .votes import Votes


class Posting:
    """Pass notes on.

    Args:
        crew: the processes.
        votes: keeps the board, for those that start later.
        stopping: hears that the run comes nearer to its end.
        suspicion: knows what is clean.
        peering: knows whether all devices begin again.
    """

    def __init__(
        self,
        crew: Crew,
        votes: Votes,
        stopping: Stopping,
        suspicion: SpareChecks,
        peering: PeerStates,
    ) -> None:
        self.crew, self.votes, self.stopping = crew, votes, stopping
        self.suspicion, self.peering = suspicion, peering

    def hear_first(self, member: Member, what: str, text: str) -> None:
        """Answer with what the first process said of something."""
        self.crew.order(member, "first", what=what, text=self.votes.first(what, text))

    def hear_post(self, member: Member, key: str, text: str) -> None:
        """Put a note on the board of all, as soon as it counts."""
        self.stopping.move(self.crew.clock.now())
        if member.recalled and self.peering.begins_again:  # of commits that are no more under way
            return
        kind, _, rest = key.partition("/")
        if kind in ("shard", "aside"):  # these count when all devices have said theirs
            step = int(rest.partition("/")[0]) if kind == "shard" else END
            self.suspicion.when_clean(step, lambda: self._post(member, key, text))
        else:
            self._post(member, key, text)

    def _post(self, member: Member, key: str, text: str) -> None:
        dropped = self.votes.board.post(key, text)
        if key.startswith("event/"):
            self.crew.report(key.rpartition("-")[2], device=member.device, **json.loads(text))
            return
        self.crew.tell("post", key=key, text=text)
        for other in self.crew.at_work() if dropped else ():
            if "forget" in other.knows:
                self.crew.order(other, "forget", keys=dropped)
