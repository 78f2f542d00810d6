"""Promise of `exact=True`: gradients, parameters and rebuilt streams are those of `memory=Keep()`,
to the bit.
"""

import contextlib
import copy
import functools
import os
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import retrograd as rg
from benchmarks.cases import Attention
from retrograd.core.exact import Precision
from tests import processes, test_compat_parity, zoo


class Experts(nn.Module):
    """Each token goes to the one expert that scores highest: a rounding error at a border sends it
    elsewhere.
    """

    def __init__(self, width, experts=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, experts)
        self.experts = nn.Parameter(torch.randn(experts, width, width) / width**0.5)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        h = self.norm(x)
        best, chosen = self.score(h).softmax(-1).max(-1, keepdim=True)
        return self.drop(torch.einsum("bnd,bnde->bne", h, self.experts[chosen.squeeze(-1)]) * best)


class Dropping(nn.Sequential):
    def __init__(self, width):
        super().__init__(Attention(width, 2), nn.Dropout(0.1))


def routed(depth, width=16, **options):
    torch.manual_seed(5)
    return rg.ReversibleSequence(
        [(Dropping(width), Experts(width)) for _ in range(depth)], exact=True, **options
    )


def same(got, expected):
    got, expected = zoo.leaves(got), zoo.leaves(expected)
    assert len(got) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


def step(stack, x, memory, seed=3):
    """Output and gradients; whatever the input is made of."""
    stack.memory = memory
    torch.manual_seed(seed)
    y = stack(x)
    wanted = [t for t in [*zoo.leaves(x), *stack.parameters()] if t.requires_grad]
    grads = torch.autograd.grad(
        sum(leaf.float().square().sum() for leaf in zoo.leaves(y)), wanted, allow_unused=True
    )
    return [*(leaf.detach() for leaf in zoo.leaves(y)), *(g for g in grads if g is not None)]


def check(make, x):
    """Reversed in both ways equals kept, to the bit."""
    kept, *reversed_ = (
        step(make(), x, memory) for memory in (rg.Keep(), rg.Reverse(), rg.Reverse(keep_last=False))
    )
    for got in reversed_:
        same(got, kept)
    return kept


# --- 256 blocks, with choices that rounding would flip


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16-autocast"])
def test_256_blocks_and_steps_of_adamw(dtype):
    steps = 10 if "RETROGRAD_FUZZ" in os.environ else 3

    def train(memory):
        stack = routed(256, memory=memory)
        optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-3)
        x = torch.randn(2, 8, 16, requires_grad=True)
        seen = []
        for i in range(steps):
            torch.manual_seed(i)
            with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
                y = stack(x)
            optimizer.zero_grad()
            x.grad = None
            y.square().mean().backward()
            if i in (0, steps - 1):
                seen.append(
                    [
                        y.detach(),
                        x.grad,
                        *(p.grad.clone() for p in stack.parameters() if p.grad is not None),
                    ]
                )
            optimizer.step()
        return seen, [p.detach() for p in stack.parameters()]

    (got, parameters), (expected, expected_parameters) = train(rg.Reverse()), train(rg.Keep())
    same(got, expected)
    same(parameters, expected_parameters)


def test_without_it_choices_flip():
    """The test above can fail: the same network without a grid differs."""
    x = torch.randn(2, 64, 16, requires_grad=True)
    stack = routed(128)
    inexact = rg.ReversibleSequence([(block.f, block.g) for block in stack.blocks], drift="ignore")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises((AssertionError, rg.RecomputeError)):
        check(lambda: inexact, x)


# --- every additive program


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "case", [c for c in zoo.CASES if c.coupling == "additive" and c.memory == "keep"], ids=str
)
def test_every_kind_of_stream(case, dropout, dtype):
    stack, x = case.build(depth=6, dropout=dropout, dtype=dtype)

    def make():
        pairs = [(b.f, b.g) for b in stack.blocks]
        return rg.ReversibleSequence(pairs, streams=stack.streams, exact=True)

    got = check(make, x)
    if dtype == torch.float64:
        assert zoo.worst(got, step(stack, x, rg.Keep())) < 1e-6, "a grid of 2**-32 changes little"


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_narrow_parameters(narrow):
    x = torch.randn(2, 8, 16, dtype=narrow, requires_grad=True)
    got = check(lambda: routed(12).to(narrow), x)
    assert got[0].dtype == narrow, "the caller gets what it gave"


def test_float16_autocast():
    with torch.autocast("cpu", torch.float16):
        check(lambda: routed(12), torch.randn(2, 8, 16, requires_grad=True))


