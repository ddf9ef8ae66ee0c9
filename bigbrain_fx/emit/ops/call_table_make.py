"""The Python forms of ops that make, join, gather, multiply or overwrite tensors.

Each row is an aten signature (without "aten.") and its templates; `call_template` says how they are
read. This table is data: it knows no tensor and imports nothing but the table's type.
"""

from __future__ import annotations

from bigbrain_fx.core import words
from bigbrain_fx.emit.ops.call_table_tensor import Table, called

# `layout` has no place in the templates: a sparse tensor is made by the op's own name.
_NEW = "dtype=None, layout=None, device=None, pin_memory=None"
_NEW_INT = "dtype=int64, layout=None, device=None, pin_memory=None"
_LIKE = f"{_NEW}, memory_format=None"
_KIND = "dtype=dtype, device=device"
_KIND_LIKE = f"{_KIND}, memory_format=memory_format"

FACTORIES: Table = {
    f"arange.default(end, {_NEW})": f"torch.arange(end, {_KIND})",
    f"arange.start(start, end, {_NEW})": f"torch.arange(start, end, {_KIND})",
    f"arange.start_step(start, end, step=1, {_NEW})": f"torch.arange(start, end, step, {_KIND})",
    f"linspace.default(start, end, steps, {_NEW})": f"torch.linspace(start, end, steps, {_KIND})",
    f"eye.default(n, {_NEW})": f"torch.eye(n, {_KIND})",
    f"eye.m(n, m, {_NEW})": f"torch.eye(n, m, {_KIND})",
    f"scalar_tensor.default(s, {_NEW})": f"torch.scalar_tensor(s, {_KIND})",
    f"full.default(size, fill_value, {_NEW})": f"torch.full(size, fill_value, {_KIND})",
    f"full_like.default(self, fill_value, {_LIKE})": (
        f"torch.full_like(self, fill_value, {_KIND_LIKE})"
    ),
    f"new_full.default(self, size, fill_value, {_NEW})": (
        f"self.new_full(size, fill_value, {_KIND})"
    ),
    f"empty.memory_format(size, {_LIKE})": f"torch.empty(*size, {_KIND_LIKE})",
    **{
        f"{name}.default(size, {_NEW})": f"torch.{name}(*size, {_KIND})"
        for name in ("zeros", "ones", "rand", "randn")
    },
    **{
        f"{name}_like.default(self, {_LIKE})": f"torch.{name}_like(self, {_KIND_LIKE})"
        for name in ("zeros", "ones", "empty", "rand", "randn")
    },
    **{
        f"{name}.default(self, size, {_NEW})": f"self.{name}(size, {_KIND})"
        for name in ("new_zeros", "new_ones", "new_empty")
    },
    f"randint.default(high, size, {_NEW_INT})": f"torch.randint(high, size, {_KIND})",
    f"randint.low(low, high, size, {_NEW_INT})": f"torch.randint(low, high, size, {_KIND})",
    f"randperm.default(n, {_NEW_INT})": f"torch.randperm(n, {_KIND})",
    "bernoulli.default(self, generator=None)": "torch.bernoulli(self)",
    "bernoulli.p(self, p, generator=None)": "torch.bernoulli(self, p)",
    "multinomial.default(self, num_samples, replacement=False, generator=None)": (
        "torch.multinomial(self, num_samples, replacement=replacement)"
    ),
    "normal.Tensor_float(mean, std=1.0, generator=None)": "torch.normal(mean, std)",
    "normal.Tensor_Tensor(mean, std, generator=None)": "torch.normal(mean, std)",
}

JOINING: Table = {
    **called(
        "torch",
        """
        cat.default(tensors, dim=0); concat.default(tensors, dim=0); stack.default(tensors, dim=0)
        hstack.default(tensors); vstack.default(tensors); where.default(condition)
        diag_embed.default(self, offset=0, dim1=-2, dim2=-1); roll.default(self, shifts, dims=())
        take_along_dim.default(self, indices, dim=None)
        bucketize.Tensor(self, boundaries, out_int32=False, right=False)
        bincount.default(self, weights=None, minlength=0)
        """,
    ),
    **called(
        "self",
        """
        masked_fill.Scalar(self, mask, value); masked_fill.Tensor(self, mask, value)
        masked_select.default(self, mask); masked_scatter.default(self, mask, source)
        nonzero.default(self)
        repeat_interleave.self_int(self, repeats, dim=None, output_size=None)
        repeat_interleave.self_Tensor(self, repeats, dim=None, output_size=None)
        gather.default(self, dim, index, sparse_grad=False)
        index_select.default(self, dim, index)
        """,
    ),
    "meshgrid.default(tensors)": "torch.meshgrid(*tensors, indexing='ij')",
    "meshgrid.indexing(tensors, indexing)": "torch.meshgrid(*tensors, indexing=indexing)",
    **{
        f"where.{overload}(condition, self, other)": "torch.where(condition, self, other)"
        for overload in ("self", "ScalarSelf", "ScalarOther", "Scalar")
    },
    "tril.default(self, diagonal=0)": "torch.tril(self, diagonal)",
    "triu.default(self, diagonal=0)": "torch.triu(self, diagonal)",
    "diag.default(self, diagonal=0)": "torch.diag(self, diagonal)",
    "flip.default(self, dims)": "self.flip(*dims)",
    "repeat.default(self, repeats)": "self.repeat(*repeats)",
    "tile.default(self, dims)": "self.tile(*dims)",
    "searchsorted.Tensor(sorted_sequence, self, out_int32=False, right=False, side=None,"
    " sorter=None)": (
        "torch.searchsorted(sorted_sequence, self, out_int32=out_int32, right=right, side=side,"
        " sorter=sorter)"
    ),
}

