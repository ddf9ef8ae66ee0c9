"""Capture in a child process: start it, read the graph, ask it for weights later, end it.

The parent imports no torch. The user's code runs in the child only, under a time limit, with its
prints on stderr.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, cast

from pydantic import TypeAdapter

from bigbrain_fx.core import Graph, OptimizerData, RuleTrial, Shard, Timing
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.frontend.capture_cache.table import environment, folder, is_off
from bigbrain_fx.frontend.client import Child, EndedError, Message, Task
from bigbrain_fx.frontend.first_batches import BatchReading
from bigbrain_fx.frontend.location import resolved
from bigbrain_fx.frontend.micro_batches.effect import MicroBatchEffect
from bigbrain_fx.frontend.room import Room
from bigbrain_fx.weights import Checkpoint, Scratch, read_header

CHILD = "bigbrain_fx.frontend.child"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Names and facts that a model file defines, without its code.

    Attributes:
        path: the location that was captured, its file absolute: model.py, or hf:config.json.
        name: the object that made the model.
        module: the name under which the file is imported (for `opaque.<module>.<class>`).
        functions: targets of its opaque custom functions.
        parameters: number of trainable numbers, each tied one once.
        fixed: entries besides tensors that affect the model, see `Source` of a plan.
        cache, positions: cached rows of keys and values, and tokens of each; 0 for a model of rows.
        optimizer_state, optimizer_temporaries, optimizer_leftover, optimizer_states,
        optimizer_at_once: memory of its optimizer, see `Source` of a plan.
        quantize, quantize_error: type of frozen weights, and the largest error of one.
        ships_file, optimizer: see `Source` of a plan.
        has_generators: `batches` refers to random generators of the file's own.
        device_lines: the user's lines that query the device.
    """

    path: str
    name: str
    module: str
    has_loss: bool
    has_batches: bool
    has_optimizer: bool
    has_lr_scale: bool
    has_scheduler: bool
    has_loss_weight: bool
    has_micro: bool
    clip_norm: float | None
    grad_scaler: dict[str, int | float] | None
    autocast: str | None
    drop_last: bool | None
    batch_dims: dict[str, int]
    offsets: dict[str, int]
    pad: dict[str, int | float]
    parameters: int
    lengths: dict[str, tuple[tuple[int, str], ...]] = field(default_factory=dict)
    buckets: tuple[int, ...] = ()
    fixed: tuple[tuple[tuple[str | int, ...], bool | int | float | str | None], ...] = ()
    functions: tuple[str, ...] = ()
    marks: dict[str, dict[str, bool | int | float | str | None]] = field(default_factory=dict)
    optimizer: OptimizerData | None = None
    has_generators: bool = True
    optimizer_state: float = 2.0
    optimizer_temporaries: float = 2.0
    optimizer_leftover: float = 0.0
    optimizer_states: dict[str, float] = field(default_factory=dict)
    optimizer_at_once: bool = True
    cache: int = 0
    positions: int = 0
    quantize: Literal["int8"] | None = None
    quantize_error: float | None = None
    ships_file: bool = False
    device_lines: tuple[str, ...] = ()


class TrialEndedError(InputError):
    """Report that a process ended as it ran a trial.

    Attributes:
        trial: which one.
        how: "signal SIGSEGV".
    """

    def __init__(self, trial: RuleTrial, error: EndedError) -> None:
        super().__init__(
            error.what, code=error.code, at=error.at, notes=error.notes, help=error.help
        )
        self.trial, self.how = trial, error.how


