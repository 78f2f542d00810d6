"""The language model: its loss, its cache and its memory are what plain equations give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.measure import activation_bytes
from speedrun.model import Cache, Config, LanguageModel
from tests import zoo

SMALL = Config(depth=3, width=32, heads=2, context=16)


def batch(context=16, count=2):
    stretches = torch.randint(256, (count, context + 1), generator=torch.Generator().manual_seed(1))
    return stretches[:, :-1], stretches[:, 1:]


def build(config=SMALL, **options):
    torch.manual_seed(0)
    return LanguageModel(config, **options)


def test_loss_in_chunks_is_cross_entropy():
    model = build()
    tokens, targets = batch()
    found = []
    for loss in (
        lambda: model.loss(tokens, targets),
        lambda: nn.functional.cross_entropy(model.logits(tokens).flatten(0, 1), targets.flatten()),
    ):
        value = loss()
        found.append([value, *torch.autograd.grad(value, list(model.parameters()))])
    assert zoo.worst(*found) < 1e-5
    with torch.no_grad():
        assert torch.allclose(model.loss(tokens, targets), found[0][0])


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("autocast", [False, True])
def test_reversed_and_exact_is_kept_and_exact_to_the_bit(autocast, dropout):
    found = []
    for memory in (rg.Keep(), rg.Reverse(), rg.Reverse(keep_last=False)):
        model = build(
            Config(depth=6, width=32, heads=2, context=16, dropout=dropout),
            memory=memory,
            exact=True,
        )
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model.loss(*batch())
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_tokens_see_what_is_before_them_only():
    model = build().eval()
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 9] += 1
    with torch.no_grad():
        before, after = model.logits(tokens), model.logits(changed % 256)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_a_cache_gives_what_the_whole_text_gives():
    model = build().eval()
    tokens, _ = batch()
    with torch.no_grad():
        whole = model.logits(tokens)
        cache = Cache()
        parts = [
            model.logits(tokens[:, :5], cache),
            *(model.logits(tokens[:, i : i + 1], cache) for i in range(5, 16)),
        ]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)
    assert cache.length == 16


def test_sampling_goes_on_beyond_the_context():
    model = build()
    written = bytes(model.generate(b"def ", 40, temperature=0.0))
    assert len(written) == 40
    assert written == bytes(model.generate(b"def ", 40, temperature=0.0))
    drawn = [
        bytes(model.generate(b"", 20, generator=torch.Generator().manual_seed(seed)))
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert model.training


def test_activation_memory_does_not_grow_with_depth():
    tokens, targets = batch()
    needed = []
    for depth in (8, 32):
        model = build(Config(depth=depth, width=32, heads=2, context=16))
        needed.append(
            activation_bytes(
                lambda model=model: model.loss(tokens, targets).backward(), model.parameters()
            )
        )
    assert needed[1] <= needed[0] * 1.01


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            {"width": 30, "heads": 4},
            "width=30, heads=4: each head needs an even number of channels.*such as 24",
        ),
        ({"depth": 0}, "depth=0: must be at least 1"),
    ],
)
def test_shapes_that_cannot_be(wrong, says):
    with pytest.raises(ValueError, match=says):
        Config(**wrong)
