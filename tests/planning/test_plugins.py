"""The door: our own methods and other people's, by name."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from bigbrain_fx.core import Cluster, Costs, Estimator, Graph, Partitioner, Placement
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import AUTO
from bigbrain_fx.planning import registry as plugins
from partitioners.chain_dp import ChainDP

ROOT = Path(__file__).resolve().parents[2]


class Everything:
    """A third party's partitioner: all on the first device."""

    name = "everything"

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        del costs
        return Placement({op.name: cluster.devices[0].name for op in graph.ops})


class Nothing:
    """No partitioner at all."""


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Entry points of packages that are not installed: name -> value."""
    module = ModuleType("their_package")
    vars(module).update(Everything=Everything, Nothing=Nothing, number=3)
    monkeypatch.setitem(sys.modules, "their_package", module)
    points: dict[str, str] = {}

    def entry_points(group: str) -> list[EntryPoint]:
        ours = list(importlib.metadata.entry_points(group=group))
        theirs = [EntryPoint(name, value, group) for name, value in points.items()]
        return [*ours, *(theirs if group == "bigbrain_fx.partitioners" else [])]

    monkeypatch.setattr(plugins, "entry_points", entry_points)
    return points


def test_ours_are_there() -> None:
    assert plugins.names("partitioner") == (
        "chain-dp",
        "m-etf",
        "m-sct",
        "m-topo",
        "naive",
        "scattered",
    )
    assert plugins.names("estimator") == ("analytical", "compiled", "layers", "learned", "measured")
    assert plugins.names() == (
        "analytical",
        "auto",
        "chain-dp",
        "learned",
        "m-etf",
        "m-sct",
        "m-topo",
        "measured",
        "naive",
        "scattered",
    )


def test_a_name_and_options_make_one() -> None:
    assert plugins.partitioner("chain-dp", micro_batches=3, gap=0.0) == ChainDP(3, gap=0.0)
    assert isinstance(plugins.partitioner("naive"), Partitioner)
    assert isinstance(plugins.estimator("analytical"), Estimator)


def test_presets_pair_a_partitioner_with_an_estimator() -> None:
    assert plugins.preset("analytical") == ("chain-dp", "analytical")
    assert plugins.preset("naive") == ("naive", "analytical")
    assert plugins.preset("chain-dp") == ("chain-dp", "analytical")


@pytest.mark.usefixtures("learned_costs", "profile_database")
def test_every_preset_can_be_made() -> None:
    for name in plugins.names():
        partitioner, estimator = plugins.preset(name)
        assert plugins.estimator(estimator).name == estimator
        if partitioner != AUTO:  # no plug-in, but the plan room's search over them
            assert plugins.partitioner(partitioner).name == partitioner


def test_a_misspelt_name_gets_the_nearest() -> None:
    with pytest.raises(InputError, match="no partitioner 'chain-pd'") as caught:
        plugins.partitioner("chain-pd")
    assert str(caught.value.help).startswith("did you mean chain-dp? choose one of chain-dp, ")
    with pytest.raises(InputError) as caught:
        plugins.preset("analytic")
    assert str(caught.value.help).startswith("did you mean analytical? choose one of ")


def test_a_strange_name_gets_them_all() -> None:
    with pytest.raises(InputError, match="no estimator 'zzz'") as caught:
        plugins.estimator("zzz")
    assert caught.value.help == "choose one of analytical, compiled, layers, learned, measured"


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(InputError, match="sead") as caught:
        plugins.partitioner("scattered", sead=3)
    assert caught.value.help == "it takes seed"
    assert plugins.options_of("partitioner", "scattered") == {"seed"}


def test_a_third_party_comes_in_by_name(foreign: dict[str, str]) -> None:
    foreign["everything"] = "their_package:Everything"
    assert "everything" in plugins.names()
    assert isinstance(plugins.partitioner("everything"), Everything)
    assert plugins.preset("everything") == ("everything", "analytical")


def test_classes_that_are_no_partitioner_are_refused(foreign: dict[str, str]) -> None:
    foreign["nothing"] = "their_package:Nothing"
    with pytest.raises(InputError, match="but is none") as caught:
        plugins.partitioner("nothing")
    assert "bigbrain_fx.core.Partitioner" in str(caught.value)


def test_objects_that_cannot_be_called_are_refused(foreign: dict[str, str]) -> None:
    foreign["number"] = "their_package:number"
    with pytest.raises(InputError, match="but is none: it needs `name` and a class"):
        plugins.partitioner("number")


def test_a_package_that_does_not_load_is_named(foreign: dict[str, str]) -> None:
    foreign["broken"] = "their_package:Missing"
    with pytest.raises(InputError, match="'broken' cannot be loaded: AttributeError"):
        plugins.partitioner("broken")


def test_a_name_that_is_taken_is_refused(foreign: dict[str, str]) -> None:
    foreign["naive"] = "their_package:Everything"
    with pytest.raises(InputError, match="'naive' is registered twice"):
        plugins.names("partitioner")


def test_pyproject_lists_what_the_tables_list() -> None:
    for kind in ("partitioner", "estimator"):
        table = plugins.load(kind).TABLE
        text = (ROOT / "pyproject.toml").read_text()
        for name, made in table.items():
            assert f'{name} = "bigbrain_fx.{made.__module__}:{made.__qualname__}"' in text


def test_a_users_file_of_the_same_name_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "partitioners.py").write_text("TABLE = {}\n")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from bigbrain_fx.planning import registry as plugins\n"
        "plugins.names()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "InputError: expected bigbrain-fx's own folder 'partitioners'" in run.stderr
    assert str(tmp_path / "partitioners.py") in run.stderr


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from bigbrain_fx.planning import registry as plugins\n"
        "for name in plugins.names(): plugins.preset(name)\n"
        "plugins.partitioner('chain-dp'); plugins.estimator('analytical')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True)


def test_a_package_that_imports_ours_by_the_name_of_a_checkout_is_told_the_other(
    foreign: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = "raise ModuleNotFoundError('as in a wheel', name='partitioners')\n"
    (tmp_path / "written_for_a_checkout.py").write_text(lacking)
    monkeypatch.syspath_prepend(tmp_path)
    foreign["old"] = "written_for_a_checkout:Old"
    with pytest.raises(InputError) as caught:
        plugins.partitioner("old")
    assert "bigbrain_fx.partitioners" in str(caught.value.help)