class CaptureSession:
    """A captured model file, and the child process that still holds its weights.

    Use it as a context manager, or call `close`.

    Attributes:
        graph: the captured model.
        facts: the file's definitions.
        warnings: remarks for the user.
        capture_s: seconds of the child, its import of torch left out.
    """

    def __init__(self, child: Child, graph: Graph, answer: Message) -> None:
        self._child = child
        self.graph = graph
        self.facts = TypeAdapter(ModelFacts).validate_python(answer["facts"])
        self.warnings = tuple(cast("Sequence[str]", answer["warnings"]))
        self.capture_s = float(cast("float", answer["capture_s"]))

    @property
    def spent(self) -> tuple[Timing, ...]:
        """Return the seconds of the child's answers up to now."""
        return tuple(self._child.spent)

    def write_weights(self, folder: Path, files: Mapping[str, Sequence[str]]) -> None:
        """Write safetensors files of the named tensors, under their original names.

        Args:
            folder: must exist.
            files: for each file name the tensors it holds; tied ones are stored once per name.

        Raises:
            InputError: the model was captured without weights, or a name is unknown.
        """
        plan = {name: list(tensors) for name, tensors in files.items()}
        self._child.ask({"do": "weights", "folder": str(folder.resolve()), "files": plan})

    def write_batch(self, path: Path) -> None:
        """Write the example batch: tensors by name to `path`, its structure to `path`.json."""
        self._child.ask({"do": "batch", "path": str(path.resolve())})

    def converted(self, checkpoint: Checkpoint, folder: Path) -> Checkpoint:
        """Return a checkpoint by the names of the model, where its library publishes other ones.

        Args:
            checkpoint: as the user gave it.
            folder: where tensors go that the library joins from several; keep it while they are
                needed.
        """
        place = {"path": str(checkpoint.path), "folder": str(folder.resolve())}
        answer = self._child.ask({"do": "convert", **place})
        places = cast("Mapping[str, tuple[str, str]]", answer["tensors"])
        new = {file for file, _ in places.values() if Path(file).parent == folder.resolve()}
        made = {(file, s.key): s for file in new for s in read_header(Path(file)).values()}
        own = {(str(s.file), s.key): s for s in checkpoint.tensors.values()}
        return Checkpoint(
            checkpoint.path, {name: (made | own)[file, key] for name, (file, key) in places.items()}
        )

    def try_optimizer(
        self,
        held: Mapping[str, Sequence[str]],
        *,
        here: bool,
        shards: Sequence[Shard] = (),
    ) -> tuple[str, ...]:
        """Try the model file's optimizer with the parameters of each device.

        Args:
            held: device -> the names of its trained parameters.
            here: whether the devices are CPUs, as in the trial.
            shards: the TP ranks' shards of these parameters.

        Returns:
            Remarks for the user.

        Raises:
            InputError: the optimizer fails there, or its updates differ from those with all
                parameters.
        """
        if not (self.facts.has_optimizer or self.facts.has_scheduler):
            return ()
        names = {device: list(held) for device, held in held.items()}
        parts = TypeAdapter(tuple[Shard, ...]).dump_python(tuple(shards))
        answer = self._child.ask({"do": "optimizer", "held": names, "shards": parts, "here": here})
        return (str(answer["note"]),) if answer["note"] else ()

    def micro_batch_effect(self, count: int) -> MicroBatchEffect:
        """Compare a step on the example batch with one in micro-batches; see `measure`.

        Raises:
            InputError: `loss_weight` is no count; or the dimension of the rows is ambiguous.
        """
        answer = self._child.ask({"do": "micro-batches", "count": count})
        return TypeAdapter(MicroBatchEffect).validate_python(answer["effect"])

    def require_first_batches(self, reading: BatchReading) -> None:
        """Read the first batches as a bundle would.

        Raises:
            CaptureError: one of them does not fit the trace.
        """
        self._child.ask({"do": "batches", "reading": asdict(reading)})

    def try_rules(self, trials: Sequence[RuleTrial]) -> list[str | None]:
        """Run trials of rules; return for each why it failed, or None."""
        return ask_rules(self._child, trials)

    def rehearse(self, bundle: Path, limit_s: float) -> Message:
        """Train a few steps of a bundle beside the user's own loop, where the child knows how.

        Returns:
            "checks", the links; "why", where there are none.

        Raises:
            BigBrainError: the bundle cannot be trained on the user's data.
        """
        return self._child.ask({"do": "rehearse", "bundle": str(bundle), "limit_s": limit_s})

    def close(self) -> None:
        """End the child process."""
        self._child.close()

    def __enter__(self) -> CaptureSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ask_rules(child: Child, trials: Sequence[RuleTrial]) -> list[str | None]:
    """Let a child process run trials of rules; return for each why it failed, or None.

    Raises:
        TrialEndedError: a kernel of torch ended the process.
    """
    with Scratch("trials") as folder:
        path = Path(folder, "trials.json")
        path.write_bytes(TypeAdapter(tuple[RuleTrial, ...]).dump_json(tuple(trials)))
        try:
            answer = child.ask({"do": "rules", "path": str(path)})
        except EndedError as error:
            note = path.with_suffix(".number")  # `tracing.trying.trial_note`
            if not note.exists():
                raise
            raise TrialEndedError(trials[int(note.read_text())], error) from error
    return cast("list[str | None]", answer["failed"])


