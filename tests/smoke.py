"""What anyone can try after `pip install`, with torch and nothing else: `python -I tests/smoke.py`,
in a new environment.

It imports nothing of the tests, and says on which file of retrograd it ran.
"""

import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path


def main():
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Failed to initialize NumPy"
        )  # torch's own word on an environment without it
        import torch
    warnings.simplefilter("error")
    import retrograd as rg

    it_is_the_installed_one(rg)
    every_module_loads(rg)
    it_trains(torch, rg)
    compat_trains(torch, rg)
    commands_answer()
    print(f"retrograd {rg.__version__} on torch {torch.__version__}: {rg.__file__}")


def it_is_the_installed_one(rg):
    here = Path(rg.__file__).resolve()
    assert here.is_relative_to(Path(sys.prefix).resolve()), (
        f"{here} is not in the environment {sys.prefix}"
    )
    assert rg.__version__ == importlib.metadata.version("retrograd")
    assert here.with_name("py.typed").is_file()


def every_module_loads(rg):
    """Also those that need an extra to run."""
    for module in pkgutil.walk_packages(rg.__path__, "retrograd."):
        if module.name != "retrograd.__main__":
            importlib.import_module(module.name)


def it_trains(torch, rg):
    """One step, with the same weights in each memory mode: the loss falls, and gradients are those
    of plain autograd.
    """
    nn = torch.nn

    def gradients(*, step=False, **options):
        torch.manual_seed(0)
        pairs = [
            (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()), nn.Linear(16, 16))
            for _ in range(4)
        ]
        stack = rg.ReversibleSequence(pairs, **options).double()
        x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
        loss = stack(x).square().mean()
        loss.backward()
        grads = [x.grad, *(parameter.grad for parameter in stack.parameters())]
        if step:
            torch.optim.SGD(stack.parameters(), lr=1e-2).step()
            assert stack(x).square().mean() < loss
        return grads

    plain = gradients(memory=rg.Keep())
    for memory in (rg.Reverse(), rg.Anchor(every=2), rg.Budget("50%")):
        for ours, theirs in zip(gradients(memory=memory, step=True), plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    kept, exact = (
        gradients(memory=rg.Keep(), exact=True),
        gradients(memory=rg.Reverse(), exact=True),
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(exact, kept, strict=True))


def compat_trains(torch, rg):
    stack = rg.compat.reformer.ReversibleSequence(
        [(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(3)]
    )
    x = torch.randn(2, 5, 8)
    stack(torch.cat((x, x), dim=-1)).sum().backward()
    assert all(parameter.grad is not None for parameter in stack.parameters())


def commands_answer():
    program = str(Path(sysconfig.get_path("scripts")) / "retrograd")
    done = subprocess.run([program, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "check" in done.stdout and "plan" in done.stdout
    done = subprocess.run([program, "info"], capture_output=True, text=True)
    assert done.returncode == 0 and "torch" in done.stdout, done.stderr


if __name__ == "__main__":
    main()
