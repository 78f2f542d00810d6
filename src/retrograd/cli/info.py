"""`retrograd info`: versions and devices, for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from typing import Any

# Those that retrograd is used with or measured against.
PACKAGES = (
    *(
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
    ),
    *("revtorch", "memcnn", "revlib", "reformer-pytorch"),
)


def add(commands: Any) -> None:
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


def facts() -> dict[str, Any]:
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
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


def devices() -> list[str]:
    import torch

    if not torch.accelerator.is_available():
        return []
    kind = str(torch.accelerator.current_accelerator())
    module = torch.get_device_module(kind)
    found = []
    for i in range(torch.accelerator.device_count()):
        properties = (
            module.get_device_properties(i) if hasattr(module, "get_device_properties") else None
        )
        memory = getattr(properties, "total_memory", None)
        size = f", {memory / 2**30:.1f} GiB" if memory else ""
        found.append(f"{kind}:{i} {getattr(properties, 'name', '')}{size}")
    return found


def _backends() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    names = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
    }
    return [name for name, is_available in names.items() if is_available()]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value)
