"""A cluster on one machine: run a bundle on it, or measure it.

    python -m tools.studies.emulation CLUSTER.json -- BUNDLE [options of its train.py or infer.py]
    python -m tools.studies.emulation CLUSTER.json --doctor [--write FILE]

Each device's process has a network namespace of its own, computes at its share of this machine,
within its memory, and its messages take the links' latency and rate. Linux and root.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click

from bigbrain_fx.bundles.launch import BatchLine, Run, RunOptions, StepLine
from bigbrain_fx.cluster import read_cluster
from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.measure.host import Survey
from tools.studies.emulation import Network, emulated

PATH = click.Path(path_type=Path)


@click.command()
@click.argument("cluster_file", metavar="CLUSTER.json", type=PATH)
@click.argument("words", metavar="[-- BUNDLE [OPTIONS]]", nargs=-1, type=click.UNPROCESSED)
@click.option("--doctor", "doctor", is_flag=True, help="Measure the emulated devices and links.")
@click.option("--write", "out", type=PATH, help="With --doctor: write a cluster.json of them.")
@click.option("--force", is_flag=True, help="Replace that file if it is there.")
@click.option("--share", type=float, help="Cores of the fastest device.  [default: half of all]")
@click.option("--clamp", is_flag=True, help="Take 1 Gbit/s and 1 ms for links that are better.")
def main(
    cluster_file: Path,
    words: tuple[str, ...],
    doctor: bool,
    out: Path | None,
    force: bool,
    share: float | None,
    clamp: bool,
) -> None:
    """Run a bundle on an emulated cluster, or measure the cluster."""
    try:
        with _ended_by_signals():
            cluster = read_cluster(cluster_file)
            bundle, options, as_json = _bundle(words, doctor, out, force)
            with emulated(cluster, share=share, clamp=clamp) as net:
                if bundle is not None:
                    _run(net, bundle, options, as_json)
                if doctor:
                    _measure(net, out, force)
    except BigBrainError as error:
        click.echo(error.headline, err=True)
        sys.exit(error.exit_code)


def _bundle(
    words: Sequence[str], doctor: bool, out: Path | None, force: bool
) -> tuple[Path | None, RunOptions, bool]:
    """Read what stands after `--`; refuse what makes no sense together."""
    if bool(words) == doctor:
        raise InputError(
            "expected either `-- BUNDLE [options]` or --doctor",
            help="python -m tools.studies.emulation CLUSTER.json -- BUNDLE --steps 5",
        )
    if out is not None and not doctor:
        raise InputError("--write is for --doctor", help="add --doctor")
    if out is not None and out.exists() and not force:
        raise InputError(f"{out} exists already", help="add --force to replace it")
    if not words:
        return None, RunOptions(), False
    given = vars(_parser().parse_args(list(words[1:])))
    as_json = given.pop("json")
    return Path(words[0]), RunOptions(**given), as_json


def _parser() -> argparse.ArgumentParser:
    """Take the options of train.py and infer.py, as fields of RunOptions."""
    parser = argparse.ArgumentParser(prog="BUNDLE")
    for name in ("--steps", "--seed", "--threads"):
        parser.add_argument(name, type=int)
    parser.add_argument("--deadline", dest="deadline_s", type=float, default=300.0)
    parser.add_argument("--report", dest="logs", type=Path)
    for name in ("--save", "--first-gradients", "--inputs", "--outputs"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--json", action="store_true")
    return parser


def _run(net: Network, bundle: Path, options: RunOptions, as_json: bool) -> None:
    def show(line: StepLine | BatchLine) -> None:
        if as_json:
            click.echo(json.dumps(asdict(line)))
        elif isinstance(line, StepLine):
            click.echo(f"step {line.step:5d}   loss {line.loss:.6f}   {line.step_s:.3f} s")
        else:
            click.echo(f"batch {line.batch:5d}   {line.rows} rows   {line.batch_s:.3f} s")

    if not as_json:
        click.echo(_described(net))
    done = net.run(bundle, options, show, show)
    if not as_json:
        click.echo(_peaks(net, done))


def _described(net: Network) -> str:
    shares = ", ".join(f"{name} {quota.cores:.3f}" for name, quota in net.quotas.items())
    return f"cores: {shares}"


def _peaks(net: Network, done: Run) -> str:
    peaks = ", ".join(f"{name} {peak / 2**20:.0f} MiB" for name, peak in done.max_rss_bytes.items())
    return f"peak memory: {peaks} (of which {net.baseline_rss_bytes / 2**20:.0f} Python and torch)"


def _measure(net: Network, out: Path | None, force: bool) -> None:
    found = net.survey()
    click.echo(str(found))
    click.echo(compared(net.cluster, found))
    if out is not None:
        found.write(out, force)
        click.echo(f"wrote {out}", err=True)


def compared(cluster: Cluster, found: Survey) -> str:
    """Return a table of what was described and what was measured: speeds, latencies, rates.

    Speeds are relative to the first device's.
    """
    lines = [f"{'':<16}{'described':>12}{'measured':>12}{'error':>9}"]
    first, first_found = cluster.devices[0], found.devices[0]
    for device, probe in zip(cluster.devices[1:], found.devices[1:], strict=True):
        told = device.flops_per_s / first.flops_per_s
        seen = probe.rates.flops_per_s / first_found.rates.flops_per_s
        lines.append(_row(f"{device.name}/{first.name} speed", told, seen, ""))
    for a, b, link in found.links:
        told_link = cluster.link(a, b)
        lines.append(_row(f"{a}-{b}", 1e3 * told_link.latency_s, 1e3 * link.latency_s, "ms"))
        rates = 8e-6 * told_link.bytes_per_s, 8e-6 * link.bytes_per_s
        lines.append(_row(f"{a}-{b}", *rates, "Mbit/s"))
    return "\n".join(lines)


def _row(name: str, told: float, seen: float, unit: str) -> str:
    error = f"{100 * (seen / told - 1):+.1f} %"
    return f"{name:<16}{told:>12.4g}{seen:>12.4g}{error:>9} {unit}".rstrip()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Leave by way of every `finally` when the process is told to end."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