def test_batch_norm_and_constant_inputs():
    def make():
        torch.manual_seed(0)
        conv = lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())  # noqa: E731
        return rg.ReversibleSequence(
            [(conv(), conv()) for _ in range(8)], streams=rg.Split(1), exact=True
        )

    stacks = [make() for _ in range(2)]
    got, expected = (
        step(stack, torch.linspace(-1, 1, 8 * 8 * 25).view(8, 8, 5, 5), memory)
        for stack, memory in zip(stacks, (rg.Reverse(), rg.Keep()))
    )
    same(got, expected)
    same([*stacks[0].buffers()], [*stacks[1].buffers()])


def test_many_streams_and_aux():
    torch.manual_seed(0)
    names = ["a", "b", "c"]
    updates = [rg.Update(names[i % 3], zoo.Mix(4), reads=(names[(i + 1) % 3],)) for i in range(9)]
    updates.append(rg.Update("a", lambda b, c: rg.WithAux(b * c, b.sum()), reads=("b", "c")))
    net = rg.Reversible(updates, exact=rg.Grid(bits=12))
    streams = {name: torch.randn(2, 4, requires_grad=True) for name in names}

    def run(memory):
        net.memory = memory
        y, aux = net(streams)
        grads = torch.autograd.grad(
            sum(v.square().sum() for v in y.values()) + aux[0],
            [*streams.values(), *net.parameters()],
        )
        return [*y.values(), *grads]

    same(run(rg.Reverse()), run(rg.Keep()))
    assert all(((leaf * 2**12) % 1 == 0).all() for leaf in run(rg.Reverse())[:3])


def test_complex_streams():
    torch.manual_seed(0)

    class Turn(nn.Linear):
        def __init__(self):
            super().__init__(4, 4, dtype=torch.complex64)

    stack = rg.ReversibleSequence([(Turn(), Turn()) for _ in range(6)], exact=True)
    x = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)

    def run(memory):
        stack.memory = memory
        return torch.autograd.grad(stack(x).abs().square().sum(), [x, *stack.parameters()])

    same(run(rg.Reverse()), run(rg.Keep()))


def test_conjugates():
    stack = rg.ReversibleSequence([(lambda x: x.conj(), lambda x: x * 0.5)] * 2, exact=True)
    x = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    grads = []
    for stack.memory in (rg.Reverse(), rg.Keep()):
        grads.append(torch.autograd.grad(stack(x.conj()).abs().sum(), x)[0])
    same(grads[0], grads[1])


