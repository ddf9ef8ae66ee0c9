"""All incompatibilities as data: refusals, the page and the searches' filters read it.

The first rule that applies is the one a user sees: faults without a remedy stand first. Faults of
options alone are refused before a model is captured, which may take minutes. Rules about features
of the model do not apply to a request without a model.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigbrain_fx.plan.compatibility import features as f
from bigbrain_fx.plan.compatibility.features import Request, Rule

_FOR_TRAINING = "nothing is trained there", "split with --mode train"
_NAME_ANOTHER = "name another partitioner (--partitioner analytical)"
_ONE_OF_EACH = "put the loss into the model file: loss(output, batch)"
_STORE = '{"name": "disk", "device": "NAME", "folder": "/scratch", "capacity": "64GiB", "bandwidth": "1GB/s"}'  # noqa: E501  # as it is pasted


def _with_store(request: Request) -> str:
    store = _STORE.replace("NAME", f.without_store(request))
    return f'name one for it in "stores" of the cluster file: {store}'


def _shares_as_members(request: Request) -> str:
    count = max(2, len(request.options.tensor_shares))
    return f"add --tensor-parallel {count}, on as many devices or more"


def _as_many_replicas(request: Request) -> str:
    return f"write --replicas {max(2, len(request.options.replica_shares))}"


_WHOLE_BACKWARDS = (
    "use --schedule 1f1b or gpipe, --activation-checkpointing all, and a named partitioner"
)
_AS_PLACED = "it places ops as another plan did"
_CUTS = (
    Rule(f.LIKE, f.BY_HAND, _AS_PLACED, code="BX3015"),
    Rule(f.LIKE, f.CUT_AT, _AS_PLACED, code="BX3016"),
    Rule(f.LIKE, f.GROUPS, f"{_AS_PLACED}, each on one device", code="BX3018"),
    Rule(
        f.CUT_AT,
        f.VIRTUAL_STAGES,
        "it cuts the line itself, wherever devices are busy alike",
        "use --schedule 1f1b, gpipe or list",
        code="BX1200",
    ),
    Rule(f.CUT_AT, f.PLACE, "the file says where each op goes", code="BX1201a"),
    Rule(
        f.CUT_AT,
        f.WITHOUT_CUT_AT,
        "it says where each op goes, and has no such option",
        "use --partitioner analytical or auto",
        code="BX1201b",
    ),
    Rule(f.BY_HAND, f.SEARCHED, "it chooses devices itself", _NAME_ANOTHER, code="BX1212"),
)
_BACKWARDS = (
    Rule(f.DEFER, f.INFERENCE, *_FOR_TRAINING, code="BX1229a"),
    Rule(f.RECOMPUTE, f.INFERENCE, *_FOR_TRAINING, code="BX1229b"),
)
_ASYNCHRONOUS = (
    Rule(f.ASYNCHRONOUS, f.INFERENCE, *_FOR_TRAINING, code="BX1202a"),
    Rule(
        f.ASYNCHRONOUS,
        f.SEARCHED,
        "it chooses among plans that compute the same",
        _NAME_ANOTHER,
        code="BX1202b",
    ),
    Rule(
        f.ASYNCHRONOUS,
        f.REPLICAS,
        "stages would sum different versions",
        'leave --replicas out, and "replicas" of the cluster file',
        code="BX1202c",
    ),
    Rule(f.ASYNCHRONOUS, f.SUM_ORDER, "they are for replicas", "leave both out", code="BX1202d"),
    Rule(f.ASYNCHRONOUS, f.GROUPS, "TP ranks would have different versions", code="BX1202e"),
    Rule(f.ASYNCHRONOUS, f.OFFLOAD, "versions are in memory", code="BX1202f"),
    Rule(f.ASYNCHRONOUS, f.RECOMPUTE, "", code="BX1202g"),
    Rule(f.ASYNCHRONOUS, f.DEFER, "only gradients of whole backwards go on", code="BX1202h"),
    Rule(f.ASYNCHRONOUS, f.NOT_1F1B, "it has 1F1B's order", "use --schedule 1f1b", code="BX1202i"),
    Rule(f.ASYNCHRONOUS, f.IN_FLIGHT, "it has 1F1B's own", code="BX1202j"),
    Rule(f.ASYNCHRONOUS, f.NO_LOSS, "nothing ends a step there", _ONE_OF_EACH, code="BX1203a"),
    Rule(
        f.ASYNCHRONOUS,
        f.CLIPPING,
        "no global norm exists while other devices go on",
        "take clip_norm out of the model file",
        code="BX1203b",
    ),
    Rule(
        f.ASYNCHRONOUS,
        f.LOSS_SCALE,
        "all devices would have to agree on each update",
        "take grad_scaler out of the model file",
        code="BX1203c",
    ),
    Rule(
        f.ASYNCHRONOUS,
        f.SMALLER_BATCHES,
        "a step of fewer rows would run into the one after it",
        "say drop_last = True in the model file",
        code="BX1203d",
    ),
    Rule(
        f.ASYNCHRONOUS,
        f.LENGTHS,
        "a step of other shapes would run into the one after it",
        f.ONE_LENGTH,
        code="BX1203f",
    ),
    Rule(
        f.STASH,
        f.WRITTEN,
        "its passes have different weights",
        "use --asynchronous 2bw, put the module into eval()",
        code="BX1203e",
    ),
)
_COMPILE = (
    Rule(
        f.COMPILE,
        f.DIVIDED_BACKWARD,
        "it hooks into what autograd keeps of a layer",
        _WHOLE_BACKWARDS,
        code="BX1227e",
    ),
    Rule(
        f.COMPILE,
        f.OFFLOAD_SAVED,
        "they hook into what autograd keeps",
        "use --offload state",
        code="BX1227a",
    ),
    Rule(f.COMPILE, f.ASYNCHRONOUS, "its older weights take the place of others", code="BX1227b"),
    Rule(f.COMPILE, f.GROUPS, "TP ranks exchange messages within a forward", code="BX1227c"),
    Rule(
        f.COMPILE,
        f.ZERO_3,
        "weights come and go between forward and backward",
        "use --zero 2",
        code="BX1227d",
    ),
    Rule(
        f.COMPILE,
        f.SMALLER_BATCHES,
        "shapes are fixed",
        "say drop_last = True in the model file",
        code="BX1228a",
    ),
    Rule(f.COMPILE, f.LENGTHS, "shapes are fixed", f.ONE_LENGTH, code="BX1228c"),
    Rule(
        f.COMPILE,
        f.RANDOM,
        "compiled code draws others",
        "set dropout to 0 in the model file",
        code="BX1228b",
    ),
)
_INT8 = "float weights are made again for each backward"
_QUANTIZE = (
    Rule(f.QUANTIZE, f.GROUPS, "weights in int8 are not divided yet", code="BX1258a"),
    Rule(f.QUANTIZE, f.OFFLOAD_WEIGHTS, "", "use --offload activations,state", code="BX1258b"),
    Rule(f.QUANTIZE, f.CACHE, "", code="BX1258c"),
    Rule(f.QUANTIZE_TRAINING, f.DIVIDED_BACKWARD, _INT8, _WHOLE_BACKWARDS, code="BX1258f"),
    Rule(f.QUANTIZE_TRAINING, f.ASYNCHRONOUS, _INT8, code="BX1258d"),
    Rule(f.QUANTIZE_TRAINING, f.COMPILE, _INT8, code="BX1258e"),
)
_WHOLE = "keys and values are not divided: they stay where and as the model makes them"
_CACHE = (
    Rule(f.CACHE, f.TRAINING, "it is for generation", "add --mode eval", code="BX3008"),
    Rule(f.CACHE, f.GROUPS, _WHOLE, code="BX3009a"),
    Rule(f.CACHE, f.WANTED_REPLICAS, _WHOLE, code="BX3009b"),
    Rule(f.CACHE, f.OFFLOAD, _WHOLE, code="BX3009c"),
    Rule(f.CACHE, f.COMPILE, _WHOLE, code="BX3009d"),
)
_BY_LAYER = "stages come into memory one after the other"
_OFFLOAD = (
    Rule(f.OFFLOAD, f.INFERENCE, *_FOR_TRAINING, code="BX1246"),
    Rule(
        f.OFFLOAD_WEIGHTS,
        f.GROUPS,
        "a device runs its layers by itself",
        "use --offload activations,state, or leave --tensor-parallel out",
        code="BX1247",
    ),
    Rule(f.OFFLOAD, f.ZERO_3, "", "use --zero 1 or 2, which divide the state, too", code="BX1248"),
    Rule(f.OFFLOAD, f.NO_STORE, "there is nowhere to offload to", _with_store, code="BX1249"),
    Rule(
        f.OFFLOAD_WEIGHTS,
        f.GPUS,
        "they compute in memory of their own",
        "use --offload activations,state, or cpu devices alone",
        code="BX1239a",
    ),
    Rule(
        f.OFFLOAD_WEIGHTS,
        f.NOT_GPIPE,
        f"{_BY_LAYER}, and it comes back to each for each micro-batch",
        "leave --schedule out, or write --schedule gpipe",
        code="BX1239b",
    ),
    Rule(
        f.OFFLOAD_WEIGHTS,
        f.RECOMPUTE_SOME,
        "it keeps what other stages save",
        "leave --activation-checkpointing out: every stage runs its forward again",
        code="BX1239c",
    ),
    Rule(f.OFFLOAD_WEIGHTS, f.DEFER, "it keeps gradients of weights waiting", code="BX1239d"),
    Rule(
        f.OFFLOAD_WEIGHTS,
        f.REPLICAS,
        "they sum gradients in memory",
        "write --replicas 1, and no --zero and no --all-reduce-order",
        code="BX1239e",
    ),
    Rule(
        f.OFFLOAD_WEIGHTS,
        f.SUM_ORDER,
        "they are for replicas, which sum gradients in memory",
        "write --replicas 1, and no --zero and no --all-reduce-order",
        code="BX1239f",
    ),
    Rule(
        f.OFFLOAD_WEIGHTS,
        f.LOSS_SCALE,
        "it divides all gradients at once, in memory",
        "train in bfloat16 without grad_scaler, or use --offload activations,state",
        code="BX1239g",
    ),
)
_OWN_ORDER = "gems has an order of its own, of two replicas on every device"
_GEMS = (
    Rule(f.GEMS, f.INFERENCE, *_FOR_TRAINING, code="BX1284a"),
    Rule(f.GEMS, f.NO_LOSS, "nothing ends a step there", _ONE_OF_EACH, code="BX1284b"),
    Rule(f.GEMS, f.GROUPS, _OWN_ORDER, code="BX1285a"),
    Rule(f.GEMS, f.ZERO, _OWN_ORDER, code="BX1285b"),
    Rule(
        f.GEMS,
        f.SUM_BY_BACKEND,
        _OWN_ORDER,
        "use --all-reduce-order replica, micro or tree",
        code="BX1285c",
    ),
    Rule(
        f.GEMS,
        f.OPEN_REPLICAS,
        _OWN_ORDER,
        "say how many groups of devices, --replicas 2",
        code="BX1285d",
    ),
    Rule(f.GEMS, f.REPLICA_SHARES, _OWN_ORDER, code="BX1285e"),
    Rule(f.GEMS, f.BY_HAND, "each module is on two devices", code="BX1285g"),
    Rule(f.GEMS, f.SEARCHED, _OWN_ORDER, _NAME_ANOTHER, code="BX1285h"),
    Rule(f.GEMS, f.DEFER, _OWN_ORDER, code="BX1285i"),
)
_VIRTUAL = (
    Rule(
        f.OWN_IN_FLIGHT,
        f.IN_FLIGHT,
        "it says itself how many micro-batches are",
        "use --schedule list or 1f1b",
        code="BX1318",
    ),
    Rule(
        f.PIECES,
        f.NO_SUCH_PIECES,
        "it says how many pieces of a line each device has",
        "use --schedule interleaved with --virtual-stages 2 or more",
        code="BX1231",
    ),
    Rule(
        f.VIRTUAL_STAGES,
        f.BY_HAND,
        "it cuts the line anew, and would move what was placed by hand",
        "use --schedule auto or list, which keep every placement",
        code="BX1232",
    ),
)
_REPLICAS = (
    Rule(f.ZERO, f.ONE_REPLICA, "it divides among replicas", _as_many_replicas, code="BX1291"),
    Rule(
        f.SHARD_GROUP,
        f.NO_ZERO,
        "it says among which replicas ZeRO divides",
        "add --zero 1, 2 or 3",
        code="BX1289a",
    ),
    Rule(
        f.SHARD_GROUP,
        f.OPEN_REPLICAS,
        "it divides a number of replicas",
        "say how many, as in --replicas 4",
        code="BX1289b",
    ),
    Rule(
        f.REPLICA_SHARES,
        f.ONE_REPLICA,
        "each replica has a share",
        "give several, as in 3:1",
        code="BX1292",
    ),
    Rule(
        f.WANTED_REPLICAS,
        f.INFERENCE,
        "nothing is trained there",
        "split with --mode train; to infer faster, start the bundle several times",
        code="BX1293a",
    ),
    Rule(f.WANTED_REPLICAS, f.NO_LOSS, "nothing ends a step there", _ONE_OF_EACH, code="BX1293b"),
    Rule(
        f.REPLICA_SHARES,
        f.OTHER_REPLICAS,
        "each replica has a share",
        _as_many_replicas,
        code="BX1294",
    ),
    Rule(
        f.ZERO_2_OR_3,
        f.SUM_BY_REPLICA,
        "it keeps no replica's own sum of gradients",
        "leave --all-reduce-order out, which gives micro, or use --all-reduce-order tree",
        code="BX1296",
    ),
    Rule(
        f.ZERO_3,
        f.WRITTEN_BACKEND,
        "bundles gather weights by messages of their own, and only `estimate` knows collectives",
        "use --zero 2, or --all-reduce-order micro",
        code="BX1297",
    ),
    Rule(
        f.ZERO_3,
        f.SPLIT_BACKWARD,
        "it lets go of a stage's weights after its backward, and this has more to do later",
        "use --zero 2, --delay-weight-gradients none, or a schedule whose backwards are whole: "
        "1f1b, gpipe, "
        "interleaved, list",
        code="BX1298",
    ),
)
_GROUPS = (
    Rule(f.GROUPS, f.LENGTHS, "TP ranks exchange fixed shapes", f.ONE_LENGTH, code="BX1349"),
    Rule(
        f.GROUP_SHARES,
        f.OPEN_GROUPS,
        "a ratio has as many parts as a group has devices",
        _shares_as_members,
        code="BX1326",
    ),
    Rule(
        f.GROUP_SHARES,
        f.NO_GROUPS,
        "it divides among devices that compute together",
        _shares_as_members,
        code="BX1327a",
    ),
    Rule(
        f.GROUP_AXES,
        f.NO_GROUPS,
        "it divides among devices that compute together",
        _shares_as_members,
        code="BX1327b",
    ),
    Rule(f.GROUPS, f.NO_LOSS, "", "add loss(output, batch), or say --mode eval", code="BX1329"),
)
_IN_BUFFERS = "hold it in buffers, written in place (register_buffer)"
_OWN_DEVICES = "leave --replicas out: the devices are one pipeline then"
_STATE = (
    Rule(f.REPLICAS, f.STATE, "each replica would have its own", _OWN_DEVICES, code="BX1352a"),
    Rule(f.GROUPS, f.STATE, "each TP rank would have its own", _IN_BUFFERS, code="BX1352b"),
    Rule(
        f.ASYNCHRONOUS,
        f.STATE,
        "the next step's calls begin before its end",
        _IN_BUFFERS,
        code="BX1352c",
    ),
    Rule(f.COMPILE, f.STATE, "compiled code would keep what it was", _IN_BUFFERS, code="BX1352d"),
    Rule(
        f.RECOMPUTE,
        f.STATE,
        "a forward that runs again would move it twice",
        _IN_BUFFERS,
        code="BX1352e",
    ),
)
RULES: Sequence[Rule] = (
    *_CUTS,
    *_BACKWARDS,
    *_ASYNCHRONOUS,
    *_COMPILE,
    *_QUANTIZE,
    *_CACHE,
    *_OFFLOAD,
    *_GEMS,
    *_VIRTUAL,
    *_GROUPS,
    *_REPLICAS,
    *_STATE,
)
"""In the order in which they are tried."""


def conflict(request: Request) -> Rule | None:
    """Return the first rule that a request breaks, or None."""
    return next((rule for rule in RULES if rule.applies(request)), None)


def require_compatible(request: Request) -> None:
    """Refuse what does not go together.

    Raises:
        InputError: two things were asked for that do not; says what to do instead.
    """
    rule = conflict(request)
    if rule is not None:
        raise rule.error(request)
