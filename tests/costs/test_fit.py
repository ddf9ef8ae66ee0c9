"""Profiles -> a fitted model: what scikit-learn predicts is what our arrays give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bigbrain_fx.core import Device
from bigbrain_fx.costs.fit import (
    FOLDS,
    MODELS,
    assess,
    crosswise,
    fit,
    fit_file,
    is_measured,
    predictions,
    work_of,
)
from bigbrain_fx.costs.model import PHASES, SHIPPED, PlaceRates, read_model, write_model
from bigbrain_fx.costs.model.regressors import Floats, Regressor
from bigbrain_fx.costs.profiles import ProfileStore
from bigbrain_fx.errors import InputError
from estimators.analytical import Analytical
from estimators.learned import Learned
from tests.support.command_line import call
from tests.support.fitted import CPU, GPU, costs_file, database, rows
from tests.support.profiled import MACHINE, profiles_of
from tests.support.synthetic import cluster_of, random_graph

KINDS = tuple(MODELS)


@pytest.fixture(scope="module")
def data() -> tuple[Floats, Floats, Floats]:
    """Features, targets, and features that no regression was fitted to; some columns constant."""
    dice = np.random.default_rng(7)
    x = dice.normal(size=(460, 9)) * np.array([1, 10, 0.01, 5, 1, 1, 1, 0, 0]) + 3.0
    y = x[:, 0] * 2.0 + np.maximum(x[:, 1], x[:, 3]) + np.sin(x[:, 4]) - 20.0
    return x[:160], y[:160], x[160:]


def _scikit_learn(
    kind: str, monkeypatch: pytest.MonkeyPatch, x: Floats, y: Floats
) -> tuple[Regressor, Callable[[Floats], Floats]]:
    """Fit, and catch scikit-learn's own object on the way."""
    import sklearn.ensemble
    import sklearn.linear_model

    home, name = {
        "linear": (sklearn.linear_model, "Ridge"),
        "boosting": (sklearn.ensemble, "GradientBoostingRegressor"),
    }[kind]
    caught: list[Any] = []
    theirs = getattr(home, name)

    def made(**options: object) -> object:
        caught.append(theirs(**options))
        return caught[-1]

    monkeypatch.setattr(home, name, made)
    ours = MODELS[kind](x, y)
    center, scale = getattr(ours, "center", 0.0), getattr(ours, "scale", 1.0)
    return ours, lambda rows_: caught[0].predict((rows_ - center) / scale)


