"""Table of refusals of the user's optimizer and scheduler; `trial` and its users raise its rows."""

from __future__ import annotations

from bigbrain_fx.frontend.refusal import Refusal
from bigbrain_fx.frontend.tracing.hooks import ON_PARAMETER

_OWN = ("every device makes an optimizer of its own, and gives it the parameters it has",)
_OF_TORCH = "such as torch.optim.AdamW(named_params)"

NO_OPTIMIZER = Refusal(
    "optimizer(named_params) must return an optimizer, found {found}", code="BX2156", help="{how}"
)
NEEDS_ARGUMENTS = Refusal(
    "{kind}.step({needed}) cannot be called: a bundle computes the loss once a step, over all "
    "devices",
    code="BX2157",
    help=f"give an optimizer whose step() needs no argument, {_OF_TORCH}",
)
HOLDS_NONE = Refusal(
    "the {kind} of optimizer(named_params) holds none of the parameters it was given",
    code="BX2158",
    notes=("a bundle has parameters of its own, by the names of the model's",),
    help="take the parameters from named_params: torch.optim.AdamW(named_params)",
)
TOUCHES = Refusal(
    "optimizer(named_params) {does} {name}: it is made once for each device, and again where one "
    "is replaced, and no plan knows of what else it does",
    code="BX2155",
    help="{instead}",
)
FREEZES = ("freezes", "freeze it in model(), with requires_grad_(False)")
SETS_HOOK = ("sets a gradient hook on", ON_PARAMETER)
WRITES = ("writes into", "change weights in model(), before they are trained")

FAILS = Refusal(
    "optimizer(named_params), or a step of it, fails: {error}",
    code="BX2141",
    notes=("it was given parameters of the model's names, shapes and types, and gradients",),
    help="let optimizer(list(model.named_parameters())) run in plain PyTorch first; choose by "
    "names and shapes, and give an optimizer whose step() needs nothing but gradients, "
    f"{_OF_TORCH}",
)
FAILS_ON_PART = Refusal(
    "optimizer(named_params) fails on {share}: {error}",
    code="BX2142",
    notes=_OWN,
    help="choose by the names it is given, in groups that may be empty: {{'params': [p for n, p in "
    "named_params if n == 'head.weight'], 'lr': 0.1}}; freeze what is not to be trained in "
    "model(), with requires_grad_(False); or split over one device",
)
TOGETHER = Refusal(
    "optimizer(named_params) looks at more than one parameter at a time: on {share}, it updates "
    "{name} otherwise, by {error:.1e} of its update",
    code="BX2139",
    notes=_OWN,
    help="update each parameter by its own gradient alone, as torch.optim.AdamW does, and choose "
    "by names, not by places in the list, which each device has a part of (`clip_norm = 1.0` in "
    "the model file clips by the norm over all devices), or let one device have all of them: "
    "leave --zero out, or split over one device",
)
TOGETHER_WHERE = Refusal(
    "optimizer(named_params) looks at more than one parameter where gradients {when}: on {share}, "
    "it updates {name} otherwise then",
    code="BX2140",
    notes=_OWN,
    help="{instead}",
)
CLIP_OR_SCALE = (
    "let the model file say it for all devices: clip_norm = 1.0 clips by the norm of all "
    "gradients, and grad_scaler = {'init_scale': 1.0, 'growth_interval': 10**9} leaves out each "
    "step where one is not finite; or split over one device"
)
GROUP_FOR_EACH = (
    "what is estimated over a group (a rate from all gradients, as Prodigy and D-Adaptation do) is "
    "estimated for each parameter: [{'params': [p]} for _, p in named_params] gives each a group "
    "of its own; or give a rate, as torch.optim.AdamW takes one; or split over one device"
)
KEEPS = Refusal(
    "optimizer(named_params) keeps what a process that replaces a dead one would lack: {what}",
    code="BX2137",
    notes=("what is kept: state[p], for each parameter p, and the numbers of param_groups",),
    help="keep it there: self.state[p]['count'] for a counter, torch.stack(old) for a list of "
    "tensors; of a wrapper round others, in its __init__: for part in parts: part.state = "
    "self.state, and self.param_groups = [g for part in parts for g in part.param_groups]; for a "
    "scheduler define scheduler(optimizer) in the model file, which returns it; for a GradScaler "
    "write grad_scaler = True there",
)
DRAWS = Refusal(
    "optimizer(named_params) draws random numbers in step(), and every device draws others",
    code="BX2136",
    help="let the model add the noise: torch.randn_like in forward is drawn by keys, the same in "
    "every run; or leave it out",
)
COUNTS = Refusal(
    "optimizer(named_params) goes by {name}, which moves with each step and is in no state of a "
    "parameter: {runs} steps later the same gradients give other updates, and a process that "
    "replaces a dead one begins to count anew",
    code="BX2124",
    help="count in a group or for each parameter: group['calls'] = group.get('calls', 0) + 1, or "
    "self.state[p]['calls']; rates go by scheduler(optimizer) or lr_scale(step)",
)
LOOKS_AT_MORE_NUMBERS = Refusal(
    "optimizer(named_params) looks at more than one number at a time: with --tensor-parallel it "
    "updates "
    "{what} otherwise, by {error:.1e} of its update",
    code="BX2107",
    notes=("every TP rank makes an optimizer of its own, and gives it the rank's shards",),
    help="update each number by its own gradient alone, as torch.optim.AdamW does, or leave "
    "--tensor-parallel out",
)

_BY_STEPS = "such as torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)"
SCHEDULER_FAILS = Refusal(
    "scheduler(optimizer), or a step of it, fails: {error}",
    code="BX2146",
    help=f"give a scheduler that sets rates by the number of steps, {_BY_STEPS}",
)
NO_SCHEDULER = Refusal(
    "scheduler(optimizer) must return a scheduler, found {kind}",
    code="BX2147",
    help="return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)",
)
SCHEDULER_NEEDS_NUMBER = Refusal(
    "{kind}.step({needed}) cannot be called: it needs a number of the training, such as the loss, "
    "which one device alone has",
    code="BX2148",
    help=f"give a scheduler that sets rates by the number of steps, {_BY_STEPS}",
)