class Angle(nn.Linear):
    """Tells -0.0 from 0.0."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return super().forward(torch.atan2(x, x.detach() - 1))


def test_negative_zeros():
    torch.manual_seed(0)
    blocks = [(Angle(), Angle()) for _ in range(4)]
    x = torch.randn(8, 8, 4)
    x[3, 5, 2] = -1e-6
    check(lambda: rg.ReversibleSequence(blocks, exact=True), x.requires_grad_())


LAYOUTS = [(1, 8, 6, 6), (2, 8, 1, 1), (2, 1, 5, 5), (1, 1, 5, 5), (3, 8, 1, 4)]


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@pytest.mark.parametrize("layer", ["norm", "conv", "mixed"])
def test_layouts_with_dimensions_of_size_one(shape, layer):
    """Kernels choose by strides, also by those of dimensions that have one element."""
    torch.manual_seed(0)
    norm, conv = (
        lambda: nn.BatchNorm2d(shape[1]),
        lambda: nn.Conv2d(shape[1], shape[1], 3, padding=1),
    )
    make = {"norm": (norm, norm), "conv": (conv, conv), "mixed": (conv, norm)}[layer]
    if layer != "conv" and shape[0] * shape[2] * shape[3] == 1:
        return
    for memory_format in (torch.channels_last, torch.contiguous_format):
        blocks = [(make[0](), make[1]()) for _ in range(4)]
        x = torch.randn(shape).to(memory_format=memory_format)
        for value in (x.requires_grad_(), x.detach()):
            check(lambda: copy.deepcopy(rg.ReversibleSequence(blocks, exact=True)), value)  # noqa: B023


def test_whole_numbers_add_exactly_as_they_are():
    count = rg.Update("n", lambda x: (x > 0).long(), reads=("x",))
    net = rg.Reversible(
        [count, rg.Update("x", lambda n: n.float().tanh(), reads=("n",)), count], exact=True
    )
    start = {"n": torch.tensor([2**40, 5, -7]), "x": torch.tensor([0.5, -0.5, 0.25])}
    same(net.inverse(net(start)), start)


@pytest.mark.parametrize("system", test_compat_parity.CASES, ids=lambda system: system.__name__)
def test_the_five_systems(system):
    case = system()
    net, (args, kwargs) = case.build(case.ours, 0.2).double(), case.inputs()
    net.engine.exact = True

    def run(memory):
        net.engine.memory = memory
        return [
            t
            for ts in test_compat_parity.step(net, args, kwargs).values()
            for t in ts
            if t is not None
        ]

    same(run(rg.Reverse()), run(rg.Keep()))


# --- inverse


@pytest.mark.parametrize("grid", [True, rg.Grid(bits=10), rg.Grid(dtype=torch.float64)], ids=str)
def test_inverse_restores_every_bit(grid):
    torch.manual_seed(0)
    stack = rg.ReversibleSequence(
        [(Attention(16, 2), Experts(16)) for _ in range(64)], streams=rg.Split(), exact=grid
    ).eval()
    on_grid = (torch.randn(2, 8, 32) * 2**10).round() / 2**10
    y = stack(on_grid)
    if grid == rg.Grid(
        dtype=torch.float64
    ):  # the output, in the input's float32, has lost what the streams had
        assert not torch.equal(stack.inverse(y), on_grid)
        return
    assert torch.equal(stack.inverse(y), on_grid)
    program = rg.Reversible(
        [rg.Update("ab"[i % 2], zoo.Mix(4), reads=("ba"[i % 2],)) for i in range(64)], exact=grid
    )
    streams = {"a": torch.ones(2, 4), "b": torch.zeros(2, 4)}
    same(program.inverse(program(streams)), streams)


@pytest.mark.parametrize("kind", ["encoder", "lstm"])
@pytest.mark.parametrize("gradients", [True, False])
def test_inverse_with_modules_that_choose_kernels_by_the_grad_mode(kind, gradients):
    class Lstm(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0]

    torch.manual_seed(0)
    encoder = lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)  # noqa: E731
    make = encoder if kind == "encoder" else lambda: Lstm(16, 16, batch_first=True)
    stack = rg.ReversibleSequence(
        [(make(), make()) for _ in range(8)], streams=rg.Split(), exact=True
    ).eval()
    x = (torch.randn(3, 7, 32) * 64).round() / 64
    with torch.set_grad_enabled(gradients):
        back = stack.inverse(stack(x))
    assert torch.equal(back, x)
    assert not back.requires_grad


# --- range


def amplifier(factor, depth=4, **options):
    return rg.ReversibleSequence(
        [(lambda x: x * factor, lambda x: x * factor) for _ in range(depth)], exact=True, **options
    )


@pytest.mark.parametrize("memory", [rg.Reverse(), rg.Keep()], ids=str)
@pytest.mark.parametrize("gradients", [True, False])
def test_a_value_out_of_range_is_named(memory, gradients):
    x = torch.full((2, 3), -1.0, requires_grad=gradients)
    stack = amplifier(3.0, memory=memory)
    with pytest.raises(rg.GridError) as error:
        stack(x)
    assert "update 6 of 8 (blocks.3.f): stream 'x1' holds -5116, and its grid ends at 4096." in str(
        error.value
    )


@pytest.mark.parametrize("value", [5e3, -7e4, 1e6, 4e6, 1e9])
@pytest.mark.parametrize(
    "grid",
    [True, rg.Grid(bits=16), rg.Grid(dtype=torch.float64), rg.Grid(45, torch.float64)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fixes_that_it_names_work_when_typed(value, grid, dtype):
    """Also if a later update is larger still than the one that is named."""
    x = torch.zeros(2, 3, dtype=dtype)
    functions = [
        (lambda x: x * 0 + value / 50, lambda x: x * 0),
        (lambda x: x * 0 + value, lambda x: x * 0),
    ]
    try:
        rg.ReversibleSequence(functions, exact=grid)(x)
    except rg.GridError as error:
        fixes = re.findall(r"exact=(rg\.Grid\(.*?\))", str(error))
        assert fixes or abs(value) >= 2**23
        for fix in fixes:
            rg.ReversibleSequence(functions, exact=eval(fix))(x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e30, 4096.0])
def test_an_input_out_of_range(bad):
    x = torch.zeros(4)
    x[1] = bad
    with pytest.raises(rg.GridError, match=r"the input: stream 'x1' holds"):
        amplifier(0.1)(x)
    with pytest.raises(rg.GridError, match=r"the output: stream 'x1' holds"):
        amplifier(0.1, streams=rg.Split()).inverse(x)


def test_a_stream_that_is_only_read_may_hold_anything():
    net = rg.Reversible([rg.Update("a", torch.tanh, ("p",))], exact=True)
    y = net({"a": torch.zeros(2), "p": torch.tensor([1e30, 0.1])})
    assert y["p"][1] == torch.tensor(0.1), "nor is it rounded"


def test_the_end_of_the_range_is_exact():
    x = torch.tensor([4095.5, -4095.5])
    stack = rg.ReversibleSequence(
        [(lambda x: x * 0 + 2**-12, lambda x: x * 0 - 2**-12)], streams=rg.Split(), exact=True
    )
    assert torch.equal(stack.inverse(stack(x)), x)
    assert not torch.equal(stack(x), x)


def test_functions_that_leave_the_range_and_come_back_are_noticed():
    stack = rg.ReversibleSequence(
        [(lambda x: x * 0 + 5000, lambda x: x), (lambda x: x * 0 - 5000, lambda x: x)], exact=True
    )
    with pytest.raises(rg.GridError, match="update 0 of 4"):
        stack(torch.ones(2))


# --- what cannot be exact


@pytest.mark.parametrize("coupling", [rg.Affine(), zoo.Scaled()], ids=lambda c: type(c).__name__)
def test_couplings_that_multiply_by_anything_are_refused(coupling):
    with pytest.raises(
        ValueError,
        match=r"coupling: exact reversal needs additive or scaled couplings.*Use rg.Additive",
    ):
        rg.ReversibleSequence([(nn.Linear(2, 4), nn.Linear(2, 4))], coupling=coupling, exact=True)
    with pytest.raises(ValueError, match=r"updates\[1\]: exact reversal needs additive or scaled"):
        rg.Reversible(
            [
                rg.Update("a", nn.ReLU(), ("b",)),
                rg.Update("b", nn.ReLU(), ("a",), coupling=coupling),
            ],
            exact=True,
        )


class Astray(nn.Linear):
    """Another output each time it runs, by one step of the grid."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) + self.calls * 2**-12


