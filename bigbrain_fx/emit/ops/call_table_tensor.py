"""The Python forms of operators, views, reductions and elementwise functions.

Each row is an aten signature (without "aten.") and its templates; `call_template` says how they are
read. This table is data: it knows no tensor. A function that takes just what its
op takes stands there by its signature alone: see `called`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bigbrain_fx.core import words

Table = Mapping[str, str | tuple[str, ...]]
"""Signature -> template, or templates in order of preference."""


def called(owner: str, signatures: str) -> Table:
    """Return rows of functions that take what their ops take; what has a default goes by its name.

    "torch" with "cumsum.default(self, dim, dtype=None)" is torch.cumsum(self, dim, dtype=dtype); a
    function of "self" is the tensor's own. Signatures end with a line or a semicolon.
    """
    rows = (row.strip() for row in signatures.replace("\n", ";").split(";"))
    return {row: _call(owner, row) for row in rows if row}


def _call(owner: str, signature: str) -> str:
    name, _, given = signature.removesuffix(")").partition("(")
    names = [part.partition("=") for part in re.split(r", (?![^(]*\))", given)]
    args = [f"{arg}={arg}" if equals else arg for arg, equals, _ in names]
    return f"{owner}.{name.partition('.')[0]}({', '.join(args[owner == 'self' :])})"


_SIGNS = words(
    """
    mul * div / true_divide / remainder % eq == ne != lt < le <= gt > ge >= bitwise_and &
    bitwise_or | bitwise_xor ^ __and__ & __or__ | __xor__ ^ __lshift__ << __rshift__ >>
    """
)
_OPERATORS = dict(zip(_SIGNS[::2], _SIGNS[1::2], strict=True))

_UNARY = words(
    """
    abs acos asin atan ceil cos cosh deg2rad digamma erf erfinv exp exp2 expm1 floor frac
    isfinite isinf isnan lgamma log log10 log1p log2 logical_not reciprocal round rsqrt
    sigmoid sgn sign sin sinc sinh sqrt square tan tanh trunc
    """
)

_BINARY = words(
    """
    atan2 hypot inner kron logaddexp logaddexp2 logical_and logical_or logical_xor maximum
    minimum
    """
)

OPERATORS: Table = {
    **called(
        "torch",
        """
        div.Tensor_mode(self, other, rounding_mode=None)
        div.Scalar_mode(self, other, rounding_mode=None); heaviside.default(self, values)
        """,
    ),
    "add.Tensor(self, other, alpha=1)": ("self + other", "torch.add(self, other, alpha=alpha)"),
    "add.Scalar(self, other, alpha=1)": ("self + other", "torch.add(self, other, alpha=alpha)"),
    "sub.Tensor(self, other, alpha=1)": ("self - other", "torch.sub(self, other, alpha=alpha)"),
    "sub.Scalar(self, other, alpha=1)": ("self - other", "torch.sub(self, other, alpha=alpha)"),
    "rsub.Tensor(self, other, alpha=1)": ("other - self", "torch.rsub(self, other, alpha=alpha)"),
    "rsub.Scalar(self, other, alpha=1)": ("other - self", "torch.rsub(self, other, alpha=alpha)"),
    **{
        f"{name}.{overload}(self, other)": f"self {sign} other"
        for name, sign in _OPERATORS.items()
        for overload in ("Tensor", "Scalar")
    },
    **{
        f"{name}.Scalar_Tensor(self, other)": f"self {_OPERATORS[name]} other"
        for name in ("remainder", "bitwise_and", "bitwise_or", "bitwise_xor")
    },
    "floor_divide.default(self, other)": "self // other",
    "floor_divide.Scalar(self, other)": "self // other",
    "pow.Tensor_Tensor(self, exponent)": "self ** exponent",
    "pow.Tensor_Scalar(self, exponent)": "self ** exponent",
    "pow.Scalar(self, exponent)": "self ** exponent",
    "neg.default(self)": "-self",
    "bitwise_not.default(self)": "~self",
    "matmul.default(self, other)": "self @ other",
}

VIEWS: Table = {
    **called(
        "self",
        """
        view.dtype(self, dtype); transpose.int(self, dim0, dim1)
        swapaxes.default(self, axis0, axis1); swapdims.default(self, dim0, dim1)
        movedim.int(self, source, destination); movedim.intlist(self, source, destination)
        expand_as.default(self, other); view_as.default(self, other)
        reshape_as.default(self, other); broadcast_to.default(self, size); squeeze.default(self)
        squeeze.dim(self, dim); squeeze.dims(self, dim); unsqueeze.default(self, dim)
        unflatten.int(self, dim, sizes); t.default(self)
        diagonal.default(self, offset=0, dim1=0, dim2=1); narrow.default(self, dim, start, length)
        unfold.default(self, dimension, size, step); chunk.default(self, chunks, dim=0)
        split.Tensor(self, split_size, dim=0); split.sizes(self, split_size, dim=0)
        tensor_split.sections(self, sections, dim=0); tensor_split.indices(self, indices, dim=0)
        unbind.int(self, dim=0); conj.default(self)
        contiguous.default(self, memory_format=contiguous_format)
        clone.default(self, memory_format=None); detach.default(self)
        type_as.default(self, other); item.default(self)
        """,
    ),
    "view.default(self, size)": "self.view(*size)",
    "reshape.default(self, shape)": "self.reshape(*shape)",
    "permute.default(self, dims)": "self.permute(*dims)",
    "expand.default(self, size, implicit=False)": "self.expand(*size)",
    "broadcast_tensors.default(tensors)": "torch.broadcast_tensors(*tensors)",
    "flatten.using_ints(self, start_dim=0, end_dim=-1)": "self.flatten(start_dim, end_dim)",
    "numpy_T.default(self)": "self.T",
    "mT.default(self)": "self.mT",
    "mH.default(self)": "self.mH",
    "split_with_sizes.default(self, split_sizes, dim=0)": "self.split(split_sizes, dim=dim)",
    "real.default(self)": "self.real",
    "imag.default(self)": "self.imag",
    "lift_fresh_copy.default(self)": "self.clone()",
    "lift_fresh.default(self)": "self",
    "to.other(self, other, non_blocking=False, copy=False, memory_format=None)": (
        "self.to(other, copy=copy, memory_format=memory_format)"
    ),
    "sym_size.int(self, dim)": "self.size(dim)",
    "sym_size.default(self)": "self.size()",
    "sym_stride.int(self, dim)": "self.stride(dim)",
    "sym_stride.default(self)": "self.stride()",
    "sym_numel.default(self)": "self.numel()",
    "_local_scalar_dense.default(self)": "self.item()",
    "view_as_real.default(self)": "torch.view_as_real(self)",
    "view_as_complex.default(self)": "torch.view_as_complex(self)",
}

REDUCTIONS: Table = {
    **called(
        "torch",
        """
        diff.default(self, n=1, dim=-1, prepend=None, append=None)
        kthvalue.default(self, k, dim=-1, keepdim=False)
        nanmean.default(self, dim=None, keepdim=False, dtype=None); trace.default(self)
        dist.default(self, other, p=2); topk.default(self, k, dim=-1, largest=True, sorted=True)
        sort.default(self, dim=-1, descending=False)
        argsort.default(self, dim=-1, descending=False)
        """,
    ),
    **called(
        "self",
        """
        sum.default(self, dtype=None); mean.default(self, dtype=None)
        prod.default(self, dtype=None); argmax.default(self, dim=None, keepdim=False)
        argmin.default(self, dim=None, keepdim=False); amax.default(self, dim=(), keepdim=False)
        amin.default(self, dim=(), keepdim=False); any.default(self)
        any.dims(self, dim=None, keepdim=False); all.default(self)
        all.dims(self, dim=None, keepdim=False); count_nonzero.default(self, dim=None)
        median.default(self)
        """,
    ),
    "sum.dim_IntList(self, dim, keepdim=False, dtype=None)": (
        "self.sum(dim=dim, keepdim=keepdim, dtype=dtype)"
    ),
    "mean.dim(self, dim, keepdim=False, dtype=None)": (
        "self.mean(dim=dim, keepdim=keepdim, dtype=dtype)"
    ),
    "prod.dim_int(self, dim, keepdim=False, dtype=None)": (
        "self.prod(dim=dim, keepdim=keepdim, dtype=dtype)"
    ),
    **{
        f"{name}.{signature}": f"{call.format(name=name)}"
        for name in ("var", "std", "var_mean")
        for signature, call in {
            "default(self, unbiased=True)": "torch.{name}(self, unbiased=unbiased)",
            "dim(self, dim, unbiased=True, keepdim=False)": (
                "torch.{name}(self, dim=dim, unbiased=unbiased, keepdim=keepdim)"
            ),
            "correction(self, dim=None, correction=None, keepdim=False)": (
                "torch.{name}(self, dim=dim, correction=correction, keepdim=keepdim)"
            ),
        }.items()
    },
    **{
        f"{name}.{signature}": f"torch.{name}({call})"
        for name in ("max", "min")
        for signature, call in {
            "default(self)": "self",
            "other(self, other)": "self, other",
            "dim(self, dim, keepdim=False)": "self, dim=dim, keepdim=keepdim",
        }.items()
    },
    "any.dim(self, dim, keepdim=False)": "self.any(dim=dim, keepdim=keepdim)",
    "all.dim(self, dim, keepdim=False)": "self.all(dim=dim, keepdim=keepdim)",
    "count_nonzero.dim_IntList(self, dim)": "self.count_nonzero(dim=dim)",
    "logsumexp.default(self, dim, keepdim=False)": (
        "torch.logsumexp(self, dim=dim, keepdim=keepdim)"
    ),
    "linalg_vector_norm.default(self, ord=2, dim=None, keepdim=False, dtype=None)": (
        "torch.linalg.vector_norm(self, ord=ord, dim=dim, keepdim=keepdim, dtype=dtype)"
    ),
    "median.dim(self, dim, keepdim=False)": "self.median(dim=dim, keepdim=keepdim)",
    "cumsum.default(self, dim, dtype=None)": "torch.cumsum(self, dim=dim, dtype=dtype)",
    "cumprod.default(self, dim, dtype=None)": "torch.cumprod(self, dim=dim, dtype=dtype)",
    "cummax.default(self, dim)": "torch.cummax(self, dim=dim)",
    "cummin.default(self, dim)": "torch.cummin(self, dim=dim)",
    "logcumsumexp.default(self, dim)": "torch.logcumsumexp(self, dim=dim)",
    "sort.stable(self, stable, dim=-1, descending=False)": (
        "torch.sort(self, dim=dim, descending=descending, stable=stable)"
    ),
    "argsort.stable(self, stable, dim=-1, descending=False)": (
        "torch.argsort(self, dim=dim, descending=descending, stable=stable)"
    ),
}

ELEMENTWISE: Table = {
    **called(
        "torch",
        """
        clamp.default(self, min=None, max=None); clamp.Tensor(self, min=None, max=None)
        nan_to_num.default(self, nan=None, posinf=None, neginf=None)
        lerp.Scalar(self, end, weight); lerp.Tensor(self, end, weight)
        addcmul.default(self, tensor1, tensor2, value=1)
        addcdiv.default(self, tensor1, tensor2, value=1); complex.default(real, imag)
        polar.default(abs, angle)
        """,
    ),
    **called(
        "self",
        """
        clamp_min.default(self, min); clamp_min.Tensor(self, min); clamp_max.default(self, max)
        clamp_max.Tensor(self, max)
        """,
    ),
    **{f"{name}.default(self)": f"torch.{name}(self)" for name in _UNARY},
    **{f"{name}.default(self, other)": f"torch.{name}(self, other)" for name in _BINARY},
    "round.decimals(self, decimals)": "torch.round(self, decimals=decimals)",
}

_NUMBER_SIGNS = words(
    """
    add + sub - mul * truediv / floordiv // mod % pow ** and_ & or_ | xor ^ lshift << rshift >>
    eq == ne != lt < le <= gt > ge >=
    """
)
NUMBERS: Mapping[str, str] = {
    "operator.getitem(a, b)": "a[b]",
    **{
        f"operator.{name}(a, b)": f"a {sign} b"
        for name, sign in zip(_NUMBER_SIGNS[::2], _NUMBER_SIGNS[1::2], strict=True)
    },
    "operator.neg(a)": "-a",
    "operator.pos(a)": "+a",
    "operator.not_(a)": "not a",
    "operator.invert(a)": "~a",
    **{f"math.{name}(a)": f"math.{name}(a)" for name in ("ceil", "floor", "trunc", "sqrt")},
    "torch.sym_int(a)": "int(a)",
    "torch.sym_float(a)": "float(a)",
    "torch.sym_not(a)": "not a",
    "torch.sym_max(a, b)": "max(a, b)",
    "torch.sym_min(a, b)": "min(a, b)",
    "torch.sym_sum(a)": "sum(a)",
    "torch._sym_sqrt(a)": "math.sqrt(a)",
}
"""Arithmetic on sizes: Python's own; the signatures are whole targets."""

TABLE: Table = {**OPERATORS, **VIEWS, **REDUCTIONS, **ELEMENTWISE}
