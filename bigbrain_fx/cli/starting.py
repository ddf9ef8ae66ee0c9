"""Commands for a start: schema, completion, init, demo."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from bigbrain_fx.cli.group import cli
from bigbrain_fx.cli.options import PATH, json_option, option
from bigbrain_fx.cli.output import emit
from bigbrain_fx.cli.templates import EXAMPLES


@cli.command(short_help="Print the JSON Schema of cluster.json.")
@json_option
def schema(as_json: bool) -> None:
    """Print the JSON Schema of cluster.json."""
    from bigbrain_fx.cluster import schema as cluster_schema

    click.echo(json.dumps(cluster_schema(), indent=None if as_json else 2))


@cli.command(short_help="Print what lets a shell complete commands, flags and names.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the text that lets SHELL complete commands, flags, files and names of partitioners.

    bash: eval "$(bigbrain-fx completion bash)" in ~/.bashrc; zsh likewise in ~/.zshrc; fish:
    bigbrain-fx completion fish > ~/.config/fish/completions/bigbrain-fx.fish
    """
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(cli, {}, "bigbrain-fx", "_BIGBRAIN_FX_COMPLETE").source())


@cli.command(short_help="Write a model.py and cluster.json to start from.")
@click.argument("folder", default=".", type=PATH)
@option(
    "--example",
    type=click.Choice(EXAMPLES),
    default="bytes",
    help="Which model: bytes (the next byte of a text), gpt, resnet, hf (transformers), digits "
    "(scikit-learn).",
)
@option("--force", is_flag=True, help="Replace files that are there.")
@json_option
def init(folder: Path, example: str, force: bool, as_json: bool) -> None:
    """Write a commented model.py and cluster.json to start from."""
    from bigbrain_fx.cli.templates import CLUSTER_NAME, MADE_UP, write_starter

    written = write_starter(folder, force=force, example_name=example)
    for path in written:
        emit(as_json, {"wrote": str(path)}, f"wrote {path}")
    has_cluster = any(path.name == CLUSTER_NAME for path in written)
    said = MADE_UP if has_cluster else "cluster.json is there, and stays as it is"
    click.echo(said, err=True)


NEXT = """
Next:
  bigbrain-fx explain {0}/bundle    reasons for the cut; {0}/bundle/README.md names files to read
  bigbrain-fx init mine && cd mine      a model.py and a cluster.json to edit
  bigbrain-fx doctor --write cluster.json --force     this machine as it is, or --hosts a,b
  bigbrain-fx split model.py -d cluster.json && bigbrain-fx run bundle
In a script of your own, without files: bigbrain_fx.machine().train(model, loader, ...)"""


@cli.command(short_help="Split a GPT over two CPU devices here, train it, verify it.")
@click.argument("folder", default="demo-out", type=PATH)
@option("--force", is_flag=True, help="Replace an earlier demo in FOLDER.")
def demo(folder: Path, force: bool) -> None:
    """Run the main commands on this host: measure it, split a GPT, train 30 steps, verify.

    Two CPU devices of this host train on the source text of Python's standard library. Each
    command is shown before it runs, and can be typed just so. FOLDER receives all files.
    """
    for words in _demo(folder, ["--force"] * force):
        click.secho(f"\n$ bigbrain-fx {shlex.join(words)}", bold=True)
        cli.main(words, prog_name="bigbrain-fx", standalone_mode=False, obj=words)
    click.echo(NEXT.format(shlex.quote(str(folder))))


def _demo(folder: Path, force: list[str]) -> Iterator[list[str]]:
    model, cluster, bundle = (str(folder / name) for name in ("model.py", "cluster.json", "bundle"))
    yield ["init", str(folder), "--example", "gpt", *force]
    yield ["doctor", "--devices", "2", "--write", cluster, "--force"]
    yield ["split", model, "--devices", cluster, "--out", bundle, *force]
    yield ["run", bundle, "--steps", "30"]
    yield ["verify", bundle]
