"""The Python forms of layers, activations and losses: the functions of torch.nn.functional.

Each row is an aten signature (without "aten.") and its templates; `call_template` says how they are
read. A default that the schema does not have is the default of the Python function. This table is
data: it knows no tensor and imports nothing but the table's type.
"""

from __future__ import annotations

from bigbrain_fx.emit.ops.call_table_tensor import Table, called

_CONV = "bias=None, stride=1, padding=0, dilation=1, groups=1"
_CONV_PADDED = "bias=None, stride=1, padding='valid', dilation=1, groups=1"
_CONV_BACK = "bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1"
_CONV_CALL = "bias, stride=stride, padding=padding, dilation=dilation, groups=groups"
_CONV_BACK_CALL = (
    "bias, stride=stride, padding=padding, output_padding=output_padding, "
    "groups=groups, dilation=dilation"
)
_MAX_POOL = "stride=(), padding=0, dilation=1, ceil_mode=False"
_MAX_POOL_CALL = "stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode"
_AVG_POOL = "stride=(), padding=0, ceil_mode=False, count_include_pad=True"
_AVG_POOL_CALL = (
    "stride=stride, padding=padding, ceil_mode=ceil_mode, count_include_pad=count_include_pad"
)
_STATS = "running_mean, running_var, weight, bias"
_RNN = "has_biases, num_layers, dropout, train, bidirectional, batch_first"
_RNN_CALL = (
    "has_biases=has_biases, num_layers=num_layers, dropout=dropout, train=train, "
    "bidirectional=bidirectional, batch_first=batch_first"
)

LAYERS: Table = {
    "linear.default(input, weight, bias=None)": "F.linear(input, weight, bias)",
    "bilinear.default(input1, input2, weight, bias=None)": (
        "F.bilinear(input1, input2, weight, bias)"
    ),
    "embedding.default(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False)": (
        "F.embedding(indices, weight, padding_idx=padding_idx,"
        " scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)"
    ),
    "embedding_bag.padding_idx(weight, indices, offsets, scale_grad_by_freq=False, mode=0,"
    " sparse=False, per_sample_weights=None, include_last_offset=False, padding_idx=None)": (
        "torch.embedding_bag(weight, indices, offsets, scale_grad_by_freq=scale_grad_by_freq,"
        " mode=mode, sparse=sparse, per_sample_weights=per_sample_weights,"
        " include_last_offset=include_last_offset)"
    ),
    "layer_norm.default(input, normalized_shape, weight=None, bias=None, eps=1e-05,"
    " cudnn_enable=True)": "F.layer_norm(input, normalized_shape, weight, bias, eps=eps)",
    "rms_norm.default(input, normalized_shape, weight=None, eps=None)": (
        "F.rms_norm(input, normalized_shape, weight, eps=eps)"
    ),
    "group_norm.default(input, num_groups, weight=None, bias=None, eps=1e-05,"
    " cudnn_enabled=True)": "F.group_norm(input, num_groups, weight, bias, eps=eps)",
    "batch_norm.default(input, weight, bias, running_mean, running_var, training, momentum, eps,"
    " cudnn_enabled)": (
        f"F.batch_norm(input, {_STATS}, training=training, momentum=momentum, eps=eps)"
    ),
    "instance_norm.default(input, weight, bias, running_mean, running_var, use_input_stats,"
    " momentum, eps, cudnn_enabled)": (
        f"F.instance_norm(input, {_STATS}, use_input_stats=use_input_stats,"
        " momentum=momentum, eps=eps)"
    ),
    "dropout.default(input, p, train=True)": "F.dropout(input, p, training=train)",
    "dropout_.default(self, p, train=True)": "F.dropout(self, p, training=train, inplace=True)",
    "alpha_dropout.default(input, p, train)": "F.alpha_dropout(input, p, training=train)",
    "feature_alpha_dropout.default(input, p, train)": (
        "F.feature_alpha_dropout(input, p, training=train)"
    ),
    **{
        f"{name}.input(input, hx, params, {_RNN})": f"torch.{name}(input, hx, params, {_RNN_CALL})"
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    },
    # F.embedding_bag returns the first of the op's four tensors only
    "embedding_bag.default(weight, indices, offsets, scale_grad_by_freq=False, mode=0,"
    " sparse=False, per_sample_weights=None, include_last_offset=False)": (
        "torch.embedding_bag(weight, indices, offsets, scale_grad_by_freq=scale_grad_by_freq,"
        " mode=mode, sparse=sparse, per_sample_weights=per_sample_weights,"
        " include_last_offset=include_last_offset)"
    ),
    "feature_dropout.default(input, p, train)": "torch.feature_dropout(input, p, train)",
    "native_dropout.default(input, p, train)": "torch.native_dropout(input, p, train)",
    "scaled_dot_product_attention.default(query, key, value, attn_mask=None, dropout_p=0.0,"
    " is_causal=False, scale=None, enable_gqa=False)": (
        "F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask,"
        " dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)"
    ),
}

