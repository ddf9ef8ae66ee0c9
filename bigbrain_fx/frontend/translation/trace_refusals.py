"""Table of code that no trace can hold, and of code to write instead.

    BX0101 a branch that depends on data      BX0120 random numbers of Python that are baked in
    BX0110 a custom autograd.Function         BX0130 a tensor's number read in Python
    BX0140 a leaf module                      BX0150 a loss that cannot be traced
    BX0121 a torch.Generator of its own       BX0151 a loss that is no scalar tensor
    BX0160 state in a plain attribute         BX0170 a hook on gradients of parameters
    BX0172 a module's hook on gradients, or one that its forward sets
    BX0199 anything else that torch.export cannot follow
    BX0201 a graph that computes something else

`code` is the text of the user's line. `refusals` finds the row of an error of torch.
"""

from __future__ import annotations

from bigbrain_fx.frontend.refusal import Refusal, TraceRefusal
from bigbrain_fx.frontend.translation.sources import makes_text

OWN_PART = (
    "those lines into a module of their own (self.part = Part() in __init__), which becomes opaque"
)
FROM_THE_INPUT = "take sizes from the input: x.shape[0], not a number nor len(x), which is one"
AS_TEXT = (
    "keep the tensor, and make text of it where it is read: self.last = h.std().detach(); a "
    'statement that only prints or logs it, print(f"{h.std():.3f}"), is left out of the bundle'
)
CHOICE = (
    "for torch.cond compute both ways and choose with torch.where(flag, one, two); or write if and "
    "while of Python in a module of its own (self.part = Part() in __init__): a module inside the "
    "model becomes opaque"
)
_KEPT_PART = (
    "(self.part = Part() in __init__): a module inside the model becomes opaque, with the code "
    "that registers the operator"
)

