"""Profiles in an SQLite file: what was measured, and on which machine.

This file knows SQLite; it knows no graphs, and not how anything is measured.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bigbrain_fx.errors import InputError
from bigbrain_fx.profiles.signature import Signature, TensorArg

SCHEMA_VERSION = 1
APPLICATION_ID = 0x62626678  # "bbfx": tells our files from other people's

_SCHEMA = """
CREATE TABLE machines (key TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE signatures (key TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE profiles (
    machine TEXT NOT NULL REFERENCES machines (key),
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
_FIGURES = (
    "forward_s",
    "backward_input_s",
    "backward_weight_s",
    "spread",
    "samples",
    "flops",
    "reads_bytes",
    "writes_bytes",
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
    """Where ops were measured. The rates are what `doctor` measures; they scale a profile.

    Attributes:
        kind: "cpu" or "cuda".
        processor: the name that it gives itself.
        quota: share of the time that its threads may run; 1.0 unless emulated.
        optimizer_s_per_byte: seconds of an AdamW step for each byte of parameters; 0.0 if unknown.
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

    @property
    def key(self) -> str:
        """A stable text; rates, which differ a little each time, are left out."""
        quota = "" if self.quota == 1.0 else f", {self.quota:.3g} of the time"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.kind}: {self.processor}, torch {self.torch_version}, {threads}{quota}"


class ProfileStore:
    """Profiles in one SQLite file, by machine and signature.

    Every `put` is one transaction, so that a run that is killed loses nothing that it measured.
    Machines and signatures are kept as JSON; a file can be copied, sent, and merged.

    Args:
        path: made when it is not there.
        read_only: expect it to be there, and change nothing.

    Raises:
        InputError: it is no profile database, or one of a newer bigbrain-fx.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path = Path(path)
        if read_only and not self.path.is_file():
            raise InputError(
                "expected a profile database, found no such file",
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

    def put(self, machine: Machine, *profiles: OpProfile) -> None:
        """Write a machine, and profiles of it: all or none; they replace what was there."""
        with self._opened() as base, base:
            for profile in profiles:
                _put(base, machine, profile)
            _put_machine(base, machine)

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

    def machines(self) -> tuple[Machine, ...]:
        """Return every machine, in the order of their keys."""
        with self._opened() as base:
            found = base.execute("SELECT body FROM machines ORDER BY key").fetchall()
        return tuple(_machine(body) for (body,) in found)

    def merge(self, other: str | Path) -> int:
        """Take over the profiles of another file; return how many.

        Where both have one, that with more samples stays; of equal ones our own. All or nothing.

        Raises:
            InputError: `other` is no profile database, or a newer one.
        """
        taken = [
            (machine, profile)
            for machine, profile in ProfileStore(other, read_only=True).rows()
            if self._samples(machine.key, profile.signature.key) < profile.samples
        ]
        with self._opened() as base, base:
            for machine, profile in taken:
                _put(base, machine, profile)
                _put_machine(base, machine)
            _credit(base, ProfileStore(other, read_only=True)._origins())
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
            f"SELECT m.body, s.body, {figures} FROM profiles p "
            "JOIN machines m ON m.key = p.machine JOIN signatures s ON s.key = p.signature "
            f"{where} ORDER BY p.machine, p.signature"
        )
        with self._opened() as base:
            found = base.execute(query, values).fetchall()
        for machine, signed, *numbers in found:
            fields = dict(zip(_FIGURES, numbers, strict=True))
            yield _machine(machine), OpProfile(_signature(signed), **fields)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        uri = f"{self.path.resolve().as_uri()}{'?mode=ro' if self._read_only else ''}"
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=30.0)) as base:
                yield base
        except sqlite3.Error as error:
            raise InputError(
                f"expected a profile database, found: {error}",
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
                at=str(self.path),
                help="name another file; one that is not there is made",
            )
        elif version != SCHEMA_VERSION:
            raise InputError(
                f"expected a profile database of version {SCHEMA_VERSION}, found {version}",
                at=str(self.path),
                help="a newer bigbrain-fx wrote it: update, or profile into another file",
            )


def _create(base: sqlite3.Connection) -> None:
    base.executescript(
        f"BEGIN; {_SCHEMA} PRAGMA application_id = {APPLICATION_ID}; "
        f"PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
    )


def _put_machine(base: sqlite3.Connection, machine: Machine) -> None:
    base.execute(
        "INSERT OR REPLACE INTO machines VALUES (?, ?)", (machine.key, json.dumps(asdict(machine)))
    )


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


def _machine(body: str) -> Machine:
    return Machine(**json.loads(body))


def _signature(body: str) -> Signature:
    fields: dict[str, Any] = json.loads(body)
    tensors = tuple(
        replace(TensorArg(**entry), shape=tuple(entry["shape"])) for entry in fields["tensors"]
    )
    return Signature(**{**fields, "tensors": tensors, "outputs": tuple(fields["outputs"])})
