"""Inference that people use: a bundle's processes behind HTTP, on this host.

Requests share slots of a fixed shape, so that each answer is bitwise that of one process which runs
the same slots. This package knows bundles and sockets; it computes nothing and imports no torch.
"""

from __future__ import annotations

import ipaddress
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bigbrain_fx.bundles import require_compilers, require_free
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan, read_plan
from bigbrain_fx.serving.cached import CachedText, filling
from bigbrain_fx.serving.crew import ServingCrew
from bigbrain_fx.serving.engine import Engine, require_rows
from bigbrain_fx.serving.generation import WholeText, writer

if TYPE_CHECKING:
    from bigbrain_fx.serving.app import Front

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ServeOptions:
    """How a bundle is served.

    Attributes:
        host, port: where to listen; port 0 is any that is free.
        token: what clients must send; needed where `host` is not loopback.
        queue: requests that may wait for a slot.
        deadline_s: longest wait for an answer, and for the processes to start.
        logs: of the devices' processes; None is a new folder.
    """

    host: str = LOOPBACK
    port: int = 8000
    token: str | None = None
    queue: int = 64
    deadline_s: float = 300.0
    logs: Path | None = None


@dataclass(frozen=True)
class Serving:
    """A server that listens; `engine.ended` says why it does not any more."""

    url: str
    engine: Engine
    generates: bool
    devices: tuple[str, ...]
    logs: Path


@contextmanager
def served(bundle: str | Path, options: ServeOptions | None = None) -> Iterator[Serving]:
    """Start a bundle's processes and listen; all of it ends with the context.

    Raises:
        InputError: no bundle for inference, the port is taken, no token beyond loopback.
        RunError: a process failed before it was ready.
    """
    bundle, options = Path(bundle), options or ServeOptions()
    plan = _inference_plan(bundle)
    _require_address(options)
    require_compilers(plan)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="bigbrain-fx-serve-"))
    logs.mkdir(parents=True, exist_ok=True)
    front = _listening(options)
    try:
        with _engine(plan, bundle, options, logs) as engine:
            require_rows(engine.spec)
            made = _writer(engine, plan, options.deadline_s)
            front.open(engine, plan.graph.name, made)
            url = "http://{}:{}".format(*front.address)
            generates = not isinstance(made, str)
            try:
                yield Serving(url, engine, generates, plan.stages.devices, logs)
            finally:
                front.stop()
        front.thread.join()  # the engine has answered, or refused, what it had
    finally:
        front.socket.close()


@contextmanager
def _engine(plan: Plan, bundle: Path, options: ServeOptions, logs: Path) -> Iterator[Engine]:
    engine = Engine(
        lambda: ServingCrew(plan, bundle, logs, options.deadline_s),
        len(plan.stages.devices) + 1,  # slots under way: so that no device waits for us
        options.queue,
        options.deadline_s,
        filling(plan.source.cache) if plan.source.cache else None,
    )
    try:
        yield engine
    finally:
        engine.close()


def _writer(engine: Engine, plan: Plan, deadline_s: float) -> WholeText | CachedText | str:
    source = plan.source
    if source.cache:
        return CachedText(engine, source.cache, source.positions, deadline_s)
    return writer(engine, deadline_s)


def _inference_plan(bundle: Path) -> Plan:
    plan = read_plan(bundle)
    if plan.mode != "eval":
        raise InputError(
            f"{bundle} trains; a server needs a bundle for inference",
            code="BX3105",
            help=f"split MODEL --mode eval --like {bundle} --out served",
        )
    if not plan.graph.rows_apart:
        raise InputError(
            f"rows of {plan.graph.name} do not stand alone, and requests share batches: whoever "
            "asks would get other numbers beside others",
            code="BX3106",
            help=f"bigbrain-fx run {bundle} --inputs rows.safetensors, of whole batches",
        )
    if not (bundle / "runtime" / "serving.py").is_file():
        raise InputError(
            f"{bundle} was split before bundles could be served",
            code="BX3107",
            at=str(bundle / "runtime"),
            help="split the model again",
        )
    return plan


def _require_address(options: ServeOptions) -> None:
    if options.token is None and not _is_loopback(options.host):
        raise InputError(
            f"whoever reaches {options.host} could ask: a token is needed beyond loopback",
            code="BX3108",
            help="add --token-file FILE, or leave --host out",
        )
    if options.port and _is_loopback(options.host):
        require_free(options.port)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listening(options: ServeOptions) -> Front:
    try:
        from bigbrain_fx.serving.app import Front
    except ImportError as error:
        raise InputError(
            f"a server needs starlette and uvicorn ({error})",
            code="BX3170",
            help="pip install 'bigbrain-fx[serve]'",
        ) from error
    try:
        return Front((options.host, options.port), options.token, options.deadline_s)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"cannot listen on {options.host}:{options.port}: {error}",
            code="BX3109",
            help="give another --port, or 0 for any free one",
        ) from error