def test_a_function_that_is_off_by_one_step_of_the_grid_is_found():
    stack = rg.ReversibleSequence(
        [(nn.Linear(4, 4), nn.Linear(4, 4)), (Astray(4, 4), nn.Linear(4, 4))] * 4, exact=True
    )
    y = stack(torch.randn(2, 4))
    with pytest.raises(
        rg.RecomputeError,
        match=r"update \d+ of 16 .* did something else when it ran again .*\(limit 0e\+00\)",
    ):
        y.sum().backward()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"exact": 16}, TypeError, "exact=16: pass True, False or rg.Grid"),
        (
            {"exact": True, "stream_dtype": torch.bfloat16},
            ValueError,
            "streams on a grid are float32 or float64",
        ),
        (
            {"exact": rg.Grid(dtype=torch.float32), "stream_dtype": torch.float64},
            ValueError,
            "not both",
        ),
        ({"stream_dtype": torch.int32}, TypeError, "pass a floating-point dtype"),
        ({"stream_dtype": torch.float8_e4m3fn}, TypeError, "pass a floating-point dtype"),
        ({"stream_dtype": "float32"}, TypeError, "pass a floating-point dtype"),
        ({"drift": "loud"}, ValueError, 'choose "warn", "raise" or "ignore"'),
    ],
)
def test_options_that_make_no_sense(options, error, text):
    for make in (lambda **o: rg.ReversibleSequence([], **o), lambda **o: rg.Reversible([], **o)):
        with pytest.raises(error, match=text):
            make(**options)


@pytest.mark.parametrize("bits", [-1, 24, 1.5, "16", True])
def test_grids_that_do_not_exist(bits):
    with pytest.raises(ValueError, match=r"Grid\(bits=.*whole number from 0 to 23"):
        rg.Grid(bits=bits)
    for wrong in (lambda: rg.Grid(dtype=torch.bfloat16), lambda: rg.Grid().limit(torch.bfloat16)):
        with pytest.raises(ValueError, match="float32 or torch.float64"):
            wrong()


