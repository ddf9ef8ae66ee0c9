"""What does not go together: each rule is met, refuses early, and its remedy mends it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.bundles import estimate, split
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import (
    AUTO,
    RULES,
    Options,
    Request,
    Source,
    make_plan,
    plan_placed,
    require_compatible,
)
from bigbrain_fx.plan.compatibility import conflict
from tests.plan.test_layer_by_layer import layers, with_stores
from tests.support.synthetic import device

SOURCE = Source("model.py")
LENGTHS = replace(SOURCE, lengths={"ids": ((1, "L8"),)})
PAIR = with_stores(device("d0"), device("d1"))
NO_STORES = replace(PAIR, stores=())
ONE_STORE = replace(PAIR, stores=PAIR.stores[:1])
GPU = with_stores(replace(device("d0"), kind="cuda"), device("d1"))
GRAPH = layers(4)
DRAWING = replace(GRAPH, ops=(replace(GRAPH.ops[0], random=True), *GRAPH.ops[1:]))
WRITING = replace(GRAPH, ops=(*GRAPH.ops[:-1], replace(GRAPH.ops[-1], mutates=("w3",))))
NO_LOSS = replace(GRAPH, loss=None)
_GIVEN = ("tuple", (("tuple", ()), ("dict", ()), ("tuple", ()), ("tuple", ("calls",))))
_STATEFUL = replace(GRAPH.ops[-1], target="leaf.memory", args=(_GIVEN, *GRAPH.ops[-1].args))
STATEFUL = replace(GRAPH, ops=(*GRAPH.ops[:-1], _STATEFUL))
WEIGHTS = ("weights",)
TWO = Options("naive", micro_batches=4)

BY_OPTIONS: tuple[tuple[str, dict[str, object]], ...] = (
    ("BX1200", {"cut_at": "blocks", "schedule": "zb-v", "partitioner": "chain-dp"}),
    ("BX1201a", {"cut_at": "blocks", "place": "place.json"}),
    ("BX1201b", {"cut_at": "blocks"}),
    ("BX1212", {"partitioner": AUTO, "pins": (("blocks.0", "d0"),)}),
    ("BX1229a", {"mode": "eval", "defer": "all"}),
    ("BX1229b", {"mode": "eval", "recompute": "all"}),
    ("BX1202a", {"asynchronous": "2bw", "mode": "eval"}),
    ("BX1202b", {"asynchronous": "2bw", "partitioner": AUTO}),
    ("BX1202c", {"asynchronous": "2bw", "replicas": 2}),
    ("BX1202d", {"asynchronous": "2bw", "sum_order": "micro"}),
    ("BX1202e", {"asynchronous": "2bw", "tensor": 2}),
    ("BX1202f", {"asynchronous": "2bw", "offload": ("state",)}),
    ("BX1202g", {"asynchronous": "2bw", "recompute": "all"}),
    ("BX1202h", {"asynchronous": "stash", "defer": "all"}),
    ("BX1202i", {"asynchronous": "2bw", "schedule": "gpipe"}),
    ("BX1202j", {"asynchronous": "2bw", "in_flight": (1, 1)}),
    ("BX1227e", {"compiled": True, "schedule": "zb-h1"}),
    ("BX1227e", {"compiled": True, "defer": "all"}),
    ("BX1227e", {"compiled": True, "partitioner": AUTO}),
    ("BX1227e", {"compiled": True, "recompute": "ops"}),
    ("BX1227a", {"compiled": True, "offload": ("activations",)}),
    ("BX1227b", {"compiled": True, "asynchronous": "2bw"}),
    ("BX1227c", {"compiled": True, "tensor": 0}),
    ("BX1227d", {"compiled": True, "zero_stage": 3, "replicas": 2}),
    ("BX1258a", {"quantize": "int8", "tensor": 2}),
    ("BX1258b", {"quantize": "int8", "offload": WEIGHTS}),
    ("BX1258c", {"quantize": "int8", "cache": 4, "mode": "eval"}),
    ("BX1258d", {"quantize": "int8", "asynchronous": "stash"}),
    ("BX1258e", {"quantize": "int8", "compiled": True}),
    ("BX1258f", {"quantize": "int8", "recompute": "auto"}),
    ("BX3008", {"cache": 4}),
    ("BX3009a", {"cache": 4, "mode": "eval", "tensor": 2}),
    ("BX3009b", {"cache": 4, "mode": "eval", "replicas": 2}),
    ("BX3009c", {"cache": 4, "mode": "eval", "offload": ("state",)}),
    ("BX3009d", {"cache": 4, "mode": "eval", "compiled": True}),
    ("BX1246", {"offload": ("state",), "mode": "eval"}),
    ("BX1247", {"offload": WEIGHTS, "tensor": 2}),
    ("BX1248", {"offload": ("state",), "replicas": 2, "zero_stage": 3}),
    ("BX1239b", {"offload": WEIGHTS, "schedule": "zb-h1"}),
    ("BX1239c", {"offload": WEIGHTS, "recompute": (0,)}),
    ("BX1239c", {"offload": WEIGHTS, "recompute": ()}),
    ("BX1239d", {"offload": WEIGHTS, "defer": "all"}),
    ("BX1239e", {"offload": WEIGHTS, "replicas": 2}),
    ("BX1239f", {"offload": WEIGHTS, "sum_order": "tree"}),
    ("BX1284a", {"schedule": "gems", "mode": "eval"}),
    ("BX1285a", {"schedule": "gems", "tensor": 2}),
    ("BX1285b", {"schedule": "gems", "zero_stage": 1}),
    ("BX1285c", {"schedule": "gems", "sum_order": "backend"}),
    ("BX1285d", {"schedule": "gems", "replicas": 0}),
    ("BX1285e", {"schedule": "gems", "replica_shares": (2, 1)}),
    ("BX1318", {"schedule": "gems", "in_flight": (1, 1)}),
    ("BX1285g", {"schedule": "gems", "pins": (("blocks.0", "d0"),)}),
    ("BX1285h", {"schedule": "gems", "partitioner": AUTO}),
    ("BX1285i", {"schedule": "gems", "defer": "all"}),
    ("BX1231", {"pieces": 2}),
    ("BX1231", {"schedule": "zb-v", "pieces": 3}),
    ("BX1231", {"schedule": "interleaved", "pieces": 1}),
    ("BX1232", {"schedule": "interleaved", "pins": (("blocks.0", "d0"),)}),
    ("BX1326", {"tensor": 0, "tensor_shares": (2, 1)}),
    ("BX1327a", {"tensor_shares": (2, 1)}),
    ("BX1327b", {"tensor_axes": ("heads",)}),
    ("BX1291", {"zero_stage": 1}),
    ("BX1289a", {"replicas": 2, "shard_group": 2}),
    ("BX1289b", {"replicas": 0, "zero_stage": 1, "shard_group": "host"}),
    ("BX1292", {"replica_shares": (3,)}),
    ("BX1293a", {"replicas": 2, "mode": "eval"}),
    ("BX1294", {"replicas": 3, "replica_shares": (2, 1)}),
    ("BX1296", {"replicas": 2, "zero_stage": 2, "sum_order": "replica"}),
    ("BX1298", {"replicas": 2, "zero_stage": 3, "schedule": "zb-v"}),
    ("BX1298", {"replicas": 2, "zero_stage": 3, "defer": "all"}),
)
BY_BUNDLE: tuple[tuple[str, dict[str, object]], ...] = (
    ("BX1297", {"replicas": 2, "zero_stage": 3, "sum_order": "backend"}),
)
BY_MODEL: tuple[tuple[str, dict[str, object], dict[str, object]], ...] = (
    ("BX1203a", {"asynchronous": "2bw"}, {"graph": NO_LOSS}),
    ("BX1203b", {"asynchronous": "2bw"}, {"source": replace(SOURCE, clip_norm=1.0)}),
    ("BX1203c", {"asynchronous": "2bw"}, {"source": replace(SOURCE, grad_scaler={})}),
    ("BX1203d", {"asynchronous": "2bw"}, {"source": replace(SOURCE, drop_last=False)}),
    ("BX1203f", {"asynchronous": "2bw"}, {"source": LENGTHS}),
    ("BX1203e", {"asynchronous": "stash"}, {"graph": WRITING}),
    ("BX1228a", {"compiled": True}, {"source": replace(SOURCE, drop_last=False)}),
    ("BX1228b", {"compiled": True}, {"graph": DRAWING}),
    ("BX1228c", {"compiled": True}, {"source": LENGTHS}),
    ("BX1249", {"offload": ("state",)}, {"cluster": ONE_STORE}),
    ("BX1239a", {"offload": WEIGHTS}, {"cluster": GPU}),
    ("BX1239g", {"offload": WEIGHTS}, {"source": replace(SOURCE, grad_scaler={})}),
    ("BX1284b", {"schedule": "gems"}, {"graph": NO_LOSS}),
    ("BX1293b", {"replicas": 2}, {"graph": NO_LOSS}),
    ("BX1329", {"tensor": 2}, {"graph": NO_LOSS}),
    ("BX1349", {"tensor": 2}, {"source": LENGTHS}),
    ("BX1352a", {"replicas": 2}, {"graph": STATEFUL}),
    ("BX1352b", {"tensor": 2}, {"graph": STATEFUL}),
    ("BX1352c", {"asynchronous": "2bw"}, {"graph": STATEFUL}),
    ("BX1352d", {"compiled": True}, {"graph": STATEFUL}),
    ("BX1352e", {"recompute": "all"}, {"graph": STATEFUL}),
)
BY_PLAN: tuple[tuple[str, dict[str, object]], ...] = (
    ("BX3015", {"pins": (("0", "d0"),)}),
    ("BX3016", {"cut_at": "blocks"}),
    ("BX3018", {"tensor": 2}),
)
FOLLOWED = [case for case in BY_MODEL if not {"replicas", "tensor"} & set(case[1])]
"""A plan to follow has replicas and groups of its own."""


def asked(chosen: dict[str, object]) -> Options:
    return replace(TWO, **chosen)  # type: ignore[arg-type]  # fields of Options by name


def request(chosen: dict[str, object], about: dict[str, object]) -> Request:
    found = {"cluster": PAIR, "graph": GRAPH, "source": SOURCE, **about}
    return Request(asked(chosen), **found)  # type: ignore[arg-type]  # fields of Request


def test_every_rule_is_met_by_a_case() -> None:
    cases = {code for code, *_ in (*BY_OPTIONS, *BY_BUNDLE, *BY_MODEL, *BY_PLAN)}
    assert cases == {rule.code for rule in RULES}


def test_a_required_option_has_another_remedy() -> None:
    said = {rule.code for rule in RULES if not rule.instead}
    assert said <= {rule.code for rule in RULES if _is_option(rule.other.name)}


def _is_option(name: str) -> bool:
    return name.startswith("--") or name == "in_flight"


@pytest.mark.parametrize(("code", "chosen"), BY_OPTIONS)
def test_a_model_is_not_run_for_options_that_do_not_go_together(
    code: str, chosen: dict[str, object], tmp_path: Path
) -> None:
    model = tmp_path / "model.py"
    model.write_text("raise SystemExit('the model was run')\n")
    options = asked(chosen)
    for what in (
        lambda: split(model, PAIR, tmp_path / "out", options),
        lambda: estimate(model, PAIR, options),
        lambda: make_plan(GRAPH, PAIR, SOURCE, options),
    ):
        with pytest.raises(InputError) as caught:
            what()
        assert caught.value.code == code
        assert caught.value.help
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("code", "chosen"), BY_BUNDLE)
def test_plans_that_no_bundle_runs_are_forecast(
    code: str, chosen: dict[str, object], tmp_path: Path
) -> None:
    options = asked(chosen)
    assert make_plan(GRAPH, PAIR, SOURCE, options).forecast.step_s > 0
    with pytest.raises(InputError) as caught:
        split(tmp_path / "model.py", PAIR, tmp_path / "out", options)
    assert caught.value.code == code


@pytest.mark.parametrize(("code", "chosen", "about"), BY_MODEL)
def test_a_model_or_a_cluster_that_does_not_go_with_an_option_is_refused(
    code: str, chosen: dict[str, object], about: dict[str, object]
) -> None:
    found = request(chosen, about)
    assert found.graph is not None
    assert found.source is not None
    with pytest.raises(InputError) as caught:
        make_plan(found.graph, found.cluster, found.source, found.options)
    assert caught.value.code == code
    assert conflict(request({}, about)) is None


@pytest.mark.parametrize(("code", "chosen", "about"), FOLLOWED)
def test_a_followed_plan_is_refused_by_the_same_rules(
    code: str, chosen: dict[str, object], about: dict[str, object]
) -> None:
    """`--like` had none of these checks: it wrote bundles that could not run, or trained others."""
    found = request(chosen, about)
    assert found.graph is not None
    assert found.source is not None
    followed = make_plan(GRAPH, PAIR, SOURCE, TWO).placement
    with pytest.raises(InputError) as caught:
        plan_placed(found.graph, found.cluster, found.source, found.options, followed)
    assert caught.value.code == code


@pytest.mark.parametrize(("code", "chosen"), BY_PLAN)
def test_options_that_a_followed_plan_decides_are_refused(
    code: str, chosen: dict[str, object]
) -> None:
    with pytest.raises(InputError) as caught:
        require_compatible(Request(asked(chosen), PAIR, is_placed=True))
    assert caught.value.code == code


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "auto"])
def test_backwards_that_are_not_split_go_with_zero_3(schedule: str) -> None:
    whole: dict[str, object] = {"zero_stage": 3, "replicas": 2, "schedule": schedule}
    assert conflict(request({**whole, "defer": ()}, {})) is None
    rule = conflict(request(whole, {}))
    assert rule is not None
    assert rule.code == "BX1298"


def test_the_partitioner_of_a_followed_plan_does_not_matter() -> None:
    """A plan that `auto` made can be followed by what `auto` does not choose."""
    options = replace(TWO, partitioner=AUTO, asynchronous="2bw")
    require_compatible(Request(options, PAIR, is_placed=True))
    followed = make_plan(GRAPH, PAIR, SOURCE, TWO).placement
    plan = plan_placed(GRAPH, PAIR, SOURCE, options, followed)
    assert plan.stages.asynchronous == "2bw"


@pytest.mark.parametrize(
    "chosen",
    [{}, {"asynchronous": "2bw"}, {"compiled": True}, {"quantize": "int8"}, {"replicas": 2}],
)
def test_compatible_options_are_not_refused(chosen: dict[str, object]) -> None:
    assert conflict(request(chosen, {})) is None
    assert conflict(request(chosen, {"cluster": NO_STORES})) is None


def test_2bw_goes_with_what_a_forward_writes() -> None:
    assert conflict(request({"asynchronous": "2bw"}, {"graph": WRITING})) is None


def test_a_store_to_add_is_named_by_its_device() -> None:
    rule = conflict(request({"offload": ("state",)}, {"cluster": ONE_STORE}))
    assert rule is not None
    assert '"device": "d1"' in str(
        rule.error(request({"offload": ("state",)}, {"cluster": ONE_STORE}))
    )
