"""Device d1: stage 1 of 3 of UNet.

    d0 --> [d1] --> d2      gpipe, 4 micro-batches of 2

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


class Stage1(Stage):
    """Stage 1, for device d1: down.1 to up.1."""

    returns = ("grow",)

    def __init__(self):
        super().__init__(
            down=Tensors(
                {
                    1: Tensors(norm2=Tensors(weight=(32,), bias=(32,))),
                    2: DoubleConv((64, 32, 3, 3), (64,), (64, 64, 3, 3)),
                },
            ),
            up=Tensors(
                {
                    0: Up((64, 32, 2, 2), (32,), (32, 64, 3, 3), (32, 32, 3, 3)),
                    1: Tensors(grow=Tensors(weight=(32, 16, 2, 2), bias=(16,))),
                },
            ),
        )

    def forward(self, conv2):
        norm2 = F.group_norm(conv2, 4, self.down[1].norm2.weight, self.down[1].norm2.bias)  # unet.py:37
        relu = F.relu(norm2)
        x = F.max_pool2d(relu, 2)  # unet.py:70
        relu_2 = self.down[2](x)
        relu = self.up[0](relu_2, relu)
        return F.conv_transpose2d(relu, self.up[1].grow.weight, self.up[1].grow.bias, stride=2)  # unet.py:50


# Channel(tag, kind, value, source stage, target stage, sender, receiver, shape of a message, dtype)
CONV2_FROM_0 = Channel(
    2, "activation", "conv2d_5", 0, 1, "d0", "d1", (2, 32, 8, 8), torch.float32, requires_grad=True
)
GROW_TO_2 = Channel(
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
CONV2_GRAD_TO_0 = Channel(6, "gradient", "conv2d_5", 1, 0, "d1", "d0", (2, 32, 8, 8), torch.float32)
GROW_GRAD_FROM_2 = Channel(
    7, "gradient", "conv_transpose2d_1", 2, 1, "d2", "d1", (2, 16, 16, 16), torch.float32
)


class Device1(Device):
    """What d1 does in one step; `step_once` at the end is the schedule."""

    name = "d1"
    names = ("d0", "d1", "d2")
    micro_batches = 4
    stages = {1: Stage1}
    channels = (CONV2_FROM_0, GROW_TO_2, CONV2_GRAD_TO_0, GROW_GRAD_FROM_2)

    def forward_1(self, m):
        conv2 = self.recv(CONV2_FROM_0, m)  # from d0
        grow = self.forward(1, m, conv2=conv2)
        self.send(GROW_TO_2, m, grow)  # to d2

    def backward_1(self, m):
        grow_grad = self.recv(GROW_GRAD_FROM_2, m)  # from d2
        conv2_grad = self.backward(1, m, grow=grow_grad)
        self.send(CONV2_GRAD_TO_0, m, conv2_grad)  # to d0

    def update(self):
        self.optimizer_step()

    def step_once(self):
        for m in range(4):
            self.forward_1(m)
        for m in range(4):
            self.backward_1(m)
        self.update()
