"""One rule: two features that do not go together, why not, and what to do instead.

    Rule(COMPILE, ZERO_3, "weights come and go between forward and backward", "use --zero 2", ...)
      ──▶ error[BX1227j]: --compile does not go with --zero 3: weights come and go ...
            help: use --zero 2, or leave --compile out

A feature is what a user asked for, or what the model or the cluster is. It knows no plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from bigbrain_fx.core import Cluster, Graph
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.nouns import Options, Source


@dataclass(frozen=True)
class Request:
    """What is to be planned, as far as it is known.

    Attributes:
        graph: as captured; None before the model is.
        source: what the model file says besides; likewise.
        is_placed: ops are placed as in another plan: no partitioner chooses, and no replicas.
        is_written: a bundle is written, which may do less than a forecast can say.
    """

    options: Options
    cluster: Cluster
    graph: Graph | None = None
    source: Source | None = None
    is_placed: bool = False
    is_written: bool = False


Words: TypeAlias = Callable[[Request], str]


@dataclass(frozen=True)
class Feature:
    """Something that a request may have.

    Attributes:
        name: on the page of compatibility, and in errors.
        found: whether a request has it, or how an error names what has it ("--schedule zb-h1").
    """

    name: str
    found: Callable[[Request], object]

    def words(self, request: Request) -> str:
        """Return how an error names it; "" where the request does not have it."""
        found = self.found(request)
        return found if isinstance(found, str) else self.name * bool(found)


@dataclass(frozen=True)
class Rule:
    """Two features that do not go together.

    Attributes:
        when: that an error begins with, and the first that its remedy leaves out.
        other: what it does not go with.
        why: a clause; "" where nothing but work stands in the way.
        instead: what to do; "" is to leave out either.
        code: of the error.
    """

    when: Feature
    other: Feature
    why: str
    instead: str | Words = ""
    code: str = ""

    def applies(self, request: Request) -> bool:
        """Whether a request has both features."""
        return bool(self.when.words(request) and self.other.words(request))

    def error(self, request: Request) -> InputError:
        """Return how a request is refused that has both features."""
        when, other = self.when.words(request), self.other.words(request)
        instead = self.instead if isinstance(self.instead, str) else self.instead(request)
        return InputError(
            self.sentence(when, other),
            code=self.code,
            at=when.split(" ")[0] if when.startswith("--") else None,
            help=f"{instead or f'leave {other} out'}, or leave {when} out",
        )

    def sentence(self, when: str, other: str) -> str:
        """Say that they do not go together, and why."""
        return f"{when} does not go with {other}" + (f": {self.why}" if self.why else " yet")
