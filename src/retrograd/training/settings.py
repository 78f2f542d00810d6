"""What a run is: everything that decides its numbers, in one frozen record that is stored
as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from retrograd.budget import Budget
from retrograd.core.memory import Keep, Reverse
from retrograd.files import write_whole
from retrograd.models.lm import Config

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of `retrograd train`."""

    data: str | None = None  # a file or a folder; None: Python's own library
    depth: int = 48
    width: int = 64
    heads: int = 4
    context: int = 128
    batch: int = 8  # stretches of text a step, of all processes together
    accumulate: int = 1  # in so many pieces, one after another
    steps: int = 300
    lr: float = 3e-3
    warmup: int = 30
    decay: float = 0.1  # of weights
    clip: float = 1.0
    dropout: float = 0.0
    dtype: str = "float32"  # bfloat16: autocast
    memory: str = "reverse"  # keep, or a size
    exact: bool = False
    compile: bool = False
    shard: bool = False  # weights, gradients and optimizer over all processes
    seed: int = 0
    save_every: int = 50
    fingerprint: str = ""  # of the text, which must be the same when a run is taken up again

    def __post_init__(self) -> None:
        self.config()  # raises for shapes that cannot be
        self.choice()
        for name in ("batch", "accumulate", "steps", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: one at least.")
        if self.batch % self.accumulate:
            raise ValueError(
                f"--accumulate {self.accumulate}: does not divide the batch of {self.batch}."
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype}: there are {' and '.join(DTYPES)}.")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"--lr {self.lr}: a number above 0, such as 3e-3.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout {self.dropout}: at least 0 and below 1.")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"--seed {self.seed}: at least 0 and below 2**31.")
        if self.warmup < 0:
            raise ValueError(f"--warmup {self.warmup}: not below 0.")

    def config(self) -> Config:
        return Config(
            depth=self.depth,
            width=self.width,
            heads=self.heads,
            context=self.context,
            dropout=self.dropout,
        )

    def choice(self) -> Any:
        """What `memory` says, as the stack takes it."""
        if self.memory in ("reverse", "keep"):
            return Reverse() if self.memory == "reverse" else Keep()
        return Budget(self.memory)

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Settings:
        return cls(**json.loads(path.read_text()))
