"""The table of digests as a file of the repository, and what differs between two."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.plan_digest.hashing import Digest

TABLE = Path(__file__).resolve().parents[2] / "tests" / "tools" / "plan_digests.json"


@dataclass(frozen=True)
class Change:
    """A case whose digest differs; None where one side has no such case."""

    key: str
    before: Digest | None
    after: Digest | None

    def __str__(self) -> str:
        return f"{self.key}: {_said(self.before)} -> {_said(self.after)}{self._remark}"

    @property
    def _remark(self) -> str:
        if self.before is None or self.after is None:
            return ""
        graph = ", of another graph" if self.before.graph != self.after.graph else ""
        if self.before.step_s is None or self.after.step_s is None:
            return graph
        share = self.after.step_s / self.before.step_s - 1
        return f" ({share:+.2%}{', another plan' * (share == 0)}{graph})"


def changes(before: Mapping[str, Digest], after: Mapping[str, Digest]) -> tuple[Change, ...]:
    """Return the cases that differ, in the order of `after`, then those that it lacks."""
    keys = dict.fromkeys((*after, *before))
    pairs = ((key, before.get(key), after.get(key)) for key in keys)
    return tuple(Change(*pair) for pair in pairs if pair[1] != pair[2])


def write_table(found: Mapping[str, Digest], path: Path = TABLE) -> None:
    """Write digests, a line for each, so that changes of unlike cases merge."""
    lines = (f"{json.dumps(key)}: {json.dumps(asdict(d))}" for key, d in found.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read_table(path: Path = TABLE) -> Mapping[str, Digest]:
    """Read what `write_table` wrote."""
    return {key: Digest(**entry) for key, entry in json.loads(path.read_text()).items()}


def listed(found: tuple[Change, ...], planned: int) -> Iterator[str]:
    """Yield a line for each change, and how many of the plans they are."""
    yield from map(str, found)
    yield f"{len(found)} of {planned} plans differ"


def _said(digest: Digest | None) -> str:
    if digest is None:
        return "not in the table"
    return digest.plan if digest.step_s is None else f"{digest.step_s:.6g} s"