CONVOLUTIONS: Table = {
    **called(
        "F",
        """
        pixel_shuffle.default(self, upscale_factor)
        pixel_unshuffle.default(self, downscale_factor); channel_shuffle.default(self, groups)
        """,
    ),
    **{
        f"conv{n}d.default(input, weight, {_CONV})": f"F.conv{n}d(input, weight, {_CONV_CALL})"
        for n in (1, 2, 3)
    },
    **{
        f"conv{n}d.padding(input, weight, {_CONV_PADDED})": (
            f"F.conv{n}d(input, weight, {_CONV_CALL})",
        )
        for n in (1, 2, 3)
    },
    **{
        f"conv_transpose{n}d.{overload}(input, weight, {_CONV_BACK})": (
            f"F.conv_transpose{n}d(input, weight, {_CONV_BACK_CALL})"
        )
        for n, overload in ((1, "default"), (2, "input"), (3, "input"))
    },
    **{
        f"max_pool{n}d.default(self, kernel_size, {_MAX_POOL})": (
            f"F.max_pool{n}d(self, kernel_size, {_MAX_POOL_CALL})"
        )
        for n in (1, 2, 3)
    },
    **{
        f"max_pool{n}d_with_indices.default(self, kernel_size, {_MAX_POOL})": (
            f"F.max_pool{n}d(self, kernel_size, {_MAX_POOL_CALL}, return_indices=True)"
        )
        for n in (2, 3)
    },
    **{
        f"avg_pool{n}d.default(self, kernel_size, {_AVG_POOL}, divisor_override=None)": (
            f"F.avg_pool{n}d(self, kernel_size, {_AVG_POOL_CALL},"
            " divisor_override=divisor_override)"
        )
        for n in (2, 3)
    },
    **{
        f"adaptive_avg_pool{n}d.default(self, output_size)": (
            f"F.adaptive_avg_pool{n}d(self, output_size)"
        )
        for n in (1, 2, 3)
    },
    **{
        f"adaptive_max_pool{n}d.default(self, output_size)": (
            f"F.adaptive_max_pool{n}d(self, output_size, return_indices=True)"
        )
        for n in (1, 2, 3)
    },
    "im2col.default(self, kernel_size, dilation=1, padding=0, stride=1)": (
        "F.unfold(self, kernel_size, dilation=dilation, padding=padding, stride=stride)"
    ),
    "col2im.default(self, output_size, kernel_size, dilation=1, padding=0, stride=1)": (
        "F.fold(self, output_size, kernel_size, dilation=dilation, padding=padding, stride=stride)"
    ),
    "affine_grid_generator.default(theta, size, align_corners)": (
        "F.affine_grid(theta, size, align_corners=align_corners)"
    ),
    f"avg_pool1d.default(self, kernel_size, {_AVG_POOL})": (
        f"F.avg_pool1d(self, kernel_size, {_AVG_POOL_CALL})"
    ),
}

# With `scales` given to the form with sizes, sizes and scales may disagree: that has no Python.
RESIZING: Table = {
    **{
        f"{op}.vec(input, output_size=None, scale_factors=None)": (
            f"F.interpolate(input, size=output_size, scale_factor=scale_factors, mode='{mode}')"
        )
        for op, mode in (
            ("upsample_nearest1d", "nearest"),
            ("upsample_nearest2d", "nearest"),
            ("upsample_nearest3d", "nearest"),
            ("_upsample_nearest_exact2d", "nearest-exact"),
        )
    },
    **{
        f"{op}.vec(input, output_size=None, align_corners=False, scale_factors=None)": (
            f"F.interpolate(input, size=output_size, scale_factor=scale_factors, mode='{mode}',"
            " align_corners=align_corners)"
        )
        for op, mode in (
            ("upsample_linear1d", "linear"),
            ("upsample_bilinear2d", "bilinear"),
            ("upsample_bicubic2d", "bicubic"),
            ("upsample_trilinear3d", "trilinear"),
        )
    },
    "upsample_nearest2d.default(self, output_size, scales_h=None, scales_w=None)": (
        "F.interpolate(self, size=output_size, mode='nearest')"
    ),
    "upsample_bilinear2d.default(self, output_size, align_corners=False, scales_h=None,"
    " scales_w=None)": (
        "F.interpolate(self, size=output_size, mode='bilinear', align_corners=align_corners)"
    ),
}

