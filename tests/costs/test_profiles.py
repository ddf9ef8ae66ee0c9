"""Signatures say what decides an op's time; the store keeps profiles, and refuses other files."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from bigbrain_fx.core import (
    Const,
    Graph,
    Input,
    Op,
    Param,
    ParamRef,
    Ref,
    TensorSpec,
    dense_strides,
)
from bigbrain_fx.costs.profiles import (
    APPLICATION_ID,
    SCHEMA_VERSION,
    Machine,
    ProfileStore,
    Signature,
    TensorArg,
    TimedOptimizer,
    fit_optimizer,
    layout,
    signature,
    signatures,
)
from bigbrain_fx.errors import InputError
from tests.support.examples import examples
from tests.support.profiled import MACHINE, profile_of
from tests.support.synthetic import graph_of, op, random_graph, weight


def spec(*shape: int, strides: tuple[int, ...] | None = None, grad: bool = True) -> TensorSpec:
    return TensorSpec(shape, "float32", dense_strides(shape) if strides is None else strides, grad)


def product(x: TensorSpec, w: TensorSpec, name: str = "y", kind: str = "parameter") -> Graph:
    """y = x W, and its loss."""
    made = Op(name, "aten.mm.default", (Ref("x"), ParamRef("w")), outputs=(spec(4, 8),))
    loss = Op("loss", "aten.sum.default", (Ref(name),), outputs=(spec(),))
    param = Param("w", w, "w", kind)  # type: ignore[arg-type]  # one of its words
    return Graph("g", (made, loss), (Input("x", ("x",), x),), (param,), (), "loss")


def signed(graph: Graph) -> Signature:
    return signature(graph, graph.ops[0])


# ------------------------------------------------------------------------------- signatures


def test_the_names_of_ops_do_not_count() -> None:
    one = product(spec(4, 3, grad=False), spec(3, 8))
    two = product(spec(4, 3, grad=False), spec(3, 8), name="other")
    assert signed(one) == signed(two)
    assert signed(one).key == (
        "aten.mm.default(%, %) <- float32[4,3]; float32[3,8] parameter grad -> float32[4, 8]"
    )


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (spec(4, 3), spec(3, 8)),  # wants a gradient of x
        (spec(4, 3, grad=False), spec(3, 8, grad=False)),  # a frozen parameter
        (spec(4, 3, strides=(1, 4), grad=False), spec(3, 8)),  # transposed
        (replace(spec(4, 3, grad=False), dtype="bfloat16"), spec(3, 8)),
        (spec(4, 5, grad=False), spec(5, 8)),
    ],
)
def test_settings_that_change_the_time_change_the_key(x: TensorSpec, w: TensorSpec) -> None:
    usual = product(spec(4, 3, grad=False), spec(3, 8))
    assert signed(product(x, w)).key != signed(usual).key


def test_ops_that_no_loss_reaches_have_no_backward() -> None:
    graph = product(spec(4, 3), spec(3, 8))
    assert signed(graph).wants_backward
    assert not signed(replace(graph, loss=None)).wants_backward
    aside = replace(graph.ops[0], name="aside")
    assert not signature(replace(graph, ops=(aside, *graph.ops)), aside).wants_backward


def test_literals_keep_their_places() -> None:
    graph = graph_of(
        [
            Op("n", "aten.sym_size.int", (Ref("x"), 0)),
            op("a", "aten.cat.default", (Ref("x"), Ref("x")), 1),
            op("b", "aten.view.default", Ref("a"), (Ref("n"), -1), kwargs=(("dtype", Const("x")),)),
        ]
    )
    keys = [signature(graph, entry).literals for entry in graph.ops]
    assert keys == ["(%, 0)", "([%, %], 1)", "(%, [#, -1], dtype=x)"]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (spec(4, 3), "dense"),
        (spec(4, 3, strides=(1, 4)), "permuted 1,0"),
        (spec(4, 3, strides=(0, 1)), "expanded"),
        (spec(4, 3, strides=(6, 1)), "strided"),
        (spec(1, 3, strides=(77, 1)), "dense"),  # the stride of one row says nothing
        (spec(), "dense"),
    ],
)
def test_layouts(made: TensorSpec, expected: str) -> None:
    assert layout(made) == expected


def test_the_ops_of_a_region_stand_for_it() -> None:
    inner = Op("h", "aten.mm.default", (Ref("v"), ParamRef("w")), outputs=(spec(4, 4),))
    body = Graph("body", (inner,), (Input("v", ("v",), spec(4, 4)),), (), ("h",), None)
    region = op("r", "region.no_grad", Ref("x"), body=body, out=spec(4, 4, grad=False))
    graph = graph_of([region, op("loss", "aten.sum.default", Ref("r"))], [weight("w", 4, 4)])
    ((first, found), _) = signatures(graph)
    assert first is inner
    assert (found.mode, found.wants_backward) == ("no_grad", False)
    assert [tensor.is_parameter for tensor in found.tensors] == [False, True]


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 25))
def test_a_store_gives_back_what_it_was_given(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int
) -> None:
    path = tmp_path_factory.mktemp("store") / "p.sqlite"
    found = {s.key: profile_of(s, 1e-3 * i) for i, (_, s) in enumerate(_signed(seed, count))}
    ProfileStore(path).put(MACHINE, *found.values())
    store = ProfileStore(path, read_only=True)
    assert {profile.signature.key: profile for _, profile in store.rows()} == found
    assert all(store.get(MACHINE.key, key) == profile for key, profile in found.items())


def _signed(seed: int, count: int) -> list[tuple[Op, Signature]]:
    return list(signatures(random_graph(seed, count)))


# ------------------------------------------------------------------------------- the store

ONE = profile_of(Signature("aten.relu.default", (TensorArg((4,), "float32", wants_grad=True),)))
TWO = profile_of(Signature("aten.exp.default", (TensorArg((4,), "float32"),)))
OTHER = replace(MACHINE, threads=2)


def test_machines_are_kept_apart(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "p.sqlite")
    store.put(MACHINE, ONE)
    store.put(OTHER, replace(ONE, forward_s=0.5), TWO)
    assert store.machines() == (MACHINE, OTHER)
    assert [p.forward_s for _, p in store.rows(MACHINE.key)] == [ONE.forward_s]
    assert len(store.rows()) == 3
    assert store.get(MACHINE.key, TWO.signature.key) is None


def test_a_second_measurement_replaces_the_first(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "p.sqlite")
    store.put(MACHINE, ONE)
    store.put(replace(MACHINE, flops_per_s=7.0), replace(ONE, forward_s=0.25))
    assert [(m.flops_per_s, p.forward_s) for m, p in store.rows()] == [(7.0, 0.25)]


def test_merging_keeps_what_has_more_samples(tmp_path: Path) -> None:
    mine, theirs = ProfileStore(tmp_path / "a.sqlite"), ProfileStore(tmp_path / "b.sqlite")
    mine.put(MACHINE, replace(ONE, samples=5, forward_s=1.0), replace(TWO, samples=5))
    theirs.put(MACHINE, replace(ONE, samples=9, forward_s=2.0), replace(TWO, samples=5))
    theirs.put(OTHER, ONE)
    assert mine.merge(theirs.path) == 2
    assert mine.merge(theirs.path) == 0
    found = mine.get(MACHINE.key, ONE.signature.key)
    assert found is not None
    assert (found.samples, found.forward_s) == (9, 2.0)
    assert mine.machines() == (MACHINE, OTHER)


def test_a_process_that_is_killed_loses_nothing_that_it_put(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    code = (
        "import os, signal, sys; from bigbrain_fx.costs.profiles import ProfileStore; "
        "from tests.support.profiled import MACHINE; "
        "from tests.costs.test_profiles import ONE, TWO; "
        "store = ProfileStore(sys.argv[1]); store.put(MACHINE, ONE); "
        "base = __import__('sqlite3').connect(sys.argv[1]); "
        "base.execute('DELETE FROM profiles'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code, path], cwd=root, timeout=60, check=False)
    assert done.returncode == -9
    assert ProfileStore(path).rows() == ((MACHINE, ONE),)


def test_a_half_written_batch_leaves_nothing(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "p.sqlite")
    broken = replace(TWO, forward_s=None)  # type: ignore[arg-type]  # what no column takes
    with pytest.raises(InputError):
        store.put(MACHINE, ONE, broken)
    assert store.rows() == ()
    assert store.machines() == ()


def test_other_files_are_refused(tmp_path: Path) -> None:
    text, foreign, newer = (tmp_path / name for name in ("a.txt", "b.sqlite", "c.sqlite"))
    text.write_text("no database, but long enough to be read as the header of one" * 20)
    with sqlite3.connect(foreign) as base:
        base.execute("CREATE TABLE mine (x)")
    base.close()
    with sqlite3.connect(newer) as base:
        base.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        base.execute("PRAGMA user_version = 99")
        base.execute("CREATE TABLE profiles (x)")
    base.close()
    with pytest.raises(InputError, match="not a database"):
        ProfileStore(text)
    with pytest.raises(InputError, match="another program's"):
        ProfileStore(foreign)
    with pytest.raises(InputError, match="of version 2, found 99"):
        ProfileStore(newer)
    with pytest.raises(InputError, match="no such file"):
        ProfileStore(tmp_path / "absent.sqlite", read_only=True)
    assert not (tmp_path / "absent.sqlite").exists()


def test_a_file_of_an_older_version_is_refused_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    ProfileStore(path).put(MACHINE, ONE)
    with sqlite3.connect(path) as base:
        base.execute(f"PRAGMA user_version = {SCHEMA_VERSION - 1}")
    base.close()
    before = path.read_bytes()
    for read_only in (True, False):
        with pytest.raises(InputError, match=f"of version {SCHEMA_VERSION}, found 1") as caught:
            ProfileStore(path, read_only=read_only)
        assert "optimizer" in caught.value.notes[0]
        assert "profile the models again, into another file" in str(caught.value.help)
    assert path.read_bytes() == before


# ------------------------------------------------------------------------------- sessions

STEPS = (TimedOptimizer("all", 3, 300, 1.0), TimedOptimizer("tiny ones", 3, 3, 0.5))


def with_optimizer(per_tensor_s: float, per_byte_s: float, launch_s: float = 1e-6) -> Machine:
    return replace(
        MACHINE,
        launch_s=launch_s,
        optimizer_s_per_tensor=per_tensor_s,
        optimizer_s_per_byte=per_byte_s,
    )


def test_a_session_is_of_a_model_and_replaced_as_a_whole(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "p.sqlite")
    first, other = with_optimizer(1e-5, 1e-9), with_optimizer(9e-5, 9e-9)
    store.put(first, ONE, model="a", optimizer="SGD", steps=STEPS)
    store.put(other, model="b")
    found = {session.model: session for session in store.sessions(MACHINE.key)}
    assert (found["a"].machine, found["b"].machine) == (first, other)
    assert (found["a"].optimizer, found["a"].steps) == ("SGD", STEPS)
    begun = replace(with_optimizer(0.0, 0.0), flops_per_s=5.0)
    store.put(begun, ONE, model="a")  # new rates never stand beside the old optimizer
    found = {session.model: session for session in store.sessions()}
    assert (found["a"].machine, found["a"].steps) == (begun, ())
    assert found["b"].machine == other
    assert store.sessions("another machine") == ()


def test_a_machine_is_the_middle_of_its_sessions(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "p.sqlite")
    for model, (tensor_s, byte_s, launch_s) in {
        "a": (1e-5, 9e-9, 3e-6),
        "b": (2e-5, 1e-9, 1e-6),
        "c": (5e-5, 2e-9, 2e-6),
        "unknown": (0.0, 0.0, 2e-6),
    }.items():
        store.put(with_optimizer(tensor_s, byte_s, launch_s), model=model)
    (found,) = store.machines()
    assert found == with_optimizer(5e-5, 2e-9, launch_s=2e-6)  # a pair that was measured together
    assert found.knows_optimizer


def test_merging_keeps_the_later_session(tmp_path: Path) -> None:
    mine, theirs = ProfileStore(tmp_path / "a.sqlite"), ProfileStore(tmp_path / "b.sqlite")
    mine.put(with_optimizer(1e-5, 1e-9), model="early")
    theirs.put(with_optimizer(2e-5, 2e-9), model="early", steps=STEPS)
    theirs.put(with_optimizer(3e-5, 3e-9), model="late")
    mine.put(with_optimizer(4e-5, 4e-9), model="late")
    for _ in range(2):
        mine.merge(theirs.path)
        found = {s.model: s.machine.optimizer_s_per_tensor for s in mine.sessions()}
        assert found == {"early": 2e-5, "late": 4e-5}


# ------------------------------------------------------------------------------- the optimizer


def test_nothing_is_fitted_below_zero() -> None:
    falling = [TimedOptimizer("", 10, 10**6, 1.0), TimedOptimizer("", 10, 10**3, 2.0)]
    a_tensor_s, a_byte_s = fit_optimizer(falling)
    assert a_byte_s == 0.0
    assert a_tensor_s == pytest.approx(0.12)  # least squares of 10 a / 1 - 1 and 10 a / 2 - 1


def test_sets_that_are_all_alike_still_give_their_own_time() -> None:
    alike = [TimedOptimizer("", n, 100 * n, 1e-4 * n) for n in (3, 6)]
    a_tensor_s, a_byte_s = fit_optimizer(alike)
    assert 9 * a_tensor_s + 900 * a_byte_s == pytest.approx(9e-4)
