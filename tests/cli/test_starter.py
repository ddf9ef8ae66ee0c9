"""The files of `init`: written whole or not at all, they work, as the tutorial shows."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from bigbrain_fx.cli import cli
from bigbrain_fx.cli.templates import CLUSTER, EXAMPLES, is_made_up, write_starter
from bigbrain_fx.cluster import parse_cluster, read_cluster
from bigbrain_fx.errors import InputError
from tests.support.command_line import call


def test_a_cluster_that_was_measured_is_kept(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("mine", encoding="utf-8")
    assert write_starter(tmp_path) == (tmp_path / "model.py",)
    assert (tmp_path / "cluster.json").read_text(encoding="utf-8") == "mine"
    with pytest.raises(InputError, match=r"model\.py and cluster\.json exist already"):
        write_starter(tmp_path)


def test_an_existing_model_stays(tmp_path: Path) -> None:
    name = "model.py"
    (tmp_path / name).symlink_to(tmp_path / "nowhere")  # a link that dangles is a file, too
    with pytest.raises(InputError, match=f"{name} exists already"):
        write_starter(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match=f"{name} exists already") as caught:
        write_starter(tmp_path)
    assert caught.value.exit_code == 2
    assert caught.value.at == str(tmp_path)
    assert "--force" in (caught.value.help or "")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text(encoding="utf-8") == "mine"


def test_force_replaces_files_and_does_not_follow_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text("mine", encoding="utf-8")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.py").symlink_to(outside)
    (folder / "cluster.json").write_text("{}", encoding="utf-8")
    write_starter(folder, force=True)
    assert outside.read_text(encoding="utf-8") == "mine"
    assert not (folder / "model.py").is_symlink()
    assert len(read_cluster(folder / "cluster.json").devices) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["cluster.json", "model.py"]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="cannot write the starter files") as caught:
        write_starter(path)
    assert caught.value.at == str(path)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_written(tmp_path: Path, name: str) -> None:
    model, _ = write_starter(tmp_path, example_name=name)
    assert "def example_batch()" in model.read_text()


def test_an_example_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no example 'bert'") as caught:
        write_starter(tmp_path, example_name="bert")
    assert caught.value.help == "choose one of bytes, gpt, resnet, hf, digits"
    assert not list(tmp_path.iterdir())


def test_names_are_completed() -> None:
    assert "_bigbrain_fx_completion" in call("completion", "bash").out
    shell = ShellComplete(cli, {}, "bigbrain-fx", "_BIGBRAIN_FX_COMPLETE")
    for words, begun, wanted in (
        (["split", "m.py", "--partitioner"], "m-", ["m-etf", "m-sct", "m-topo"]),
        (["compare", "m.py", "--partitioners"], "naive,ch", ["naive,chain-dp"]),
        (["split", "m.py", "--set"], "b", ["block_gap="]),
        (["split", "m.py", "--partitioner", "chain-dp", "--set"], "u", ["use_all="]),
        (["split", "m.py", "--schedule"], "1", ["1f1b"]),
    ):
        assert [found.value for found in shell.get_completions(words, begun)] == wanted


PAGE = Path(__file__).resolve().parents[2] / "docs/tutorials/first-split.md"


def rounded(text: str) -> list[list[str]]:
    """Return the words of each line, with decimals of a forecast left out."""
    return [re.sub(r"\d+\.\d+", "#", line).split() for line in text.strip().splitlines()]


def shown_after(command: str) -> str:
    """Return the first block of output below a command of the page."""
    text = PAGE.read_text(encoding="utf-8")
    after = text[text.index(f"```sh\nbigbrain-fx {command}") :]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", after, re.MULTILINE | re.DOTALL)
    return next(block for language, block in blocks if not language)


def test_the_forecast_of_the_starter_is_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_starter(".")
    done = call("estimate", "model.py", "--devices", "cluster.json")
    assert done.code == 0, done.err
    assert rounded(done.out) == rounded(shown_after("estimate"))


def test_init_says_that_its_rates_are_made_up(tmp_path: Path) -> None:
    done = call("init", tmp_path)
    assert "bigbrain-fx doctor --write cluster.json" in done.err
    (tmp_path / "model.py").unlink()
    assert "bigbrain-fx doctor" not in call("init", tmp_path).err  # its cluster.json stays


@pytest.mark.parametrize(
    ("old", "new", "made_up"),
    [
        ("An example", "Of this machine", True),  # a comment measures nothing
        ('"flops": "60GFLOP/s"', '"flops": "61GFLOP/s"', False),
        ('"latency": "50us"', '"latency": "51us"', False),
    ],
)
def test_the_example_is_known_by_its_rates(old: str, new: str, made_up: bool) -> None:
    assert old in CLUSTER
    cluster = parse_cluster(CLUSTER.replace(old, new), "cluster.json")
    assert is_made_up(cluster) == made_up


def test_a_demo_runs_the_first_commands_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: list[list[str]] = []

    def ran(words: list[str], **settings: object) -> None:
        typed.append(words)
        command = cli.commands[words[0]]
        command.make_parser(click.Context(command, info_name=words[0])).parse_args(words[1:])

    context = click.Context(cli.commands["demo"])
    monkeypatch.setattr(cli, "main", ran)
    with context:
        context.invoke(cli.commands["demo"], folder=tmp_path / "my demo", force=False)
    assert [words[0] for words in typed] == ["init", "doctor", "split", "run", "verify"]
    assert all(any("my demo" in word for word in words) for words in typed)


def test_a_demo_replaces_nothing_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("mine", encoding="utf-8")
    found = call("demo", str(tmp_path))
    assert (found.code, "BX3529" in found.err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.py"]


@pytest.mark.nightly
def test_a_demo_trains_and_verifies(tmp_path: Path) -> None:
    found = call("demo", str(tmp_path / "new"))
    assert found.code == 0, found.err
    assert "done: 30 steps" in found.out
