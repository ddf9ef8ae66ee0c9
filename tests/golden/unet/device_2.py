"""Device d2: stage 2 of 3 of UNet.

    d0 --> d1 --> [d2]      gpipe, 4 micro-batches of 2

Written by bigbrain-fx; needs torch only.
"""

import torch
import torch.nn.functional as F

if __package__:  # imported as part of a package: `from bundle.device_0 import Stage0`
    from .runtime import Channel, Device, Region, Stage, Tensors
else:
    from runtime import Channel, Device, Region, Stage, Tensors


class DoubleConv(Region):
    """DoubleConv, such as `inlet` of the model, first in unet.py:36."""

    def __init__(self, conv1_weight, conv1_bias, conv2_weight):
        super().__init__(
            conv1=Tensors(weight=conv1_weight, bias=conv1_bias),
            norm1=Tensors(weight=conv1_bias, bias=conv1_bias),
            conv2=Tensors(weight=conv2_weight, bias=conv1_bias),
            norm2=Tensors(weight=conv1_bias, bias=conv1_bias),
        )

    def forward(self, image):
        norm1 = F.group_norm(
            F.conv2d(image, self.conv1.weight, self.conv1.bias, padding=1),
            4,
            self.norm1.weight,
            self.norm1.bias,
        )  # unet.py:36
        x = F.relu(norm1)
        norm2 = F.group_norm(
            F.conv2d(x, self.conv2.weight, self.conv2.bias, padding=1),
            4,
            self.norm2.weight,
            self.norm2.bias,
        )  # unet.py:37
        return F.relu(norm2)


class Up(Region):
    """Up, such as `up.0` of the model, first in unet.py:50."""

    def __init__(self, grow_weight, grow_bias, conv_conv1_weight, conv_conv2_weight):
        super().__init__(
            grow=Tensors(weight=grow_weight, bias=grow_bias),
            conv=Tensors(
                conv1=Tensors(weight=conv_conv1_weight, bias=grow_bias),
                norm1=Tensors(weight=grow_bias, bias=grow_bias),
                conv2=Tensors(weight=conv_conv2_weight, bias=grow_bias),
                norm2=Tensors(weight=grow_bias, bias=grow_bias),
            ),
        )

    def forward(self, relu, relu_2):
        cat = torch.cat(
            [relu_2, F.conv_transpose2d(relu, self.grow.weight, self.grow.bias, stride=2)], dim=1
        )  # unet.py:50
        norm1 = F.group_norm(
            F.conv2d(cat, self.conv.conv1.weight, self.conv.conv1.bias, padding=1),
            4,
            self.conv.norm1.weight,
            self.conv.norm1.bias,
        )  # unet.py:36
        x = F.relu(norm1)
        norm2 = F.group_norm(
            F.conv2d(x, self.conv.conv2.weight, self.conv.conv2.bias, padding=1),
            4,
            self.conv.norm2.weight,
            self.conv.norm2.bias,
        )  # unet.py:37
        return F.relu(norm2)


class Stage2(Stage):
    """Stage 2, for device d2: up.1 to head."""

    returns = ("binary_cross_entropy_with_logits",)

    def __init__(self):
        super().__init__(
            up=Tensors(
                {
                    1: Tensors(conv=DoubleConv((16, 32, 3, 3), (16,), (16, 16, 3, 3))),
                    2: Up((16, 8, 2, 2), (8,), (8, 16, 3, 3), (8, 8, 3, 3)),
                },
            ),
            head=Tensors(weight=(1, 8, 1, 1), bias=(1,)),
        )

    def forward(self, relu, relu_2, grow, batch_1):
        cat = torch.cat([relu_2, grow], dim=1)  # unet.py:50
        relu_2 = self.up[1].conv(cat)
        relu = self.up[2](relu_2, relu)
        head = F.conv2d(relu, self.head.weight, self.head.bias)  # unet.py:73
        return F.binary_cross_entropy_with_logits(head, batch_1)  # unet.py:84


# Channel(tag, kind, value, source stage, target stage, sender, receiver, shape of a message, dtype)
RELU_FROM_0 = Channel(
    0, "activation", "relu_1", 0, 2, "d0", "d2", (2, 8, 32, 32), torch.float32, requires_grad=True
)
RELU_2_FROM_0 = Channel(
    1, "activation", "relu_3", 0, 2, "d0", "d2", (2, 16, 16, 16), torch.float32, requires_grad=True
)
GROW_FROM_1 = Channel(
    3,
    "activation",
    "conv_transpose2d_1",
    1,
    2,
    "d1",
    "d2",
    (2, 16, 16, 16),
    torch.float32,
    requires_grad=True,
)
RELU_GRAD_TO_0 = Channel(4, "gradient", "relu_1", 2, 0, "d2", "d0", (2, 8, 32, 32), torch.float32)
RELU_2_GRAD_TO_0 = Channel(
    5, "gradient", "relu_3", 2, 0, "d2", "d0", (2, 16, 16, 16), torch.float32
)
GROW_GRAD_TO_1 = Channel(
    7, "gradient", "conv_transpose2d_1", 2, 1, "d2", "d1", (2, 16, 16, 16), torch.float32
)


class Device2(Device):
    """What d2 does in one step; `step_once` at the end is the schedule."""

    name = "d2"
    names = ("d0", "d1", "d2")
    micro_batches = 4
    stages = {2: Stage2}
    loss = (2, "binary_cross_entropy_with_logits")
    channels = (
        RELU_FROM_0, RELU_2_FROM_0, GROW_FROM_1, RELU_GRAD_TO_0, RELU_2_GRAD_TO_0, GROW_GRAD_TO_1
    )

    def forward_2(self, m):
        relu = self.recv(RELU_FROM_0, m)  # from d0
        relu_2 = self.recv(RELU_2_FROM_0, m)  # from d0
        grow = self.recv(GROW_FROM_1, m)  # from d1
        batch_1 = self.batch("batch_1", m)
        self.forward(2, m, relu=relu, relu_2=relu_2, grow=grow, batch_1=batch_1)

    def backward_2(self, m):
        relu_grad, relu_2_grad, grow_grad = self.backward(2, m)
        self.send(RELU_GRAD_TO_0, m, relu_grad)  # to d0
        self.send(RELU_2_GRAD_TO_0, m, relu_2_grad)  # to d0
        self.send(GROW_GRAD_TO_1, m, grow_grad)  # to d1

    def update(self):
        self.optimizer_step()

    def step_once(self):
        for m in range(4):
            self.forward_2(m)
        for m in range(4):
            self.backward_2(m)
        self.update()
