"""The seconds of one call on a GPU, and those that its process takes to start it.

A roofline as on a CPU, with differences. A convolution is no matrix product, autocast's casts are
passes of their own, and a causal mask halves attention. Starting an op is on another clock than
computing it. The module knows one call and one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from bigbrain_fx.core import BLAS_BYTES_FROM_HOPPER_ON, Device, TensorSpec

from .calls import PricedCall, number
from .cuda_rules import (
    ATTENTION_BACKWARD,
    ATTENTION_TILE,
    AUTOCAST_LAUNCHES,
    BACKWARD_LAUNCHES,
    CAST_BYTES,
    COPY_PASSES,
    FITTED,
    FORWARD_LAUNCHES,
    KERNEL_S,
    NORMS,
    SPREAD_PASSES,
    SUMS_INSIDE,
    TILE,
    TURNED_NORMS,
    USUAL_UNITS,
    VIEW_LAUNCHES,
    WIDE_GROUP,
    Fitted,
    Passes,
    passes_of,
)
from .matrices import MatrixShape, copied_numbers, matrix_shape
from .op_rules import OpRule

HALF = ("float16", "bfloat16")
SUM_TOUCHES = 3.0  # adding up moves each byte three times: two reads and a write
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution")
_TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


@dataclass(frozen=True)
class CudaClock:
    """One call on one GPU; `name` is its family's.

    `fused`: under torch.compile with CUDA graphs. Nothing is started op by op, and what one pass
    makes another reads without a way through memory.
    """

    call: PricedCall
    rule: OpRule
    name: str
    device: Device
    fitted: Fitted = FITTED
    fused: bool = False

    @property
    def likeness(self) -> str:
        """Key of ops that are computed in the same way: their forecasts share an error."""
        if self.rule.kind not in ("product", "attention"):
            return "pass"
        if self.rule.kind == "attention" or self._depthwise:
            return f"{'attention' if self.rule.kind == 'attention' else 'depthwise'} {self._rate}"
        return f"{'convolution' if self._is_convolution else 'product'} {self._rate}"

    @property
    def _rate(self) -> str:
        device = self.device
        if self._dtype in HALF and self._dtype not in device.lacks:
            return "half"
        in_tf32 = self._is_convolution or device.matmul_precision != "highest"
        in_tf32 = in_tf32 and self.rule.kind == "product"  # as in `_flops_per_s`
        return "tf32" if in_tf32 and device.tf32_flops_per_s else "fp32"

    # ----------------------------------------------------------------- its process

    def host_forward_s(self) -> float:
        """Return what starting it takes its process."""
        if self.fused:
            return 0.0
        if self.call.op.view_of is not None:
            return VIEW_LAUNCHES * self.device.launch_s
        cast = AUTOCAST_LAUNCHES if self.call.scope.autocast else 1.0
        return FORWARD_LAUNCHES * cast * self.device.launch_s

    def host_backward_s(self) -> float:
        """Return what starting its backward takes."""
        if self.fused:
            return 0.0
        if self.call.op.view_of is not None:
            return VIEW_LAUNCHES * self.device.launch_s
        return BACKWARD_LAUNCHES * self.device.launch_s

    # ----------------------------------------------------------------- the GPU

    def forward_s(self) -> float:
        """Return the seconds of the forward."""
        if self.call.op.view_of is not None:
            return 0.0
        if self.rule.kind in ("product", "attention"):
            return self._products_s(1.0, backward=False) + self._casts_s() + self._copies_s()
        return (
            self._pass_s(self._norm * self.passes.forward * self._moved_bytes) + self._turning_s()
        )

    def inputs_backward_s(self) -> float:
        """Return the seconds to make the gradients of its inputs."""
        if not self.call.wanted:
            return 0.0
        match self.rule.kind:
            case "product":
                factors = 1 if self.call.trained else self.call.wanted
                return factors * (self._products_s(1.0, backward=True) + self._copies_s()) + (
                    self._casts_s()
                )
            case "attention":
                return self._products_s(ATTENTION_BACKWARD, backward=True)
            case "view":
                return self._view_backward_s()
        if not self.passes.backward:
            return 0.0
        return (
            self._pass_s(self._norm * self.passes.backward * self._moved_bytes) + self._turning_s()
        )

    def weights_backward_s(self) -> float:
        """Return the seconds to make the gradients of its parameters, and to add them up."""
        if not self.call.trained:
            return 0.0
        nbytes = sum(spec.nbytes for spec in self.call.trained)
        own_s = 0.0
        if self.rule.kind == "product":
            own_s = self._products_s(1.0, backward=True) + self._bias_s()
        elif self.rule.kind == "lookup":
            own_s = self._pass_s(nbytes)
        elif not self.call.wanted:
            own_s = self._pass_s(self.passes.backward * self._moved_bytes)
        elif nbytes < self.call.result.nbytes and self.name not in SUMS_INSIDE:
            own_s = self._pass_s(SPREAD_PASSES * self.call.result.nbytes)
        return own_s + SUM_TOUCHES * nbytes / self.device.memory_bytes_per_s

    def _bias_s(self) -> float:
        """Return the seconds to sum a product's gradient over its rows, for its bias."""
        biased = any(len(spec.shape) == 1 for spec in self.call.trained)
        return self._pass_s(self.call.result.nbytes) if biased else 0.0

    def fan_out_s(self) -> float:
        """Return the seconds to add up the gradients that come from several readers."""
        extra = self.call.scope.gradients_into(self.call.op.name) - 1
        if self.call.op.is_tuple or extra < 1:
            return 0.0
        return extra * self._pass_s(SUM_TOUCHES * self.call.result.nbytes)

    @property
    def _moved_bytes(self) -> int:
        """The bytes of its forward, less those that stay in registers where passes are fused."""
        if not self.fused:
            return self.call.moved_bytes
        return self.call.moved_bytes - self.call.scope.inside_bytes(self.call.op)

    @property
    def passes(self) -> Passes:
        """Assumed passes over memory of its family."""
        half = any(spec.dtype in HALF for _, spec in self.call.values)
        return passes_of(self.name, half=half, training=self.call.scope.graph.training)

    def _turning_s(self) -> float:
        """Return the seconds to turn what a norm takes in rows of channels, and its result back."""
        if self.name not in TURNED_NORMS or not self._channels_last:
            return 0.0
        return self._pass_s(COPY_PASSES * self.call.result.nbytes)

    @property
    def _norm(self) -> float:
        return self.fitted.norms if self.name in NORMS else 1.0

    def _pass_s(self, nbytes: float) -> float:
        return max(nbytes / self.device.memory_bytes_per_s, KERNEL_S)

    def _view_backward_s(self) -> float:
        """Time zeros and a copy for a part, a sum for an expansion, nothing for other views."""
        base, own = self.call.values[0][1].nbytes, self.call.result.nbytes
        return 0.0 if base == own else self._pass_s(base + own)

    # ----------------------------------------------------------------- products

    def _products_s(self, products: float, *, backward: bool) -> float:
        moved_s = self._pass_s(self.call.moved_bytes)
        if self._depthwise:
            return products * self._depthwise_s(backward)
        if backward and self._is_wide_group:
            return products * self._wide_group_s()
        flops = products * self.call.flops * self._needed()
        compute_s = flops / (self._flops_per_s * self._share(backward)) * self._tail()
        if self.rule.kind != "product":
            return max(compute_s, moved_s) + self._turned_s()
        unhidden = 0.0
        if self._dtype in HALF and self._dtype not in self.device.lacks:
            compute_s *= 1.0 if self._is_convolution else self._slowed(backward)
            unhidden = self.fitted.unhidden
        whole_s = max(compute_s, moved_s) + unhidden * min(compute_s, moved_s)
        return whole_s + self._turned_s()

    def _slowed(self, backward: bool) -> float:
        """Return how much longer than its flops a matrix's sides make it on tensor cores."""
        shape = matrix_shape(self.call, self.name)
        return shape.covered(backward) / self._aligned(shape)

    def _aligned(self, shape: MatrixShape) -> float:
        fit = self.fitted
        return {8: 1.0, 4: fit.aligned_4, 2: fit.aligned_2}.get(shape.aligned, fit.aligned_1)

    def _tail(self) -> float:
        """Return how much longer it takes as its last wave of tiles fills the device in part."""
        if self.rule.kind == "attention":
            return 1.0
        tiles = max(1.0, self.call.result.numel / TILE)
        return 1.0 + self.fitted.tail * (self.device.units or USUAL_UNITS) / tiles

    @property
    def _dtype(self) -> str:
        return self.call.result.dtype if self.call.op.outputs else ""

    @property
    def _flops_per_s(self) -> float:
        """The device's rate for what the call computes with."""
        device, dtype = self.device, self._dtype
        if dtype in HALF and dtype not in device.lacks:
            return device.half_flops_per_s or device.flops_per_s
        in_tf32 = self._is_convolution or device.matmul_precision != "highest"
        if dtype == "float32" and in_tf32 and self.rule.kind == "product":
            return device.tf32_flops_per_s or device.flops_per_s
        return device.flops_per_s

    @property
    def _is_convolution(self) -> bool:
        return self.name in _CONVOLUTIONS or self.name in _TRANSPOSED

    def _share(self, backward: bool) -> float:
        fit = self.fitted
        if self.rule.kind == "attention":
            share = fit.attention_backward if backward else fit.attention
            from_hopper_on = self.device.blas_bytes == BLAS_BYTES_FROM_HOPPER_ON
            return share * (fit.attention_from_hopper_on if from_hopper_on else 1.0)
        if not self._is_convolution:
            return fit.product_backward if backward else 1.0
        if self._dtype in HALF:
            share = fit.convolution_backward if backward else fit.convolution
        elif self.device.tf32_flops_per_s:
            share = fit.convolution_tf32_backward if backward else fit.convolution_tf32
        else:
            share = fit.convolution_fp32_backward if backward else fit.convolution_fp32
            share *= self._winograd()
        return share * self._filled()

    def _winograd(self) -> float:
        weight, args = self._weight or (), self.call.op.args
        stride = args[3] if len(args) > 3 else 1
        plain = self._groups == 1 and stride in (1, (1, 1), None)
        return self.fitted.winograd if plain and weight[2:] == (3, 3) else 1.0

    def _needed(self) -> float:
        """Return the share of its flops that kernels compute: tiles cover attention's square."""
        if self.rule.kind != "attention" or len(self.call.values) < 2:
            return 1.0
        sides = [number(spec.shape[-2]) for _, spec in self.call.values[:2]]
        covered = prod(-(-side // ATTENTION_TILE) * ATTENTION_TILE / side for side in sides)
        return covered * (0.5 if self._causal else 1.0)

    @property
    def _causal(self) -> bool:
        """Whether half of attention's square is masked and left out."""
        given = dict(self.call.op.kwargs).get("is_causal")
        args = self.call.op.args
        return self.rule.kind == "attention" and bool(given or (len(args) > 5 and args[5]))

    def _casts_s(self) -> float:
        """Return the seconds in which autocast casts what is read in float32."""
        if self._dtype not in HALF:
            return 0.0
        nbytes = sum(CAST_BYTES * spec.numel for spec in self._read() if spec.dtype == "float32")
        return self._pass_s(nbytes) if nbytes else 0.0

    def _read(self) -> Iterator[TensorSpec]:
        yield from (spec for _, spec in self.call.values)
        found = (self.call.scope.param(name) for name in self.call.op.params)
        yield from (spec for spec in found if spec is not None)

    def _copies_s(self) -> float:
        """Return the seconds to copy what a matrix product cannot read as it lies."""
        if self.rule.kind != "product" or self._is_convolution:
            return 0.0
        size = 2 if self._dtype in HALF else 4
        numbers = copied_numbers(self.call, self.name)
        return self._pass_s(COPY_PASSES * size * numbers) if numbers else 0.0

    # ----------------------------------------------------------------- convolutions

    @property
    def _weight(self) -> tuple[int, ...] | None:
        """The shape of a convolution's weight: out, in of a group, window."""
        if not self._is_convolution:
            return None
        shapes = [spec.shape for spec in self._read()]
        found = next((s for s in shapes[1:] if len(s) == len(shapes[0])), None)
        return None if found is None else tuple(map(number, found))

    @property
    def _groups(self) -> int:
        weight = self._weight
        if weight is None or not self.call.values or self.name in _TRANSPOSED:
            return 1
        return max(1, number(self.call.values[0][1].shape[1]) // weight[1])

    @property
    def _is_wide_group(self) -> bool:
        """Whether cuDNN has no kernel of tensor cores for a backward in channels_last."""
        weight = self._weight
        if weight is None or self._dtype not in HALF or not self._channels_last:
            return False
        return self._groups > 1 and weight[1] > WIDE_GROUP

    def _wide_group_s(self) -> float:
        rate = self.device.flops_per_s * self.fitted.wide_groups
        return max(self.call.flops / rate, self._pass_s(self.call.moved_bytes))

    @property
    def _depthwise(self) -> bool:
        weight = self._weight
        return weight is not None and self._groups > 1 and weight[1] == 1

    def _depthwise_s(self, backward: bool) -> float:
        """Time what cuDNN computes without tensor cores: by bytes, or by its window."""
        fit = self.fitted
        passes = fit.depthwise_backward_passes / 2 if backward else fit.depthwise_passes
        compute_s = self.call.flops / (self.device.flops_per_s * fit.depthwise_flops)
        return max(compute_s, self._pass_s(passes * self.call.moved_bytes))

    def _filled(self) -> float:
        """Return which share of a kernel's channels a convolution fills."""
        weight = self._weight
        if weight is None:
            return 1.0
        inside = weight[1]
        if self._groups > 1:
            return inside / (inside + self.fitted.grouped_channels)
        reduced, half = inside * prod(weight[2:]), self.fitted.channels
        return reduced / (reduced + half) * weight[0] / (weight[0] + half)

    def _turned_s(self) -> float:
        """Return the seconds to turn a convolution's tensors to channels_last and back."""
        if not self._is_convolution or self._dtype not in HALF or self._channels_last:
            return 0.0
        return self._pass_s(self.fitted.turned_passes * self.call.moved_bytes)

    @property
    def _channels_last(self) -> bool:
        spec = self.call.result
        return len(spec.strides) > 2 and number(spec.strides[1]) == 1