def capture_file(
    path: str | Path,
    *,
    time_limit_s: float = 600.0,
    meta: bool = False,
    blank: bool = False,
    training: bool = True,
    seed: int = 0,
    micro_batch: int | None = None,
    assume: Mapping[str, bool] | None = None,
    leaves: Sequence[str] = (),
    cache: int = 0,
    quantize: str | None = None,
    refusal: BigBrainError | None = None,
    parts: int = 1,
    strict: bool = False,
    apart: Sequence[tuple[str, str]] = (),
    loss_apart: bool = False,
    room: Room | None = None,
    child: str = CHILD,
) -> CaptureSession:
    """Run a model file in a child process and capture its model there.

    Args:
        path: "model.py", "model.py:name", or "hf:config.json".
        time_limit_s: seconds for loading, capturing, and for each later request.
        meta: shapes only: the model is built without weights.
        blank: parameters have no numbers, other tensors do: weights come from elsewhere.
        training: as in `capture`.
        seed: of the model's weights and the example batch.
        micro_batch: as in `capture`.
        assume: as in `capture`.
        leaves: as in `capture`, beside the opaque modules that the model file names.
        cache: as in `load_model_file`.
        quantize: "int8": frozen weights are quantised to int8 first.
        parts: number of parts of a batch, where the file has `micro`.
        strict: as in `capture`.
        apart: as in `capture`.
        loss_apart: as in `capture`.
        room: of the devices, where a model that is far larger is refused before its capture.
        refusal: why a trace was refused: the step is captured as one op, the user's own Python.
        child: the module of the child process; some answer more requests than a capture needs.

    Raises:
        InputError: the file cannot be used, takes too long, or ends its process.
        CaptureError: torch.export cannot follow the model.
    """
    file, location = resolved(path)
    wanted = {
        "location": location,
        "meta": meta,
        "blank": blank,
        "training": training,
        "seed": seed,
        "micro_batch": micro_batch,
        "assume": dict(assume or {}),
        "leaves": list(leaves),
        "cache": cache,
        "quantize": quantize,
        "parts": parts,
        "strict": strict,
        "apart": list(apart),
        "loss_apart": loss_apart,
        "room": None if room is None or quantize else asdict(room),
        "known": "" if is_off() else str(folder() / "answers.sqlite"),
        "environment": environment(),
        **({} if refusal is None else {"refusal": refusal.fields}),
    }
    return _session(_task(file, time_limit_s, child), wanted)


def _session(task: Task, wanted: Mapping[str, object]) -> CaptureSession:
    """Start a child process, and wait for its capture."""
    with Scratch("capture") as scratch:
        path = Path(scratch, "graph.json")
        process = Child(task, {**wanted, "graph": str(path)})
        try:
            answer = process.answer()
            return CaptureSession(
                process, TypeAdapter(Graph).validate_json(path.read_bytes()), answer
            )
        except BaseException:
            process.close()
            raise


def _task(file: Path, time_limit_s: float, child: str) -> Task:
    """Return the child's task, with its messages for a slow child or an early end."""
    return Task(
        module=child,
        name="capture",
        slow=f"{file.name} {{}} to load and capture",
        slow_help="raise the time limit, or keep training and downloads out of the model file",
        ended_help="keep os._exit and the like out of the model file",
        limit_s=time_limit_s,
        subject=file.name,
        at=str(file),
    )
