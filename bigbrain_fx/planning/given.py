"""A partitioner that is not registered: `mine.py:Class` on the command line, an object in Python.

The file is code and is run as code, in this process, as an installed plug-in would be. This module
knows no names of ours.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from bigbrain_fx.core import Cluster, Costs, Graph, Partitioner, Placement, module_of, run_module
from bigbrain_fx.errors import BigBrainError, InputError

Given = str | Partitioner | type[Partitioner]
"""A name, "mine.py:Class", or an object with `name` and `partition`, or its class."""


def label(given: Given) -> str:
    """Return how a plan names its partitioner."""
    return given if isinstance(given, str) else str(given.name)


def is_file(name: str) -> bool:
    """Whether a name is "mine.py" or "mine.py:Class", and none of a table."""
    head, colon, _ = name.rpartition(":")
    return (head if colon else name).endswith(".py")


def is_own(given: Given) -> bool:
    """Whether it is the user's, not installed: its errors are reported as the user's."""
    return not isinstance(given, str) or is_file(given)


def asked(method: Partitioner, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
    """Ask a user's partitioner; refuse a placement that is none.

    Raises:
        InputError: it fails, leaves out an op, or names a device that is not there.
        NoPlanError: that is what it says.
    """
    try:
        found = method.partition(graph, cluster, costs)
        homes = dict(found.device_of)
    except BigBrainError:
        raise
    except Exception as error:  # whatever a user's code raises
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise InputError(
            f"the partitioner '{method.name}' failed: {type(error).__name__}: {error}",
            code="BX1100",
            at=f"{frame.filename}:{frame.lineno}",
            help="partition(graph, cluster, costs) returns core.Placement({op name: device name})",
        ) from error
    lacking = [op.name for op in graph.ops if op.name not in homes]
    strange = sorted({str(name) for name in homes.values()} - set(cluster.device))
    if lacking or strange:
        what = f"places no {', '.join(lacking[:3])}" if lacking else f"knows devices {strange}"
        raise InputError(
            f"the partitioner '{method.name}' {what}: every op goes to a device of the cluster",
            code="BX1101",
            at=type(method).__qualname__,
            notes=(f"{len(graph.ops)} ops; devices {', '.join(cluster.device)}",),
            help="return Placement({op.name: cluster.devices[i].name for op in graph.ops})",
        )
    return found


def with_fields(given: Partitioner | type[Partitioner], fields: Mapping[str, Any]) -> Partitioner:
    """Return the user's object with these fields; a class is made with them.

    Raises:
        InputError: it does not have such fields, or is no dataclass.
    """
    if not fields and not inspect.isclass(given):
        return given
    try:
        if inspect.isclass(given):
            return given(**fields)
        return cast("Partitioner", dataclasses.replace(cast("Any", given), **fields))
    except TypeError as error:
        raise InputError(
            f"the partitioner '{given.name}' does not take these options: {error}",
            code="BX1102",
            help="make it a dataclass with such fields, or leave them out",
        ) from error


def class_of(name: str) -> Callable[..., object]:
    """Return the class that "mine.py:Class" names, or the only partitioner of "mine.py".

    Raises:
        InputError: no such file or class, or the file cannot be run.
    """
    head, colon, tail = name.rpartition(":")
    path = Path(head if colon else name)
    if not path.is_file():
        raise InputError(
            f"expected a partitioner in {path}, found no such file",
            code="BX1103",
            at=name,
            help="give the path of a Python file with a class that has `name` and `partition`",
        )
    module = _run(path.resolve(), path.read_bytes())
    found = _candidates(module)
    wanted = tail if colon else (found[0] if len(found) == 1 else "")
    if wanted in found:
        made: Callable[..., object] = getattr(module, wanted)
        return made
    listed = ", ".join(f"{path}:{each}" for each in found)
    raise InputError(
        f"{path} has no partitioner {tail!r}" if colon else f"{path} has {len(found)} partitioners",
        code="BX1104",
        at=name,
        help=f"choose one of {listed}"
        if found
        else "add a class with `name` and `partition(graph, cluster, costs)`",
    )


def _candidates(module: ModuleType) -> list[str]:
    """List the classes of a file that fulfil the protocol; what it imports is not its own."""
    own = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    return sorted(
        name
        for name, value in own.items()
        if value.__module__ == module.__name__
        and callable(getattr(value, "partition", None))
        and hasattr(value, "name")
    )


@lru_cache(maxsize=32)
def _run(path: Path, _text: bytes) -> ModuleType:
    """Run a text of a user's file once, with its folder on sys.path as `python mine.py` has it."""
    name = f"bigbrain_fx_given_{path.stem}"
    module = module_of(path, name)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        with redirect_stdout(sys.stderr):  # stdout may hold JSON alone
            run_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file raises
        sys.modules.pop(name, None)
        raise InputError(
            f"{path.name} cannot be run: {type(error).__name__}: {error}",
            code="BX1105",
            at=str(path),
            help=f"mend it until `python {path.name}` ends well",
        ) from error
    finally:
        sys.path.remove(str(path.parent))
    return module
