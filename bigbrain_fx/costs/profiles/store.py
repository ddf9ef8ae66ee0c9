"""Profiles in an SQLite file: what was measured, on which machine, and in which session.

This file knows SQLite; it knows no graphs, and not how anything is measured.

A session is what one run of `profile` found of a machine beside the ops of its model: the rates,
and the optimizer's two numbers. There is one for each machine and model; a new one replaces the
last of that model as a whole. Its numbers are then of the same minutes, and no model overwrites the
costs of another one's optimizer.

- Rates of a machine are the medians over its sessions. One session's own rates would be worse than
  no correction: eight within 13 s found 12 to 30 GB/s and launches of 2.8 to 6.8 us, while one
  matrix product, taken between them, stayed within 9 % of its median but once.
- The optimizer's numbers are those of the session whose model has the most of a graph's
  signatures, the latest of equal ones: models name optimizers of their own, and what a byte costs
  depends on the sizes of tensors. They stay a pair: a fit makes up for one by the other. A graph
  of which no session has anything gets the middle pair.

Files of version 1 have one machine's rates of the first run and the optimizer of the last, all of
it charged to bytes. They do not say which is whose, and are refused.
"""

from __future__ import annotations

import json
import sqlite3
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from bigbrain_fx.core import words
from bigbrain_fx.costs.profiles.optimizer import TimedOptimizer
from bigbrain_fx.costs.profiles.signature import Signature, TensorArg
from bigbrain_fx.errors import InputError

SCHEMA_VERSION = 2
APPLICATION_ID = 0x62626678  # "bbfx": tells our files from other people's

_SCHEMA = """
CREATE TABLE sessions (
    machine TEXT NOT NULL,
    model TEXT NOT NULL,
    at_s REAL NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (machine, model)
);
CREATE TABLE signatures (key TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE profiles (
    machine TEXT NOT NULL,
    signature TEXT NOT NULL REFERENCES signatures (key),
    forward_s REAL NOT NULL,
    backward_input_s REAL NOT NULL,
    backward_weight_s REAL NOT NULL,
    spread REAL NOT NULL,
    samples INTEGER NOT NULL,
    flops INTEGER NOT NULL,
    reads_bytes INTEGER NOT NULL,
    writes_bytes INTEGER NOT NULL,
    PRIMARY KEY (machine, signature)
);
CREATE TABLE origins (
    signature TEXT NOT NULL,
    model TEXT NOT NULL,
    PRIMARY KEY (signature, model)
);
"""
_FIGURES = words(
    """
    forward_s backward_input_s backward_weight_s spread samples flops reads_bytes
    writes_bytes
    """
)


@dataclass(frozen=True, slots=True)
class OpProfile:
    """How long one call of an op took, in the middle of `samples` calls.

    `backward_input_s` makes the gradients of its values, `backward_weight_s` those of its
    parameters and adds them up. `spread` is the interquartile range of forward and backward
    together, over their median. `flops`, `reads_bytes` and `writes_bytes` are the forward's, as in
    `core.Op`.
    """

    signature: Signature
    forward_s: float
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    spread: float = 0.0
    samples: int = 1
    flops: int = 0
    reads_bytes: int = 0
    writes_bytes: int = 0

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine on which ops were measured. Its rates, by `doctor`, scale a profile.

    Attributes:
        kind: "cpu" or "cuda".
        processor: the name that it gives itself.
        threads: of the process that measured; a GPU's ops do not depend on them.
        quota: share of the time that its threads may run; 1.0 unless emulated.
        optimizer_s_per_byte: seconds of an optimizer's step for each byte of trained parameters.
        optimizer_s_per_tensor: and for each of their tensors. Both are 0.0 if unknown.
    """

    kind: str
    processor: str
    torch_version: str
    threads: int
    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float
    quota: float = 1.0
    optimizer_s_per_byte: float = 0.0
    optimizer_s_per_tensor: float = 0.0

    @property
    def knows_optimizer(self) -> bool:
        """Whether the optimizer's step was measured."""
        return self.optimizer_s_per_byte > 0.0 or self.optimizer_s_per_tensor > 0.0

    @property
    def key(self) -> str:
        """A stable text; rates, which differ a little each time, are left out."""
        quota = "" if self.quota == 1.0 else f", {self.quota:.3g} of the time"
        threads = f", {self.threads} thread{'s' if self.threads > 1 else ''}"
        threads = threads if self.kind == "cpu" else ""
        return f"{self.kind}: {self.processor}, torch {self.torch_version}{threads}{quota}"