_BATCHED = "beta=1, alpha=1"
_BATCHED_CALL = "beta=beta, alpha=alpha"

PRODUCTS: Table = {
    **called(
        "torch",
        """
        mm.default(self, mat2); bmm.default(self, mat2); mv.default(self, vec)
        dot.default(self, tensor); outer.default(self, vec2)
        addmm.default(self, mat1, mat2, beta=1, alpha=1); cross.default(self, other, dim=None)
        """,
    ),
    **{
        f"{name}.default(self, batch1, batch2, {_BATCHED})": (
            f"torch.{name}(self, batch1, batch2, {_BATCHED_CALL})"
        )
        for name in ("baddbmm", "addbmm")
    },
    "cdist.default(x1, x2, p=2.0, compute_mode=None)": "torch.cdist(x1, x2, p=p)",
    "linalg_inv.default(A)": "torch.linalg.inv(A)",
    "linalg_cholesky.default(self, upper=False)": "torch.linalg.cholesky(self, upper=upper)",
    **{
        f"fft_{name}.default(self, n=None, dim=-1, norm=None)": (
            f"torch.fft.{name}(self, n=n, dim=dim, norm=norm)"
        )
        for name in ("fft", "ifft", "rfft", "irfft")
    },
    **{
        f"fft_{name}.default(self, s=None, dim=(-2, -1), norm=None)": (
            f"torch.fft.{name}(self, s=s, dim=dim, norm=norm)"
        )
        for name in ("fft2", "ifft2", "rfft2", "irfft2")
    },
}

_IN_PLACE_UNARY = words(
    """
    abs ceil cos detach erf exp floor log neg reciprocal round rsqrt sigmoid sin sqrt
    squeeze tanh zero
    """
)

# Each row stands for the op and for its in-place twin, `scatter_`.
SCATTERING: Table = {
    f"{signature.format(_=suffix)}": template.format(_=suffix)
    for signature, template in {
        "scatter{_}.src(self, dim, index, src)": "self.scatter{_}(dim, index, src)",
        "scatter{_}.value(self, dim, index, value)": "self.scatter{_}(dim, index, value)",
        "scatter_add{_}.default(self, dim, index, src)": "self.scatter_add{_}(dim, index, src)",
        "scatter_reduce{_}.two(self, dim, index, src, reduce, include_self=True)": (
            "self.scatter_reduce{_}(dim, index, src, reduce, include_self=include_self)"
        ),
        "index_add{_}.default(self, dim, index, source, alpha=1)": (
            "self.index_add{_}(dim, index, source, alpha=alpha)"
        ),
        "index_copy{_}.default(self, dim, index, source)": "self.index_copy{_}(dim, index, source)",
        "index_fill{_}.int_Scalar(self, dim, index, value)": (
            "self.index_fill{_}(dim, index, value)"
        ),
        "index_put{_}.default(self, indices, values, accumulate=False)": (
            "self.index_put{_}(indices, values, accumulate=accumulate)"
        ),
    }.items()
    for suffix in ("", "_")
}

IN_PLACE: Table = {
    **called(
        "self",
        """
        div_.Tensor_mode(self, other, rounding_mode=None); logical_and_.default(self, other)
        logical_or_.default(self, other); pow_.Scalar(self, exponent); pow_.Tensor(self, exponent)
        fill_.Scalar(self, value); fill_.Tensor(self, value)
        masked_fill_.Scalar(self, mask, value); masked_fill_.Tensor(self, mask, value)
        clamp_.default(self, min=None, max=None); clamp_min_.default(self, min)
        clamp_max_.default(self, max); lerp_.Scalar(self, end, weight)
        lerp_.Tensor(self, end, weight); addcmul_.default(self, tensor1, tensor2, value=1)
        addcdiv_.default(self, tensor1, tensor2, value=1); unsqueeze_.default(self, dim)
        squeeze_.dim(self, dim); transpose_.default(self, dim0, dim1)
        """,
    ),
    **{f"{name}_.default(self)": f"self.{name}_()" for name in _IN_PLACE_UNARY},
    **{
        f"{name}_.{overload}(self, other, alpha=1)": f"self.{name}_(other, alpha=alpha)"
        for name in ("add", "sub")
        for overload in ("Tensor", "Scalar")
    },
    **{
        f"{name}_.{overload}(self, other)": f"self.{name}_(other)"
        for name in ("mul", "div", "bitwise_and", "bitwise_or")
        for overload in ("Tensor", "Scalar")
    },
    "copy_.default(self, src, non_blocking=False)": "self.copy_(src)",
    "uniform_.default(self, from_=0.0, to=1.0, generator=None)": "self.uniform_(from_, to)",
    "normal_.default(self, mean=0.0, std=1.0, generator=None)": "self.normal_(mean, std)",
    "exponential_.default(self, lambd=1.0, generator=None)": "self.exponential_(lambd)",
    "bernoulli_.float(self, p=0.5, generator=None)": "self.bernoulli_(p)",
    "random_.from(self, from_, to, generator=None)": "self.random_(from_, to)",
    "random_.to(self, to, generator=None)": "self.random_(to)",
    "random_.default(self, generator=None)": "self.random_()",
}

TABLE: Table = {**FACTORIES, **JOINING, **PRODUCTS, **SCATTERING, **IN_PLACE}