@pytest.mark.parametrize("kind", KINDS)
def test_our_arrays_predict_what_scikit_learn_does(
    kind: str, data: tuple[Floats, Floats, Floats], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, unseen = data
    ours, theirs = _scikit_learn(kind, monkeypatch, x, y)
    again = type(ours).model_validate_json(ours.model_dump_json())
    for points in (x, unseen):
        expected = theirs(points)
        assert float(np.ptp(expected)) > 1.0  # it learned something
        assert np.abs(ours.predict(points) - expected).max() < 1e-9
        assert np.array_equal(again.predict(points), ours.predict(points))


@pytest.mark.gate("linear")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_the_same_from_its_file(kind: str, tmp_path: Path) -> None:
    some = rows(machines=[CPU])
    model = fit(some, kind)
    write_model(model, tmp_path / "costs.json")
    again = read_model(tmp_path / "costs.json")
    assert (again.kind, again.families, again.places) == (kind, model.families, model.places)
    assert predictions(again, some) == predictions(model, some)


@pytest.mark.gate("linear")
@pytest.mark.parametrize("kind", KINDS)
def test_a_formula_is_found(kind: str) -> None:
    """Times are a roofline and 5 % of noise; sizes that were not seen come out near."""
    report = assess(rows(), kind)
    assert report.times == sum(stages.points for stages in report.model.phases.values())
    assert report.machines == (CPU.key, GPU.key)
    assert report.median < (0.45 if kind == "linear" else 0.35)  # `analytical` steps; lines do not


@pytest.mark.nightly
def test_the_same_again() -> None:
    some = rows(machines=[CPU])
    first, again = (fit(some, "boosting") for _ in range(2))
    assert predictions(first, some) == predictions(again, some)


@pytest.mark.nightly
def test_every_time_is_predicted_once_and_not_by_a_fit_that_saw_it() -> None:
    some = rows(noise=0.0, machines=[CPU])
    found = crosswise(some, "boosting")
    assert len(found) == sum(is_measured(profile, phase) for _, profile in some for phase in PHASES)
    seen = predictions(fit(some, "boosting"), some)
    assert _mape(found) > _mape(seen)
    assert FOLDS == 5


def _mape(pairs: list[tuple[float, float]]) -> float:
    return sum(abs(guess / real - 1.0) for guess, real in pairs) / len(pairs)


def test_a_device_beyond_what_was_profiled_is_as_much_off_as_the_nearest() -> None:
    model = fit(rows(machines=[CPU]), "boosting")
    works = [work_of(profile) for _, profile in rows(machines=[CPU])]
    at_home = model.seconds("forward", works, CPU)
    twice = PlaceRates("cpu", 1, 2 * CPU.flops_per_s, 2 * CPU.memory_bytes_per_s, CPU.launch_s / 2)
    assert model.seconds("forward", works, twice) == pytest.approx(at_home / 2)


# --------------------------------------------------------------------------- refusals


def test_too_few_profiles_are_refused() -> None:
    with pytest.raises(InputError, match="at least 10 measured ops, found 3") as caught:
        fit(rows()[:3], "linear")
    assert "bigbrain-fx profile" in str(caught.value.help)


def test_a_fit_that_fails_held_out_data_is_refused(tmp_path: Path) -> None:
    """It would be written without a word on how far off it is."""
    store = ProfileStore(tmp_path / "few.sqlite")
    for machine, profile in rows()[:11]:
        store.put(machine, profile)
    with pytest.raises(InputError, match="at least 15 measured ops, found"):
        fit_file(store.path, tmp_path / "costs.json", "linear")
    assert not (tmp_path / "costs.json").exists()


def test_a_model_profiled_alone_has_too_few_of_a_phase(tmp_path: Path) -> None:
    """As a small network has few weights: the fit says so, and `learned` keeps analytical's."""
    graph, path = random_graph(0, 25), tmp_path / "alone.sqlite"
    weights = 0
    for profile in profiles_of(graph):
        weights += profile.backward_weight_s > 0
        if profile.backward_weight_s == 0 or weights <= 5:
            ProfileStore(path).put(MACHINE, profile)
    report = fit_file(path, tmp_path / "costs.json", "linear")
    assert report.missing == ("backward_weight",)
    device = Device("d0", "h", "cpu", 2**30, 2e9, 2e9)
    learned = Learned(str(tmp_path / "costs.json")).estimate(graph, cluster_of(device))
    known = Analytical().estimate(graph, cluster_of(device))
    for op in graph.ops:
        ours, theirs = learned.op_cost(op.name, "d0"), known.op_cost(op.name, "d0")
        weight_s = ours.backward_s - ours.backward_input_s
        assert weight_s == pytest.approx(theirs.backward_s - theirs.backward_input_s)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(InputError, match="no model 'forest'") as caught:
        fit(rows(), "forest")
    assert caught.value.help == "choose one of linear, boosting"


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="found none") as caught:
        fit(rows(), "linear")
    assert caught.value.help == "pip install 'bigbrain-fx[ml]'"


def test_another_kind_of_device_is_refused() -> None:
    model = fit(rows(machines=[CPU]), "linear")
    with pytest.raises(InputError, match="of cpu devices, not of cuda") as caught:
        model.seconds("forward", [], GPU)
    assert "--estimator analytical" in str(caught.value.help)


def test_a_phase_of_which_nothing_was_measured_is_refused() -> None:
    model = fit(rows(), "linear")
    forward = {"forward": model.phases["forward"]}
    bare = model.model_copy(update={"phases": forward})
    with pytest.raises(InputError, match="nothing of the phase 'backward_input'") as caught:
        bare.seconds("backward_input", [], CPU)
    assert "a model that trains" in str(caught.value.help)