@dataclass(frozen=True, slots=True)
class Session:
    """Figures of a machine by one run of `profile`, beside the ops of its model.

    Attributes:
        machine: with this session's own rates and optimizer.
        model: "gpt.GPT": the model file's name, and the class.
        at_s: when it was written, in seconds since 1970.
        optimizer: "AdamW"; "" if no step of it was timed.
        steps: what the optimizer's numbers were fitted to.
    """

    machine: Machine
    model: str = ""
    at_s: float = 0.0
    optimizer: str = ""
    steps: tuple[TimedOptimizer, ...] = ()


class ProfileStore:
    """Profiles in one SQLite file, by machine and signature; sessions, by machine and model.

    Every `put` is one transaction, so that a run that is killed loses nothing that it measured.
    Machines and signatures are kept as JSON; a file can be copied, sent, and merged.

    Args:
        path: made when it is not there.
        read_only: expect it to be there, and change nothing.

    Raises:
        InputError: it is no profile database, or one of an older or newer bigbrain-fx.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path = Path(path)
        if read_only and not self.path.is_file():
            raise InputError(
                "expected a profile database, found no such file",
                code="BX1466",
                at=str(self.path),
                help="bigbrain-fx profile model.py writes one",
            )
        self._read_only = read_only
        with self._opened() as base:
            self._check(base)

    def get(self, machine_key: str, signature_key: str) -> OpProfile | None:
        """Return what was measured of a signature on a machine; None if nothing was."""
        found = self._rows("WHERE p.machine = ? AND p.signature = ?", machine_key, signature_key)
        return next((profile for _, profile in found), None)

    def put(
        self,
        machine: Machine,
        *profiles: OpProfile,
        model: str = "",
        optimizer: str = "",
        steps: Sequence[TimedOptimizer] = (),
    ) -> None:
        """Write profiles, and the session of `model` on this machine: all or nothing.

        They replace what was there: a profile that of its signature, the session that of its model.
        """
        session = Session(machine, model, time.time(), optimizer, tuple(steps))
        with self._opened() as base, base:
            for profile in profiles:
                _put(base, machine, profile)
            _put_session(base, session)

    def credit(self, model: str, *signature_keys: str) -> None:
        """Write down that a model has ops of these signatures."""
        with self._opened() as base, base:
            _credit(base, ((key, model) for key in signature_keys))

    def origins(self) -> dict[str, frozenset[str]]:
        """Return, by signature key, the models that have ops of it."""
        found: dict[str, set[str]] = {}
        for key, model in self._origins():
            found.setdefault(key, set()).add(model)
        return {key: frozenset(models) for key, models in found.items()}

    def rows(self, machine_key: str | None = None) -> tuple[tuple[Machine, OpProfile], ...]:
        """Return all profiles, or those of one machine, in the order of their keys."""
        if machine_key is None:
            return tuple(self._rows(""))
        return tuple(self._rows("WHERE p.machine = ?", machine_key))

    def sessions(self, machine_key: str | None = None) -> tuple[Session, ...]:
        """Return all sessions, or those of one machine: by machine, the latest first."""
        query = "SELECT model, at_s, body, machine FROM sessions ORDER BY machine, at_s DESC, model"
        with self._opened() as base:
            found = base.execute(query).fetchall()
        return tuple(_session(*row) for *row, key in found if machine_key in (None, key))

    def machines(self) -> tuple[Machine, ...]:
        """Return every machine with the medians of its sessions, in the order of their keys."""
        by_machine = groupby(self.sessions(), key=lambda session: session.machine.key)
        return tuple(_middle([session.machine for session in same]) for _, same in by_machine)

    def merge(self, other: str | Path) -> int:
        """Take over the profiles of another file; return how many.

        Where both have one, that with more samples stays; of equal ones our own. Of two sessions of
        one machine and model the later one stays. All or nothing.

        Raises:
            InputError: `other` is no profile database, or one of another version.
        """
        theirs = ProfileStore(other, read_only=True)
        taken = [
            (machine, profile)
            for machine, profile in theirs.rows()
            if self._samples(machine.key, profile.signature.key) < profile.samples
        ]
        ours = {(s.machine.key, s.model): s.at_s for s in self.sessions()}
        with self._opened() as base, base:
            for machine, profile in taken:
                _put(base, machine, profile)
            for session in theirs.sessions():
                if ours.get((session.machine.key, session.model), -1.0) < session.at_s:
                    _put_session(base, session)
            _credit(base, theirs._origins())
        return len(taken)

    def _origins(self) -> list[tuple[str, str]]:
        with self._opened() as base:
            query = "SELECT signature, model FROM origins ORDER BY signature, model"
            return base.execute(query).fetchall()

    def _samples(self, machine_key: str, signature_key: str) -> int:
        found = self.get(machine_key, signature_key)
        return found.samples if found else 0

    def _rows(self, where: str, *values: str) -> Iterator[tuple[Machine, OpProfile]]:
        figures = ", ".join(f"p.{name}" for name in _FIGURES)
        query = (
            f"SELECT p.machine, s.body, {figures} FROM profiles p "
            f"JOIN signatures s ON s.key = p.signature {where} ORDER BY p.machine, p.signature"
        )
        with self._opened() as base:
            found = base.execute(query, values).fetchall()
        machines = {machine.key: machine for machine in self.machines()}
        for key, signed, *numbers in found:
            fields = dict(zip(_FIGURES, numbers, strict=True))
            yield machines[key], OpProfile(_signature(signed), **fields)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        uri = f"{self.path.resolve().as_uri()}{'?mode=ro' if self._read_only else ''}"
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=30.0)) as base:
                yield base
        except sqlite3.Error as error:
            raise InputError(
                f"expected a profile database, found: {error}",
                code="BX1467",
                at=str(self.path),
                help="name another file; one that is not there is made",
            ) from error

    def _check(self, base: sqlite3.Connection) -> None:
        application, version = (
            base.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("application_id", "user_version")
        )
        empty = base.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
        if (application, version, empty) == (0, 0, True) and not self._read_only:
            _create(base)
        elif application != APPLICATION_ID:
            raise InputError(
                "expected a profile database, found another program's SQLite file",
                code="BX1468",
                at=str(self.path),
                help="name another file; one that is not there is made",
            )
        elif version != SCHEMA_VERSION:
            raise InputError(
                f"expected a profile database of version {SCHEMA_VERSION}, found {version}",
                code="BX1469",
                at=str(self.path),
                notes=(_OLD,) if version < SCHEMA_VERSION else (),
                help="profile the models again, into another file"
                if version < SCHEMA_VERSION
                else "a newer bigbrain-fx wrote it: update, or profile into another file",
            )


_OLD = "it charges all of the optimizer's time to bytes, and does not say whose rates it holds"


def _create(base: sqlite3.Connection) -> None:
    base.executescript(
        f"BEGIN; {_SCHEMA} PRAGMA application_id = {APPLICATION_ID}; "
        f"PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
    )


def _put_session(base: sqlite3.Connection, session: Session) -> None:
    body = asdict(session)
    key, model, at_s = session.machine.key, body.pop("model"), body.pop("at_s")
    row = (key, model, at_s, json.dumps(body))
    base.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?)", row)


def _put(base: sqlite3.Connection, machine: Machine, profile: OpProfile) -> None:
    body = json.dumps(asdict(profile.signature))
    base.execute("INSERT OR REPLACE INTO signatures VALUES (?, ?)", (profile.signature.key, body))
    figures = [getattr(profile, name) for name in _FIGURES]
    marks = ", ".join("?" * (2 + len(figures)))
    base.execute(
        f"INSERT OR REPLACE INTO profiles VALUES ({marks})",
        (machine.key, profile.signature.key, *figures),
    )


def _credit(base: sqlite3.Connection, pairs: Iterable[tuple[str, str]]) -> None:
    base.executemany("INSERT OR IGNORE INTO origins VALUES (?, ?)", pairs)


def _session(model: str, at_s: float, body: str) -> Session:
    fields: dict[str, Any] = json.loads(body)
    machine = Machine(**fields["machine"])
    steps = tuple(TimedOptimizer(**step) for step in fields["steps"])
    return Session(machine, model, at_s, fields["optimizer"], steps)


_RATES = ("flops_per_s", "memory_bytes_per_s", "launch_s")
_TYPICAL_BYTES = 2**16  # of a tensor, where pairs of the optimizer's numbers are put in order


def _middle(found: Sequence[Machine]) -> Machine:
    """Return a machine with the median of each rate, and the middle pair of the optimizer's."""
    rates = {name: statistics.median(getattr(m, name) for m in found) for name in _RATES}
    pairs = sorted((m for m in found if m.knows_optimizer), key=_typical_s)
    pair = pairs[(len(pairs) - 1) // 2] if pairs else found[0]
    return replace(pair, **rates)


def _typical_s(machine: Machine) -> float:
    return machine.optimizer_s_per_tensor + _TYPICAL_BYTES * machine.optimizer_s_per_byte


def _signature(body: str) -> Signature:
    fields: dict[str, Any] = json.loads(body)
    tensors = tuple(
        replace(TensorArg(**entry), shape=tuple(entry["shape"])) for entry in fields["tensors"]
    )
    return Signature(**{**fields, "tensors": tensors, "outputs": tuple(fields["outputs"])})
