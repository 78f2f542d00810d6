"""The model that every row trains, with a stack from any contestant; a batch, and a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases import CONTESTANTS

# retrograd, with the model and the data on the device of `tests/device`
ON_DEVICE = "retrograd on the test device"
OURS = ("retrograd", ON_DEVICE)
SHOWN = ("retrograd", "checkpoint", "reformer-pytorch", "revtorch", "memcnn", "revlib", ON_DEVICE)
# These libraries replay dropout only with an option.
OPTIONS: dict[str, dict[str, bool]] = {
    "revtorch": {"fix_random_seed": True},
    "memcnn": {"preserve_rng_state": True},
}
WIDTH, DEPTH, TOKENS, BATCH, OUTPUTS = 8, 4, 11, 4, 3
DEVICE = "cpu"  # where models and batches live; `use_test_device` sets it, for a whole process


def use_test_device() -> None:
    """To be called before the first backward of the process."""
    from tests import device

    global DEVICE
    device.load()
    DEVICE = device.NAME


class Layer(nn.Module):
    """f and g: a small feed-forward network."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.GELU()
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.act(self.up(self.norm(x)))))


class Model(nn.Module):
    """An embedding, a stack and a head; the same weights for every contestant and at every call."""

    def __init__(
        self,
        contestant: str,
        *,
        layer: Callable[..., nn.Module] = Layer,
        dropout: float = 0.0,
        shared: bool = False,
        frozen: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.embedding = nn.Embedding(TOKENS, 2 * WIDTH).requires_grad_(not frozen)
        functions = [layer(dropout) for _ in range(2 * DEPTH)]
        if shared:
            functions = [functions[i] for i in (0, 1, 1, 0, 0, 2, 2, 1)]
        self.head = nn.Linear(2 * WIDTH, OUTPUTS)
        # Under `torch.device("meta")` the model stays there.
        place = self.head.weight.device if self.head.weight.is_meta else DEVICE
        for part in (self, *functions):
            part.to(place, dtype)
        self.functions = functions  # a list: the stack registers them, under names of its own
        self.stack = build(contestant, functions)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.stack(self.embedding(tokens)))

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, under a name that does not depend on the contestant."""
        parts = {
            "embedding": self.embedding,
            **{f"function {i}": fn for i, fn in enumerate(self.functions)},
            "head": self.head,
        }
        for part, module in parts.items():
            for name, parameter in module.named_parameters():
                yield f"{part}, {name}", parameter


def build(contestant: str, functions: list[nn.Module]) -> nn.Module:
    """A stack of the contestant. Every two functions are a block."""
    pairs = list(zip(functions[::2], functions[1::2]))
    return CONTESTANTS[contestant](pairs, **OPTIONS.get(contestant, {}))


def blocks_of(stack: nn.Module) -> list[nn.Module]:
    """The modules that a contestant calls one after another."""
    blocks: Any = (
        getattr(stack, "blocks", None)
        or getattr(stack, "reversible_blocks", None)
        or getattr(stack, "stem", None)
    )
    return list(blocks if blocks is not None else stack.children())


def batch(step: int = 0, rank: int | None = None, world: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, or a rank's part of them."""
    tokens, targets = batch_on_host(step, rank, world)
    return tokens.to(DEVICE), targets.to(DEVICE)


def batch_on_host(step: int = 0, rank: int | None = None, world: int = 2) -> tuple[Tensor, Tensor]:
    """A batch as a data loader has it."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(TOKENS, (BATCH, 5), generator=generator)
    targets = torch.randn(BATCH, 5, OUTPUTS, generator=generator, dtype=torch.float64)
    if rank is not None:
        tokens = tokens.chunk(world)[rank]
        targets = targets.chunk(world)[rank]
    return tokens, targets


def stack_input() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 2 * WIDTH, dtype=torch.float64, generator=generator)
    return x.to(DEVICE)


def random_state() -> Tensor:
    """The state of the host's generator and, on a device, of its own."""
    states = [torch.get_rng_state()]
    if DEVICE != "cpu":
        states.append(torch.get_device_module(DEVICE).get_rng_state())
    return torch.cat(states)


def loss(model: Callable[..., Tensor], step: int = 0, rank: int | None = None) -> Tensor:
    tokens, targets = batch(step, rank)
    return nn.functional.mse_loss(model(tokens).double(), targets)


def gradients(model: Model) -> dict[str, Tensor | None]:
    """The gradients, unsharded. They are cleared for the next step."""
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named()}
    model.zero_grad()
    return {name: whole(grad) for name, grad in found.items()}


def parameters(model: Model) -> dict[str, Tensor | None]:
    return {name: whole(p.detach().clone()) for name, p in model.named()}


def whole(tensor: Any) -> Any:
    """The full tensor of a sharded one."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


Steps = dict[str, dict[str, "Tensor | None"]]


def autocast_step(model: Callable[..., Tensor], inner: Model) -> dict[str, Tensor | None]:
    """The gradients of a step. Forward runs under autocast, backward outside, as torch advises."""
    tokens, targets = batch()
    with torch.autocast(DEVICE, torch.bfloat16):
        output = model(tokens)
    nn.functional.mse_loss(output.double(), targets).backward()
    return gradients(inner)


def steps(
    model: Callable[..., Tensor],
    inner: Model | None = None,
    count: int = 1,
    rank: int | None = None,
) -> Steps:
    """The gradients of `count` steps of `model`, which wraps `inner` or is a `Model` itself."""
    found = {}
    for step in range(count):
        loss(model, step, rank).backward()
        found[f"step {step + 1}"] = gradients(inner or model)  # type: ignore[arg-type]
    return found
