"""New divisions of a bundle -> tried first, in a child process with torch.

    trials of rules ──▶ why each failed, or nothing
    shards ──▶ the bundle's own optimizer with parts of parameters: refused where it looks further

`split` asks the model file's process the same; here there is the bundle only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from bigbrain_fx.core import RuleTrial, Shard
from bigbrain_fx.frontend import Child, Task, ask_rules
from bigbrain_fx.plan import Plan

_LIMIT_S = 600.0


@dataclass(frozen=True)
class Trials:
    """Whom to ask, while `trying` lasts."""

    child: Child

    def try_rules(self, trials: Sequence[RuleTrial]) -> list[str | None]:
        """Run trials of rules; return for each why it failed, or None."""
        return ask_rules(self.child, trials)

    def try_optimizer(self, plan: Plan) -> None:
        """Step the bundle's optimizer with the parts that ranks will have.

        Raises:
            InputError: it updates a part otherwise than that part of the whole.
        """
        shards = TypeAdapter(tuple[Shard, ...]).dump_python(plan.sharded.shards)
        trained = {p.name: p.spec.shape for p in plan.graph.params if p.spec.requires_grad}
        self.child.ask({"do": "optimizer", "shards": shards, "trained": trained})


@contextmanager
def trying(bundle: Path) -> Iterator[Trials]:
    """Start a process that has a bundle's optimizer; it ends with the block."""
    task = Task(
        module="bigbrain_fx.bundles.resplitting.child",
        name="the trial of rules",
        slow="the trial of rules {}",
        slow_help="leave --tensor-parallel out",
        ended_help="keep os._exit and the like out of the model file",
        limit_s=_LIMIT_S,
        subject="the bundle's training.py",
        at=str(bundle),
    )
    with Child(task, {"bundle": str(bundle.resolve())}) as child:
        yield Trials(child)