@pytest.mark.parametrize(
    ("change", "code", "why"),
    [
        (lambda body: body.update(format="other"), "BX1463", "another file"),
        (lambda body: body.update(version=99), "BX1458", "version 3, found 99"),
        (lambda body: body["features"].pop(), "BX1459", "not those of this bigbrain-fx"),
        (lambda body: body.pop("phases"), "BX1459", "damaged at phases: Field required"),
        (lambda body: body["phases"].update(forward=3), "BX1459", "damaged at phases.forward"),
        (lambda body: _trees(body).update(type="pickle"), "BX1459", "tag 'pickle'"),
        (lambda body: _trees(body).update(type="kernel"), "BX1459", "tag 'kernel'"),  # 0.2.0's svm
        (lambda body: body["phases"]["forward"].update(share=_trees(body)), "BX1459", "share"),
        (lambda body: body.update(of_seconds=True), "BX1459", "damaged at of_seconds"),
        (lambda body: body["correction"].update(device=99.0), "BX1459", "at correction.device"),
        (lambda body: _trees(body)["left"].__setitem__(0, 0), "BX1459", "left and right"),
        (lambda body: _trees(body)["left"].__setitem__(0, 10**6), "BX1459", "left and right"),
        (lambda body: _trees(body)["roots"].__setitem__(0, -1), "BX1459", "roots do not fit"),
        (lambda body: _trees(body)["feature"].__setitem__(0, 10**6), "BX1459", "feature do not"),
        (lambda body: _trees(body)["value"].__setitem__(0, None), "BX1459", "time.trees.value"),
        (lambda body: _trees(body)["value"].pop(), "BX1459", "the lists of nodes do not fit"),
        (lambda body: _trees(body).update(columns=2000), "BX1459", "takes 2000 features"),
    ],
)
def test_a_damaged_file_is_refused(
    change: Callable[[dict[str, Any]], object], code: str, why: str, boosted: str, tmp_path: Path
) -> None:
    body = json.loads(boosted)
    change(body)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(body))
    with pytest.raises(InputError, match=why) as caught:
        read_model(path)
    assert (caught.value.code, caught.value.at) == (code, str(path))
    assert "bigbrain-fx fit" in str(caught.value.help)
    assert "\n" not in caught.value.what


def test_a_file_of_0_2_0_is_read(boosted: str, tmp_path: Path) -> None:
    """It has the fields of a first stage, and of regressions of seconds."""
    body = json.loads(boosted) | {"of_seconds": False}
    for phase in body["phases"].values():
        phase["share"] = None
    (tmp_path / "costs.json").write_text(json.dumps(body))
    assert read_model(tmp_path / "costs.json").kind == "boosting"
    assert read_model(SHIPPED).version == 3


@pytest.fixture(scope="module")
def boosted(tmp_path_factory: pytest.TempPathFactory) -> str:
    return costs_file(tmp_path_factory.mktemp("fit") / "costs.json").read_text()


def _trees(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["phases"]["forward"]["time"]
    return found


def test_files_that_are_no_json_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(b"\x80\x04pickle")
    with pytest.raises(InputError, match="no JSON"):
        read_model(path)
    with pytest.raises(InputError, match="no readable file"):
        read_model(tmp_path / "nothing.json")


# --------------------------------------------------------------------------- the command


@pytest.mark.nightly
def test_the_command_writes_a_model(tmp_path: Path) -> None:
    base, out = database(tmp_path / "p.sqlite"), tmp_path / "costs.json"
    done = call("fit", base, "--model", "linear", "--out", out, "--json")
    assert done.code == 0, done.err
    (found,) = done.objects
    assert found["model"] == "linear"
    assert found["machines"] == [CPU.key, GPU.key]
    assert 0.0 < found["median"] <= found["mape"] * 3
    assert found["mape"] == pytest.approx(assess(rows(), "linear").mape)
    assert read_model(out).kind == "linear"
    again = call("fit", base, "--out", out)
    assert again.code == 2
    assert again.err.startswith(f"error[BX3514]: {out} exists already")
    replaced = call("fit", base, "--out", out, "--force")
    assert replaced.code == 0, replaced.err
    assert "BIGBRAIN_LEARNED_COSTS" in replaced.out
    assert read_model(out).kind == "boosting"


def test_no_database_no_model(tmp_path: Path) -> None:
    done = call("fit", tmp_path / "nothing.sqlite", "--out", tmp_path / "costs.json")
    assert done.code == 2
    assert "bigbrain-fx profile" in done.err
    assert not (tmp_path / "costs.json").exists()
