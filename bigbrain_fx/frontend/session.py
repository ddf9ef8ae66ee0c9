"""Capture in a child process: start it, read the graph, ask it for weights later, end it.

The parent imports no torch. The user's code runs in the child only, under a time limit, with its
prints on stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import cast

from pydantic import TypeAdapter

from bigbrain_fx import errors
from bigbrain_fx.capture.location import resolved
from bigbrain_fx.core import Graph
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.weights import Checkpoint, read_header

Message = dict[str, object]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model file defines, without its code.

    Attributes:
        path: the location that was captured, its file absolute: model.py, or hf:config.json.
        name: the object that made the model.
        module: the name under which the file is imported (for `opaque.<module>.<class>`).
        functions: targets of its opaque custom functions.
        parameters: number of trainable numbers, each tied one once.
        optimizer_state, optimizer_temporaries: what its optimizer holds, see `Source` of a plan.
    """

    path: str
    name: str
    module: str
    has_loss: bool
    has_batches: bool
    has_optimizer: bool
    has_lr_scale: bool
    clip_norm: float | None
    autocast: str | None
    parameters: int
    functions: tuple[str, ...] = ()
    optimizer_state: float = 2.0
    optimizer_temporaries: float = 2.0


class CaptureSession:
    """A captured model file, and the child process that still holds its weights.

    Use it as a context manager, or call `close`.

    Attributes:
        graph: what was captured.
        facts: what the file defines.
        warnings: what the user should know.
        capture_s: seconds that the child took, its import of torch left out.
    """

    def __init__(self, child: _Child, graph: Graph, answer: Message) -> None:
        self._child = child
        self.graph = graph
        self.facts = TypeAdapter(ModelFacts).validate_python(answer["facts"])
        self.warnings = tuple(cast("Sequence[str]", answer["warnings"]))
        self.capture_s = float(cast("float", answer["capture_s"]))

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

    def close(self) -> None:
        """End the child process."""
        self._child.close()

    def __enter__(self) -> CaptureSession:
        """Return the session itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the child process."""
        self.close()


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
) -> CaptureSession:
    """Run a model file in a child process and capture its model there.

    Args:
        path: "model.py", "model.py:name", or "hf:config.json".
        time_limit_s: seconds for loading, capturing, and for each later request.
        meta: shapes only: the model is built without weights.
        blank: the parameters have no numbers, all else has: weights come from elsewhere.
        training: as in `capture`.
        seed: of the model's weights and the example batch.
        micro_batch: as in `capture`.
        assume: as in `capture`.
        leaves: as in `capture`; added to those that the model file names.

    Raises:
        InputError: the file cannot be used, takes too long, or ends its process.
        CaptureError: torch.export cannot follow the model.
    """
    file, location = resolved(path)
    with tempfile.TemporaryDirectory(prefix="bigbrain-fx-") as folder:
        wanted = {
            "location": location,
            "graph": f"{folder}/graph.json",
            "meta": meta,
            "blank": blank,
            "training": training,
            "seed": seed,
            "micro_batch": micro_batch,
            "assume": dict(assume or {}),
            "leaves": list(leaves),
        }
        child = _Child(file, wanted, time_limit_s)
        try:
            answer = child.answer()
            graph = TypeAdapter(Graph).validate_json(Path(folder, "graph.json").read_bytes())
            return CaptureSession(child, graph, answer)
        except BaseException:
            child.close()
            raise


class _Child:
    """The child process: one JSON object a line each way."""

    def __init__(self, file: Path, wanted: Message, time_limit_s: float) -> None:
        self._file = file
        self._limit_s = time_limit_s
        self._rest = b""
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        # -P: the working directory must not shadow modules of the child.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "bigbrain_fx.capture.child", json.dumps(wanted)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # whatever the model file starts ends with it
        )

    def ask(self, request: Message) -> Message:
        """Send a request and wait for its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self.answer()

    def answer(self) -> Message:
        """Wait for the next line; raise what the child reports."""
        message = cast("Message", json.loads(self._line()))
        if "internal" in message:
            raise RuntimeError(f"capture failed in its child process\n{message['internal']}")
        if "error" in message:
            raise _error(cast("Message", message["error"]))
        return message

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline_s = time.monotonic() + self._limit_s
        while b"\n" not in self._rest:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
                raise self._too_slow()
            data = os.read(pipe, 65536)
            if not data:
                raise self._ended()
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _too_slow(self) -> InputError:
        self.close(at_once=True)
        return InputError(
            f"{self._file.name} took longer than {self._limit_s:g} s to load and capture",
            at=str(self._file),
            help="raise the time limit, or keep training and downloads out of the model file",
        )

    def _ended(self) -> InputError:
        self.close()
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return InputError(
            f"{self._file.name} ended its process ({how})",
            at=str(self._file),
            notes=("SIGKILL often means: out of memory",) if code == -signal.SIGKILL else (),
            help="keep os._exit and the like out of the model file",
        )

    def close(self, at_once: bool = False) -> None:
        """End the child and what it started."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0 if at_once else 5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _error(message: Message) -> BigBrainError:
    kind = getattr(errors, str(message["kind"]), BigBrainError)
    notes = tuple(str(note) for note in cast("Sequence[str]", message["notes"]))
    at, help_ = cast("str | None", message["at"]), cast("str | None", message["help"])
    return cast("BigBrainError", kind(str(message["what"]), at=at, notes=notes, help=help_))