ACTIVATIONS: Table = {
    **called(
        "F",
        """
        gelu.default(self, approximate='none'); softplus.default(self, beta=1, threshold=20)
        threshold.default(self, threshold, value); prelu.default(self, weight)
        glu.default(self, dim=-1); pad.default(self, pad, mode='constant', value=None)
        """,
    ),
    **{
        f"{name}{suffix}.default(self)": f"F.{name}(self{inplace})"
        for name in ("relu", "relu6", "selu", "silu", "mish", "hardswish", "hardsigmoid")
        for suffix, inplace in (("", ""), ("_", ", inplace=True"))
    },
    **{
        f"{name}{suffix}.default(self, {defaults})": f"F.{name}(self, {call}{inplace})"
        for name, defaults, call in (
            ("celu", "alpha=1.0", "alpha=alpha"),
            ("elu", "alpha=1, scale=1, input_scale=1", "alpha=alpha"),
            ("hardtanh", "min_val=-1, max_val=1", "min_val=min_val, max_val=max_val"),
            ("leaky_relu", "negative_slope=0.01", "negative_slope=negative_slope"),
        )
        for suffix, inplace in (("", ""), ("_", ", inplace=True"))
    },
    "softshrink.default(self, lambd=0.5)": "F.softshrink(self, lambd)",
    "hardshrink.default(self, lambd=0.5)": "F.hardshrink(self, lambd)",
    "log_sigmoid.default(self)": "F.logsigmoid(self)",
    "softmax.int(self, dim, dtype=None)": "F.softmax(self, dim=dim, dtype=dtype)",
    "log_softmax.int(self, dim, dtype=None)": "F.log_softmax(self, dim=dim, dtype=dtype)",
    "_softmax.default(self, dim, half_to_float=False)": "F.softmax(self, dim=dim)",
    "_log_softmax.default(self, dim, half_to_float=False)": "F.log_softmax(self, dim=dim)",
    "constant_pad_nd.default(self, pad, value=0)": "F.pad(self, pad, value=value)",
    "one_hot.default(self, num_classes=-1)": "F.one_hot(self, num_classes)",
}

_CLASSES = "self, target, weight=weight, ignore_index=ignore_index, reduction=reduction"
_REDUCED = "reduction='mean'"

LOSSES: Table = {
    **called(
        "F",
        """
        mse_loss.default(self, target, reduction='mean')
        l1_loss.default(self, target, reduction='mean')
        smooth_l1_loss.default(self, target, reduction='mean', beta=1.0)
        huber_loss.default(self, target, reduction='mean', delta=1.0)
        binary_cross_entropy.default(self, target, weight=None, reduction='mean')
        kl_div.default(self, target, reduction='mean', log_target=False)
        soft_margin_loss.default(self, target, reduction='mean')
        hinge_embedding_loss.default(self, target, margin=1.0, reduction='mean')
        margin_ranking_loss.default(input1, input2, target, margin=0.0, reduction='mean')
        cosine_embedding_loss.default(input1, input2, target, margin=0.0, reduction='mean')
        cosine_similarity.default(x1, x2, dim=1, eps=1e-08)
        pairwise_distance.default(x1, x2, p=2.0, eps=1e-06, keepdim=False)
        """,
    ),
    f"cross_entropy_loss.default(self, target, weight=None, {_REDUCED}, ignore_index=-100,"
    " label_smoothing=0.0)": f"F.cross_entropy({_CLASSES}, label_smoothing=label_smoothing)",
    **{
        f"{name}.default(self, target, weight=None, {_REDUCED}, ignore_index=-100)": (
            f"F.nll_loss({_CLASSES})"
        )
        for name in ("nll_loss", "nll_loss_nd", "nll_loss2d")
    },
    "binary_cross_entropy_with_logits.default(self, target, weight=None, pos_weight=None,"
    f" {_REDUCED})": (
        "F.binary_cross_entropy_with_logits(self, target, weight=weight, pos_weight=pos_weight,"
        " reduction=reduction)"
    ),
    "triplet_margin_loss.default(anchor, positive, negative, margin=1.0, p=2.0, eps=1e-06,"
    f" swap=False, {_REDUCED})": (
        "F.triplet_margin_loss(anchor, positive, negative, margin=margin, p=p, eps=eps, swap=swap,"
        " reduction=reduction)"
    ),
}

TABLE: Table = {**LAYERS, **CONVOLUTIONS, **RESIZING, **ACTIVATIONS, **LOSSES}
