"""What a function does differently the second time raises in the first backward."""

import pytest
import torch
from torch import nn

import retrograd as rg

REBUILD = rg.Reverse(keep_last=False)


class Counts(nn.Linear):
    """Counts its calls, and shows it in one token of many."""

    def __init__(self, width, factor=1.0):
        super().__init__(width, width)
        self.calls = 0
        self.factor = factor

    def forward(self, x):
        self.calls += 1
        h = super().forward(x)
        return torch.cat([h[:1], h[1:2] * (1 + self.factor * self.calls), h[2:]])


class Grows(nn.Linear):
    """A cache that grows on each call."""

    def forward(self, x, cache):
        cache.append(x.detach())
        return super().forward(x) + sum(cache[-2:]) * 0.1


class Fails(nn.Linear):
    def forward(self, x):
        if rg.is_recomputing():
            raise KeyError("lost")
        return super().forward(x)


def stack_of(function, **options):
    pairs = [(function(), function()) for _ in range(4)]
    return rg.ReversibleSequence(pairs, memory=REBUILD, **options)


@pytest.mark.parametrize("options", [{}, {"exact": True}, {"drift": "ignore"}], ids=str)
def test_one_token_of_many(options):
    stack = stack_of(lambda: Counts(8), **options)
    with pytest.raises(rg.RecomputeError, match=r"update 7 of 8 \(blocks.3.g\) did something else"):
        stack(torch.randn(256, 8)).square().sum().backward()


def test_a_small_difference():
    stack = stack_of(lambda: Counts(8, factor=0.1))
    with pytest.raises(rg.RecomputeError, match=r"the output, float32\[256, 8\], is off by"):
        stack(torch.randn(256, 8)).square().sum().backward()


def test_never_does_not_look():
    stack = stack_of(lambda: Counts(8, factor=0.1), verify="never", drift="ignore")
    stack(torch.randn(256, 8)).square().sum().backward()


def test_always_looks_in_every_step():
    class Turns(nn.Linear):
        """Begins to count later."""

        count = False
        calls = 0

        def forward(self, x):
            Turns.calls += Turns.count
            return super().forward(x) * (1 + Turns.calls)

    stack = stack_of(lambda: Turns(8, 8), verify="always")
    for _ in range(3):
        stack(torch.randn(4, 8)).sum().backward()
    Turns.count = True
    with pytest.raises(rg.RecomputeError, match="did something else"):
        stack(torch.randn(4, 8)).sum().backward()


def test_an_attribute_that_changes_is_looked_at_again():
    class Switch(nn.Linear):
        counts = 0

        def __init__(self):
            super().__init__(8, 8)
            self.is_on = False

        def forward(self, x):
            Switch.counts += self.is_on
            return super().forward(x) * (1 + Switch.counts)

    stack = stack_of(Switch)
    for _ in range(3):
        stack(torch.randn(4, 8)).sum().backward()
    for block in stack.blocks:
        block.f.is_on = True
    with pytest.raises(rg.RecomputeError, match="did something else"):
        stack(torch.randn(4, 8)).sum().backward()


def test_a_forward_without_backward_does_not_count():
    stack = stack_of(lambda: Counts(8))
    for _ in range(3):
        stack(torch.randn(256, 8))
    with pytest.raises(rg.RecomputeError, match="did something else"):
        stack(torch.randn(256, 8)).square().sum().backward()


def test_an_exception_in_recompute_names_the_update():
    stack = stack_of(lambda: Fails(8, 8))
    with pytest.raises(rg.RecomputeError, match=r"blocks.3.g\) raised KeyError") as raised:
        stack(torch.randn(4, 8)).sum().backward()
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_healthy_networks_pass(dtype):
    def function():
        return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    pairs = [(function(), function()) for _ in range(24)]
    stack = rg.ReversibleSequence(pairs, memory=REBUILD, verify="always").to(dtype)
    for scale in (0.1, 1.0, 100.0):
        (stack(torch.randn(32, 16, dtype=dtype) * scale).float().sum()).backward()


def test_settings_are_checked():
    with pytest.raises(ValueError, match='verify=\'often\': choose "first", "always" or "never"'):
        stack_of(lambda: Counts(8), verify="often")


class Cache:
    """What a model keeps of earlier tokens, as Hugging Face has it: layers of keys."""

    def __init__(self):
        self.layers = [[]]


def appends(cache, x):
    cache.layers[0].append(x.detach())


def counts(cache, x):
    cache.seen = getattr(cache, "seen", 0) + len(x)


def replaces(cache, x):
    cache.layers[0] = torch.cat([torch.as_tensor(cache.layers[0]).reshape(-1, 8), x.detach()])


@pytest.mark.parametrize("change", [appends, counts, replaces])
@pytest.mark.parametrize("verify", ["first", "never"])
def test_a_cache_in_keyword_arguments(change, verify):
    class Caches(nn.Linear):
        def forward(self, x, cache=None):
            if not (cache is None or (cache.is_careful and rg.is_recomputing())):
                change(cache, x)
            return super().forward(x)

    stack = stack_of(lambda: Caches(8, 8), verify=verify)
    for _ in range(2):
        cache = Cache()
        cache.is_careful = True
        stack(torch.randn(4, 8), cache=cache).sum().backward()
        cache.is_careful = False
        with pytest.raises(rg.RecomputeError, match=r"blocks.3.g\) changed an object .* a Cache"):
            stack(torch.randn(4, 8), cache=cache).sum().backward()


def test_a_list_in_keyword_arguments_that_grows():
    stack = stack_of(lambda: Grows(8, 8))
    with pytest.raises(rg.RecomputeError, match="did something else"):
        stack(torch.randn(4, 8), cache=[]).sum().backward()


def test_a_last_bit_is_no_alarm_where_no_function_has_parameters():
    """Kernels that are not deterministic (`torch.linalg.lstsq`) differ by roundings."""

    def rounded(x):
        return x.tanh() * (1 + 2e-16 * rg.is_recomputing())

    net = rg.Reversible([rg.Update("a", rounded, ("b",)), rg.Update("b", rounded, ("a",))] * 2)
    streams = {name: torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for name in "ab"}
    sum(stream.sum() for stream in net(streams).values()).backward()
