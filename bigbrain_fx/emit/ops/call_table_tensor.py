"""The Python forms of operators, views, reductions and elementwise functions.

Each row is an aten signature (without "aten.") and its templates; `call_template` says how they are
read. This table is data: it knows no tensor and imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

Table = Mapping[str, str | tuple[str, ...]]
"""Signature -> template, or templates in order of preference."""

_OPERATORS = {
    "mul": "*",
    "div": "/",
    "true_divide": "/",
    "remainder": "%",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
    "__and__": "&",
    "__or__": "|",
    "__xor__": "^",
    "__lshift__": "<<",
    "__rshift__": ">>",
}

_UNARY = (
    "abs",
    "acos",
    "asin",
    "atan",
    "ceil",
    "cos",
    "cosh",
    "deg2rad",
    "digamma",
    "erf",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "frac",
    "isfinite",
    "isinf",
    "isnan",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "logical_not",
    "reciprocal",
    "round",
    "rsqrt",
    "sigmoid",
    "sgn",
    "sign",
    "sin",
    "sinc",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "trunc",
)

_BINARY = (
    "atan2",
    "hypot",
    "inner",
    "kron",
    "logaddexp",
    "logaddexp2",
    "logical_and",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
)

OPERATORS: Table = {
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
    "div.Tensor_mode(self, other, rounding_mode=None)": (
        "torch.div(self, other, rounding_mode=rounding_mode)"
    ),
    "div.Scalar_mode(self, other, rounding_mode=None)": (
        "torch.div(self, other, rounding_mode=rounding_mode)"
    ),
    "floor_divide.default(self, other)": "self // other",
    "floor_divide.Scalar(self, other)": "self // other",
    "pow.Tensor_Tensor(self, exponent)": "self ** exponent",
    "pow.Tensor_Scalar(self, exponent)": "self ** exponent",
    "pow.Scalar(self, exponent)": "self ** exponent",
    "neg.default(self)": "-self",
    "bitwise_not.default(self)": "~self",
    "matmul.default(self, other)": "self @ other",
    "heaviside.default(self, values)": "torch.heaviside(self, values)",
}

VIEWS: Table = {
    "view.default(self, size)": "self.view(*size)",
    "view.dtype(self, dtype)": "self.view(dtype)",
    "reshape.default(self, shape)": "self.reshape(*shape)",
    "transpose.int(self, dim0, dim1)": "self.transpose(dim0, dim1)",
    "swapaxes.default(self, axis0, axis1)": "self.swapaxes(axis0, axis1)",
    "swapdims.default(self, dim0, dim1)": "self.swapdims(dim0, dim1)",
    "movedim.int(self, source, destination)": "self.movedim(source, destination)",
    "movedim.intlist(self, source, destination)": "self.movedim(source, destination)",
    "permute.default(self, dims)": "self.permute(*dims)",
    "expand.default(self, size, implicit=False)": "self.expand(*size)",
    "expand_as.default(self, other)": "self.expand_as(other)",
    "view_as.default(self, other)": "self.view_as(other)",
    "reshape_as.default(self, other)": "self.reshape_as(other)",
    "broadcast_to.default(self, size)": "self.broadcast_to(size)",
    "broadcast_tensors.default(tensors)": "torch.broadcast_tensors(*tensors)",
    "squeeze.default(self)": "self.squeeze()",
    "squeeze.dim(self, dim)": "self.squeeze(dim)",
    "squeeze.dims(self, dim)": "self.squeeze(dim)",
    "unsqueeze.default(self, dim)": "self.unsqueeze(dim)",
    "flatten.using_ints(self, start_dim=0, end_dim=-1)": ("self.flatten(start_dim, end_dim)"),
    "unflatten.int(self, dim, sizes)": "self.unflatten(dim, sizes)",
    "t.default(self)": "self.t()",
    "numpy_T.default(self)": "self.T",
    "mT.default(self)": "self.mT",
    "mH.default(self)": "self.mH",
    "diagonal.default(self, offset=0, dim1=0, dim2=1)": (
        "self.diagonal(offset=offset, dim1=dim1, dim2=dim2)"
    ),
    "narrow.default(self, dim, start, length)": "self.narrow(dim, start, length)",
    "unfold.default(self, dimension, size, step)": "self.unfold(dimension, size, step)",
    "chunk.default(self, chunks, dim=0)": "self.chunk(chunks, dim=dim)",
    "split.Tensor(self, split_size, dim=0)": "self.split(split_size, dim=dim)",
    "split.sizes(self, split_size, dim=0)": "self.split(split_size, dim=dim)",
    "split_with_sizes.default(self, split_sizes, dim=0)": "self.split(split_sizes, dim=dim)",
    "tensor_split.sections(self, sections, dim=0)": "self.tensor_split(sections, dim=dim)",
    "tensor_split.indices(self, indices, dim=0)": "self.tensor_split(indices, dim=dim)",
    "unbind.int(self, dim=0)": "self.unbind(dim=dim)",
    "real.default(self)": "self.real",
    "imag.default(self)": "self.imag",
    "conj.default(self)": "self.conj()",
    "view_as_real.default(self)": "torch.view_as_real(self)",
    "view_as_complex.default(self)": "torch.view_as_complex(self)",
    "contiguous.default(self, memory_format=contiguous_format)": (
        "self.contiguous(memory_format=memory_format)"
    ),
    "clone.default(self, memory_format=None)": "self.clone(memory_format=memory_format)",
    "lift_fresh_copy.default(self)": "self.clone()",
    "lift_fresh.default(self)": "self",
    "detach.default(self)": "self.detach()",
    "type_as.default(self, other)": "self.type_as(other)",
    "to.other(self, other, non_blocking=False, copy=False, memory_format=None)": (
        "self.to(other, copy=copy, memory_format=memory_format)"
    ),
    "sym_size.int(self, dim)": "self.size(dim)",
    "sym_size.default(self)": "self.size()",
    "sym_stride.int(self, dim)": "self.stride(dim)",
    "sym_stride.default(self)": "self.stride()",
    "sym_numel.default(self)": "self.numel()",
    "item.default(self)": "self.item()",
    "_local_scalar_dense.default(self)": "self.item()",
}

REDUCTIONS: Table = {
    "sum.default(self, dtype=None)": "self.sum(dtype=dtype)",
    "sum.dim_IntList(self, dim, keepdim=False, dtype=None)": (
        "self.sum(dim=dim, keepdim=keepdim, dtype=dtype)"
    ),
    "mean.default(self, dtype=None)": "self.mean(dtype=dtype)",
    "mean.dim(self, dim, keepdim=False, dtype=None)": (
        "self.mean(dim=dim, keepdim=keepdim, dtype=dtype)"
    ),
    "prod.default(self, dtype=None)": "self.prod(dtype=dtype)",
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
    "argmax.default(self, dim=None, keepdim=False)": "self.argmax(dim=dim, keepdim=keepdim)",
    "argmin.default(self, dim=None, keepdim=False)": "self.argmin(dim=dim, keepdim=keepdim)",
    "amax.default(self, dim=(), keepdim=False)": "self.amax(dim=dim, keepdim=keepdim)",
    "amin.default(self, dim=(), keepdim=False)": "self.amin(dim=dim, keepdim=keepdim)",
    "any.default(self)": "self.any()",
    "any.dim(self, dim, keepdim=False)": "self.any(dim=dim, keepdim=keepdim)",
    "any.dims(self, dim=None, keepdim=False)": "self.any(dim=dim, keepdim=keepdim)",
    "all.default(self)": "self.all()",
    "all.dim(self, dim, keepdim=False)": "self.all(dim=dim, keepdim=keepdim)",
    "all.dims(self, dim=None, keepdim=False)": "self.all(dim=dim, keepdim=keepdim)",
    "count_nonzero.default(self, dim=None)": "self.count_nonzero(dim=dim)",
    "count_nonzero.dim_IntList(self, dim)": "self.count_nonzero(dim=dim)",
    "logsumexp.default(self, dim, keepdim=False)": (
        "torch.logsumexp(self, dim=dim, keepdim=keepdim)"
    ),
    "linalg_vector_norm.default(self, ord=2, dim=None, keepdim=False, dtype=None)": (
        "torch.linalg.vector_norm(self, ord=ord, dim=dim, keepdim=keepdim, dtype=dtype)"
    ),
    "median.default(self)": "self.median()",
    "median.dim(self, dim, keepdim=False)": "self.median(dim=dim, keepdim=keepdim)",
    "cumsum.default(self, dim, dtype=None)": "torch.cumsum(self, dim=dim, dtype=dtype)",
    "cumprod.default(self, dim, dtype=None)": "torch.cumprod(self, dim=dim, dtype=dtype)",
    "cummax.default(self, dim)": "torch.cummax(self, dim=dim)",
    "cummin.default(self, dim)": "torch.cummin(self, dim=dim)",
    "logcumsumexp.default(self, dim)": "torch.logcumsumexp(self, dim=dim)",
    "diff.default(self, n=1, dim=-1, prepend=None, append=None)": (
        "torch.diff(self, n=n, dim=dim, prepend=prepend, append=append)"
    ),
    "kthvalue.default(self, k, dim=-1, keepdim=False)": (
        "torch.kthvalue(self, k, dim=dim, keepdim=keepdim)"
    ),
    "nanmean.default(self, dim=None, keepdim=False, dtype=None)": (
        "torch.nanmean(self, dim=dim, keepdim=keepdim, dtype=dtype)"
    ),
    "trace.default(self)": "torch.trace(self)",
    "dist.default(self, other, p=2)": "torch.dist(self, other, p=p)",
    "topk.default(self, k, dim=-1, largest=True, sorted=True)": (
        "torch.topk(self, k, dim=dim, largest=largest, sorted=sorted)"
    ),
    "sort.default(self, dim=-1, descending=False)": (
        "torch.sort(self, dim=dim, descending=descending)"
    ),
    "sort.stable(self, stable, dim=-1, descending=False)": (
        "torch.sort(self, dim=dim, descending=descending, stable=stable)"
    ),
    "argsort.default(self, dim=-1, descending=False)": (
        "torch.argsort(self, dim=dim, descending=descending)"
    ),
    "argsort.stable(self, stable, dim=-1, descending=False)": (
        "torch.argsort(self, dim=dim, descending=descending, stable=stable)"
    ),
}

ELEMENTWISE: Table = {
    **{f"{name}.default(self)": f"torch.{name}(self)" for name in _UNARY},
    **{f"{name}.default(self, other)": f"torch.{name}(self, other)" for name in _BINARY},
    "round.decimals(self, decimals)": "torch.round(self, decimals=decimals)",
    "clamp.default(self, min=None, max=None)": "torch.clamp(self, min=min, max=max)",
    "clamp.Tensor(self, min=None, max=None)": "torch.clamp(self, min=min, max=max)",
    "clamp_min.default(self, min)": "self.clamp_min(min)",
    "clamp_min.Tensor(self, min)": "self.clamp_min(min)",
    "clamp_max.default(self, max)": "self.clamp_max(max)",
    "clamp_max.Tensor(self, max)": "self.clamp_max(max)",
    "nan_to_num.default(self, nan=None, posinf=None, neginf=None)": (
        "torch.nan_to_num(self, nan=nan, posinf=posinf, neginf=neginf)"
    ),
    "lerp.Scalar(self, end, weight)": "torch.lerp(self, end, weight)",
    "lerp.Tensor(self, end, weight)": "torch.lerp(self, end, weight)",
    "addcmul.default(self, tensor1, tensor2, value=1)": (
        "torch.addcmul(self, tensor1, tensor2, value=value)"
    ),
    "addcdiv.default(self, tensor1, tensor2, value=1)": (
        "torch.addcdiv(self, tensor1, tensor2, value=value)"
    ),
    "complex.default(real, imag)": "torch.complex(real, imag)",
    "polar.default(abs, angle)": "torch.polar(abs, angle)",
}

NUMBERS: Mapping[str, str] = {
    "operator.getitem(a, b)": "a[b]",
    "operator.add(a, b)": "a + b",
    "operator.sub(a, b)": "a - b",
    "operator.mul(a, b)": "a * b",
    "operator.truediv(a, b)": "a / b",
    "operator.floordiv(a, b)": "a // b",
    "operator.mod(a, b)": "a % b",
    "operator.pow(a, b)": "a ** b",
    "operator.neg(a)": "-a",
    "operator.pos(a)": "+a",
    "operator.not_(a)": "not a",
    "operator.invert(a)": "~a",
    "operator.and_(a, b)": "a & b",
    "operator.or_(a, b)": "a | b",
    "operator.xor(a, b)": "a ^ b",
    "operator.lshift(a, b)": "a << b",
    "operator.rshift(a, b)": "a >> b",
    "operator.eq(a, b)": "a == b",
    "operator.ne(a, b)": "a != b",
    "operator.lt(a, b)": "a < b",
    "operator.le(a, b)": "a <= b",
    "operator.gt(a, b)": "a > b",
    "operator.ge(a, b)": "a >= b",
    "math.ceil(a)": "math.ceil(a)",
    "math.floor(a)": "math.floor(a)",
    "math.trunc(a)": "math.trunc(a)",
    "math.sqrt(a)": "math.sqrt(a)",
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
