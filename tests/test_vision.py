"""The vision transformer: reversed it has the gradients of plain autograd, in memory that does not
grow with depth.
"""

import pytest
import torch

import retrograd as rg
from retrograd.measure import activation_bytes
from retrograd.models.vision import Config, VisionTransformer
from tests import zoo

SMALL = {"size": 8, "patch": 2, "channels": 1, "classes": 10, "width": 16, "heads": 2}


def test_gradients():
    found = []
    for memory in (rg.Keep(), rg.Reverse(keep_last=False)):
        torch.manual_seed(0)
        model = VisionTransformer(Config(**SMALL, depth=4, dropout=0.2), memory=memory).double()
        scores = model(torch.randn(3, 1, 8, 8, dtype=torch.float64))
        found.append(zoo.gradients(model, scores))
    assert scores.shape == (3, 10)
    assert zoo.worst(*found) < 1e-9


def test_activation_memory_does_not_grow_with_depth():
    images, needed = torch.randn(16, 1, 8, 8), []
    for depth in (8, 32):
        model = VisionTransformer(Config(**SMALL, depth=depth))
        needed.append(
            activation_bytes(
                lambda model=model: model(images).square().mean().backward(), model.parameters()
            )
        )
    assert needed[1] <= 1.01 * needed[0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"patch": 3}, "size=8, patch=3: patches must cover the image"),
        ({"heads": 3}, "width must be a multiple of heads"),
    ],
)
def test_shapes_that_cannot_be(wrong, says):
    with pytest.raises(ValueError, match=says):
        Config(**{**SMALL, **wrong})
