"""Profile in a child process: start it, follow its progress, end it. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from bigbrain_fx.costs import ProfileStore
from bigbrain_fx.frontend import Child, Message, Task, resolved

ROUNDS = 20
TWENTY_OPS = Path(__file__).resolve().parent / "twenty_ops.py"
"""The model file that is measured where none is named."""


@dataclass(frozen=True, slots=True)
class MeasuredRows:
    """Result for one number of rows.

    Attributes:
        rows: of a micro-batch.
        ops: how many the graph has. signatures: how many differ.
        lacking: how many were not in the database; 0: nothing was run.
        part: of the model that was measured, as a rank of a tensor group has it; "": all of it.
        ops_s: seconds of all ops added up. step_s: of a whole step in one process, without the
            optimizer, measured in turn with them.
    """

    rows: int
    ops: int
    signatures: int
    lacking: int
    ops_s: float = 0.0
    step_s: float = 0.0
    part: str = ""

    @property
    def agreement(self) -> float | None:
        """Sum of the ops over the whole step; None if nothing was run."""
        return self.ops_s / self.step_s if self.step_s else None

    def __str__(self) -> str:
        which = f"{self.part}, " if self.part else ""
        known = f"{which}{self.rows} rows: {self.ops} ops, {self.signatures} of them distinct"
        if self.agreement is None:
            return f"{known}; all are in the database"
        return (
            f"{known}; {self.lacking} measured: their sum is {1e3 * self.ops_s:.2f} ms, "
            f"a whole step {1e3 * self.step_s:.2f} ms (ratio {self.agreement:.3f})"
        )


@dataclass(frozen=True, slots=True)
class Profiled:
    """Result of a run of `profile`: the model, the machine's key, and each number of rows."""

    model: str
    machine: str
    measured: tuple[MeasuredRows, ...]


@dataclass(frozen=True)
class ProfileOptions:
    """Request for a measurement.

    Attributes:
        rows: of a micro-batch, each; the example batch's when empty.
        threads: that the child computes with. rounds: runs of every op, at least.
        training: as in `capture`. time_limit_s: for the whole run.
        device: "cpu", "cuda", "cuda:1", or "auto": the first CUDA device, else the CPU.
        tensor_shares: of the ranks of a tensor group, whose parts are measured, too; empty: none.
        tensor_axes: what the ranks divide; all that they can when empty.
    """

    rows: tuple[int, ...] = ()
    threads: int = 1
    rounds: int = ROUNDS
    seed: int = 0
    training: bool = True
    assume: Mapping[str, bool] | None = None
    leaves: tuple[str, ...] = ()
    time_limit_s: float = 3600.0
    device: str = "auto"
    tensor_shares: tuple[int, ...] = ()
    tensor_axes: tuple[str, ...] = ()


def profile(
    model: str | Path,
    store: str | Path,
    options: ProfileOptions | None = None,
    show: Callable[[str], None] = lambda said: None,
) -> Profiled:
    """Measure the distinct ops of a model on a device of this host, and put them into a database.

    What the database has already is not measured again, so that a run that was stopped goes on
    where it was.

    Raises:
        InputError: the model file or the database cannot be used, or there is no such device.
        CaptureError: torch.export cannot follow the model.
    """
    options = options or ProfileOptions()
    file, location = resolved(model)
    ProfileStore(store)  # refuse a foreign file before the model is loaded
    where = {"location": location, "store": str(Path(store).resolve())}
    wanted = {**asdict(options), **where, "assume": dict(options.assume or {})}
    task = Task(
        module="bigbrain_fx.measure.ops.child",
        name="profiling",
        slow=f"profiling {file.name} {{}}",
        slow_help="run it again, it goes on where it was; or raise --time-limit",
        ended_help="profile fewer rows, or keep os._exit and the like out of the model file",
        limit_s=options.time_limit_s,
        subject=file.name,
        at=str(file),
    )
    facts: Message = {}
    measured: list[MeasuredRows] = []
    with Child(task, wanted, options.threads) as child:
        for message in child.messages():
            facts = facts or message  # the first one names model and machine
            if "round" in message:
                show(f"{message['rows']} rows, round {message['round']} of {message['of']}")
            elif "measured" in message:
                measured.append(MeasuredRows(**cast("dict[str, Any]", message["measured"])))
                show(str(measured[-1]))
            elif "optimizer" in message:
                show(str(message["optimizer"]))
    return Profiled(str(facts["name"]), str(facts["machine"]), tuple(measured))
