"""Models in plain torch: each shows one thing that a capture may get wrong."""

from tools.conformance.zoo.plain import autograd, convolutions, forms, kinds, obstacles

CASES = (
    *convolutions.CASES,
    *kinds.CASES,
    *autograd.CASES,
    *forms.CASES,
    *obstacles.CASES,
)