SIZE = TraceRefusal(
    "the model holds a size that only this number of rows fits: a buffer, a constant, a branch or "
    "len(x)",
    code="BX2181",
    help=FROM_THE_INPUT,
)
GENERATOR = TraceRefusal(
    "forward or loss draws from a torch.Generator of its own: a bundle seeds each draw by its step "
    "and micro-batch",
    code="BX0121",
    help="leave generator= out; numbers that are to be the same in every call are drawn once, in "
    "__init__, and held: self.register_buffer('noise', torch.randn(8))",
)
UNKNOWN = TraceRefusal(
    "torch.export cannot follow the model: {error}", code="BX0199d", help="{instead}"
)
BRANCH = TraceRefusal(
    "the model reads a tensor's value in Python, so its path depends on data: {code}",
    code="BX0101a",
    help="{instead}",
)
BY_DICE = TraceRefusal(
    "random numbers decide which way the model goes: {code}",
    code="BX0120a",
    help="switch that off (layerdrop=0), or use torch.where; --assume {at}=false (or =true) keeps "
    "one side, and whoever runs the bundle is told where it does not hold",
)
UNDECIDED = TraceRefusal(
    "the model reads a tensor's value in Python, and its path depends on it: it is true in one run "
    "and false in another: {code}",
    code="BX0101b",
    help="decide with torch.where instead of if, or keep one side with --assume {at}=false (or "
    f"=true): whoever runs the bundle is told where it does not hold; or put {OWN_PART}; if random "
    "numbers decide there (LayerDrop), switch that off (layerdrop=0)",
)
SIZE_READ = TraceRefusal(
    "data decide how many rows a tensor has, and the model asks for it: {code}",
    code="BX0130c",
    help="use a mask and torch.where instead of selecting rows (x[x > 0], nonzero()); or {whole}",
)
NUMBER_READ = TraceRefusal(
    "the model reads a tensor's value in Python, and it may be another one for every batch: {code}",
    code="BX0130d",
    help="{instead}",
)
BAKED_DICE = TraceRefusal(
    "forward draws random numbers with Python or NumPy, and a trace would keep one draw: two runs "
    "that differ in that seed alone compute other numbers",
    code="BX0120b",
    help="draw with torch.rand and decide with torch.where, or switch it off for training on "
    "several devices: a probability of 0 (layerdrop=0, mask_time_prob=0)",
)
TRANSFORMED = TraceRefusal(
    "forward computes inside torch.vmap or torch.func, whose tensors no graph holds: {code}",
    code="BX0199f",
    help="put that call, with the parameters that it uses, into a module of its own (self.part = "
    "Part() in __init__): a module inside the model becomes opaque",
)
SPARSE = TraceRefusal(
    "forward has a sparse tensor, and a graph's are dense: {code}",
    code="BX0199g",
    help="multiply by its entries: torch.zeros_like(h).index_add(1, index[0], h[:, index[1]] * "
    "value), where index and value are buffers: coo.indices().clone() and coo.values().clone() of "
    "coo = adj.to_sparse_coo().coalesce()",
)
CUSTOM_OPERATOR = TraceRefusal(
    "forward calls the custom operator {name}, which a bundle does not know: {code}",
    code="BX0199h",
    help=f"call it in a module of its own {_KEPT_PART}",
)
PAST_TRACE = "fake tensor in the exported program constant"
"""What torch.export says where a tensor came round the trace."""
AUTOGRAD = TraceRefusal(
    "forward asks autograd for gradients (torch.autograd.grad), and a trace has none",
    code="BX0185",
    help="put that call into a module of its own (self.part = Part() in __init__): a module inside "
    "the model becomes opaque",
)
BY_DATA = TraceRefusal(
    "forward goes past the trace: through .data of a tensor, or in threads of its own",
    code="BX0181b",
    help="read .detach() for .data; write in place under torch.no_grad(), to buffers and frozen "
    "parameters: b.mul_(0.9).add_(a, alpha=0.1) for b.data = b.data * 0.9 + a.data * 0.1; what is "
    "trained: after the step, in the optimizer (a class whose step() calls super().step() and then "
    "writes)",
)
CONTROL_FLOW = TraceRefusal(
    "forward calls control flow of torch, which no graph of ops holds: {code}",
    code="BX0199c",
    help=CHOICE,
)
KEPT_FROM_COMPILERS = TraceRefusal(
    "a function of the model has @torch.compiler.disable(recursive=False), which no trace goes "
    "through",
    code="BX0199a",
    help="write @torch.compiler.disable, or leave it out: a bundle's stages are not compiled "
    "unless --compile says so",
)
COPIES = TraceRefusal(
    "forward copies a module or a tensor with the module copy, which looks at memory that a trace "
    "has not",
    code="BX0199b",
    help="x.clone() for a tensor; a module with the weights of now, without gradient: "
    "torch.func.functional_call(part, {{n: p.detach() for n, p in part.named_parameters()}}, (x,));"
    " one that stays as it is: copy it in __init__",
)
LAST_ROWS = Refusal(
    "the model takes the first half of the rows of its example batch, and not the second, as a "
    "micro-batch would have them: {error}",
    code="BX2182",
    help="let every row stand alone: instead of offsets into another entry of the batch give a row "
    "of indices each (rows, items), with padding_idx where they have unlike lengths; a graph each: "
    "nodes (graphs, nodes, features), edges (graphs, 2, edges), and forward adds nodes * "
    "torch.arange(graphs)[:, None, None] to the edges",
)


def instead_of_branch(at: str | None, code: str) -> str:
    """Return the replacement for a branch on a tensor."""
    if makes_text(code):
        return AS_TEXT
    return (
        f"decide with torch.where instead of if; or put {OWN_PART}; or say which way it goes with "
        f"--assume {at or 'model.py:31'}=false (or =true; the bundle checks it)"
    )


def instead_of_number(code: str, module: str | None) -> str:
    """Return the replacement for a number of a tensor."""
    if makes_text(code):
        return AS_TEXT
    return (
        "keep the value in a tensor: leave out .item(), int(), float(), .tolist(), and compare "
        "tensors (`if x.sum() > 0:`); write at a place that a tensor tells with "
        "buffer.index_copy_(dim, (self.ptr + torch.arange(n)) % size, rows); or "
        f"{line_whole(module)}"
    )


def line_whole(module: str | None) -> str:
    """Return the way to make the module around a line opaque."""
    if module is None:
        return "put it into a module of its own and make that opaque: --opaque with its class"
    return f"make the module that holds that line opaque: --opaque {module}"