def test_it_may_be_assigned_later():
    stack, x = routed(2), torch.randn(1, 4, 16)
    stack.exact = False
    assert stack(x).ne(routed(2)(x)).any()
    stack.exact = rg.Grid(bits=4)
    assert stack(x.requires_grad_()).mul(2**5).frac().eq(0).all()  # the mean of two streams
    stack.drift = "raise"
    assert (stack.drift, stack.stream_dtype, stack.exact) == ("raise", None, rg.Grid(bits=4))
    multiplying = rg.ReversibleSequence(
        [(nn.Linear(2, 2), nn.Linear(2, 2))], coupling=rg.Momentum(0.123456789)
    )
    with pytest.raises(ValueError, match="ratios of whole numbers.*for instance to 0.12"):
        multiplying.exact = True
    assert multiplying.exact is False


def test_it_shows_in_repr():
    assert "exact=Grid(bits=12, dtype=None)" in repr(
        rg.ReversibleSequence([], exact=rg.Grid(bits=12))
    )
    assert "exact" not in repr(rg.ReversibleSequence([]))


# --- what users do with it


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # torch's own, inside jvp and vmap
def test_rounding_has_the_gradient_of_the_identity():
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    grid = rg.Grid(bits=2)
    y = grid.round(x, torch.float64)
    assert torch.equal(y, (x * 4).round() / 4)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones(5, dtype=torch.float64))
    tangent = torch.randn_like(x)
    assert torch.equal(
        torch.func.jvp(lambda x: grid.round(x, torch.float64), (x,), (tangent,))[1], tangent
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # torch's own, inside jvp and vmap
def test_transforms():
    stack, x = (
        rg.ReversibleSequence([(zoo.Mix(4), zoo.Mix(4)) for _ in range(3)], exact=True),
        torch.randn(6, 4),
    )
    expected = torch.stack([torch.func.grad(lambda x: stack(x).square().sum())(row) for row in x])
    got = torch.func.vmap(torch.func.grad(lambda x: stack(x).square().sum()))(x)
    torch.testing.assert_close(got, expected)
    _, tangent = torch.func.jvp(stack, (x,), (x,))
    torch.testing.assert_close(
        (tangent.sum()),
        (torch.func.grad(lambda x: stack(x).sum())(x) * x).sum(),
        atol=1e-4,
        rtol=1e-4,
    )


def test_double_backward():
    stack = rg.ReversibleSequence([(zoo.Mix(4), zoo.Mix(4)) for _ in range(3)], exact=True)
    x = torch.randn(2, 4, requires_grad=True)

    def run(memory):
        stack.memory = memory
        (first,) = torch.autograd.grad(stack(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)

    same(run(rg.Reverse()), run(rg.Keep()))


def test_meta_and_empty_inputs():
    stack = rg.ReversibleSequence([(nn.Linear(4, 4), nn.Linear(4, 4))], exact=True)
    assert stack(torch.randn(0, 4)).shape == (0, 4)
    assert stack.to("meta")(torch.randn(2, 4, device="meta")).shape == (2, 4)


def test_copies_and_pickles(tmp_path):
    stack, x = routed(2), torch.randn(1, 4, 16)
    torch.save(stack, tmp_path / "stack.pt")
    loaded = torch.load(tmp_path / "stack.pt", weights_only=False)
    for other in (copy.deepcopy(stack), loaded):
        same(step(other, x, rg.Reverse()), step(stack, x, rg.Reverse()))


def test_precision_is_plain_data():
    assert (
        str(Precision(False, "raise", torch.float64))
        == ", stream_dtype=torch.float64, drift='raise'"
    )


# --- many processes


def ddp(memory, rank):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        routed(6, memory=memory), find_unused_parameters=True
    )
    return distributed_steps(model, rank)


def fsdp(cast, memory, rank):
    torch.manual_seed(0)
    model = routed(6, memory=memory)
    policy = MixedPrecisionPolicy(torch.bfloat16) if cast else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model)
    return distributed_steps(model, rank)


def distributed_steps(model, rank):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i in range(3):
        torch.manual_seed(10 * i + rank)
        model(torch.randn(2, 8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


WRAPPED = {
    "ddp": ddp,
    "fsdp": functools.partial(fsdp, False),
    "fsdp-bfloat16": functools.partial(fsdp, True),
}
MEMORY = {"reverse": rg.Reverse(), "keep": rg.Keep()}
PROCESSES = {
    f"{n}-{m}": functools.partial(run, memory)
    for n, run in WRAPPED.items()
    for m, memory in MEMORY.items()
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return processes.run(
        PROCESSES,
        tmp_path_factory.mktemp("exact"),
        ignore=["find_unused_parameters=True was specified"],
    )


@pytest.mark.distributed
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_in_many_processes(results, wrapper):
    assert dist.is_available()
    for got, expected in zip(results[f"{wrapper}-reverse"], results[f"{wrapper}-keep"]):
        same(got, expected)
