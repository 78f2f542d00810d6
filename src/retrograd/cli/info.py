"""`retrograd info`: versions and devices, for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform

Fact = str | int | list[str] | dict[str, str] | None

# Packages that retrograd is used with or measured against.
PACKAGES = (
    "numpy",
    "matplotlib",
    "safetensors",
    "rich",
    "transformers",
    "lightning",
    "accelerate",
    "peft",
    "deepspeed",
    "triton",
    "revtorch",
    "memcnn",
    "revlib",
    "reformer-pytorch",
)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    info = commands.add_parser(
        "info", help="versions and devices, for a bug report", description="Versions and devices."
    )
    info.add_argument("--json", action="store_true", help="print them as JSON, and nothing else")
    info.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    found = facts()
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        width = max(map(len, found))
        print("\n".join(f"{name:<{width}}  {_text(value)}" for name, value in found.items()))
    return 0


def facts() -> dict[str, Fact]:
    import torch

    import retrograd

    return {
        "retrograd": retrograd.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "CPU": torch.backends.cpu.get_cpu_capability(),
        "devices": devices(),
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "distributed": _backends(),
        "packages": _versions(),
    }


def devices() -> list[str]:
    """The accelerators, such as `cuda:0 NVIDIA A100, 79.2 GiB`."""
    import torch

    if not torch.accelerator.is_available():
        return []
    kind = str(torch.accelerator.current_accelerator())
    module = torch.get_device_module(kind)
    found = []
    for i in range(torch.accelerator.device_count()):
        properties = None
        if hasattr(module, "get_device_properties"):
            properties = module.get_device_properties(i)
        name = getattr(properties, "name", "")
        memory = getattr(properties, "total_memory", None)
        size = f", {memory / 2**30:.1f} GiB" if memory else ""
        found.append(f"{kind}:{i} {name}{size}")
    return found


def _backends() -> list[str]:
    """The backends of torch.distributed."""
    import torch.distributed as dist

    if not dist.is_available():
        return []
    checks = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
    }
    return [name for name, is_available in checks.items() if is_available()]


def _versions() -> dict[str, str]:
    """The versions of those `PACKAGES` that are installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _text(value: Fact) -> str:
    if isinstance(value, dict):
        value = [f"{name} {version}" for name, version in value.items()]
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value)
