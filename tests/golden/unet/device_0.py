"""Device d0: stage 0 of 3 of UNet.

    [d0] --> d1 --> d2      gpipe, 4 micro-batches of 2

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


class Stage0(Stage):
    """Stage 0, for device d0: inlet.conv1 to down.1."""

    returns = ("relu", "relu_2", "conv2")

    def __init__(self):
        super().__init__(
            inlet=DoubleConv((8, 1, 3, 3), (8,), (8, 8, 3, 3)),
            down=Tensors(
                {
                    0: DoubleConv((16, 8, 3, 3), (16,), (16, 16, 3, 3)),
                    1: Tensors(
                        conv1=Tensors(weight=(32, 16, 3, 3), bias=(32,)),
                        norm1=Tensors(weight=(32,), bias=(32,)),
                        conv2=Tensors(weight=(32, 32, 3, 3), bias=(32,)),
                    ),
                },
            ),
        )

    def forward(self, image):
        relu = self.inlet(image)
        max_pool2d = F.max_pool2d(relu, 2)  # unet.py:70
        relu_2 = self.down[0](max_pool2d)
        max_pool2d = F.max_pool2d(relu_2, 2)
        conv1 = F.conv2d(max_pool2d, self.down[1].conv1.weight, self.down[1].conv1.bias, padding=1)  # unet.py:36
        norm1 = F.group_norm(conv1, 4, self.down[1].norm1.weight, self.down[1].norm1.bias)
        x = F.relu(norm1)
        conv2 = F.conv2d(x, self.down[1].conv2.weight, self.down[1].conv2.bias, padding=1)  # unet.py:37
        return (relu, relu_2, conv2)


# Channel(tag, kind, value, source stage, target stage, sender, receiver, shape of a message, dtype)
RELU_TO_2 = Channel(
    0, "activation", "relu_1", 0, 2, "d0", "d2", (2, 8, 32, 32), torch.float32, requires_grad=True
)
RELU_2_TO_2 = Channel(
    1, "activation", "relu_3", 0, 2, "d0", "d2", (2, 16, 16, 16), torch.float32, requires_grad=True
)
CONV2_TO_1 = Channel(
    2, "activation", "conv2d_5", 0, 1, "d0", "d1", (2, 32, 8, 8), torch.float32, requires_grad=True
)
RELU_GRAD_FROM_2 = Channel(4, "gradient", "relu_1", 2, 0, "d2", "d0", (2, 8, 32, 32), torch.float32)
RELU_2_GRAD_FROM_2 = Channel(
    5, "gradient", "relu_3", 2, 0, "d2", "d0", (2, 16, 16, 16), torch.float32
)
CONV2_GRAD_FROM_1 = Channel(
    6, "gradient", "conv2d_5", 1, 0, "d1", "d0", (2, 32, 8, 8), torch.float32
)


class Device0(Device):
    """What d0 does in one step; `step_once` at the end is the schedule."""

    name = "d0"
    names = ("d0", "d1", "d2")
    micro_batches = 4
    stages = {0: Stage0}
    channels = (
        RELU_TO_2, RELU_2_TO_2, CONV2_TO_1, RELU_GRAD_FROM_2, RELU_2_GRAD_FROM_2, CONV2_GRAD_FROM_1
    )

    def forward_0(self, m):
        image = self.batch("image", m)
        relu, relu_2, conv2 = self.forward(0, m, image=image)
        self.send(RELU_TO_2, m, relu)  # to d2
        self.send(RELU_2_TO_2, m, relu_2)  # to d2
        self.send(CONV2_TO_1, m, conv2)  # to d1

    def backward_0(self, m):
        relu_grad = self.recv(RELU_GRAD_FROM_2, m)  # from d2
        relu_2_grad = self.recv(RELU_2_GRAD_FROM_2, m)  # from d2
        conv2_grad = self.recv(CONV2_GRAD_FROM_1, m)  # from d1
        self.backward(0, m, relu=relu_grad, relu_2=relu_2_grad, conv2=conv2_grad)

    def update(self):
        self.optimizer_step()

    def step_once(self):
        for m in range(4):
            self.forward_0(m)
        for m in range(4):
            self.backward_0(m)
        self.update()
