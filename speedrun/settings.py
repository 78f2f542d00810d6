"""The settings of a run: everything that decides its numbers, stored as `configuration.json`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from pathlib import Path

import retrograd as rg
from retrograd.budget import human
from retrograd.files import open_regular, write_whole
from speedrun.model import Config

DTYPES = ("float32", "bfloat16")
MAY_CHANGE = ("data", "steps", "save_every", "shard")  # in a run that is resumed


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of `python -m speedrun train`."""

    data: str | None = None  # a file or a folder; None: Python's standard library
    depth: int = 48
    width: int = 64
    heads: int = 4
    context: int = 128
    batch: int = 8  # sequences per step, over all processes
    accumulate: int = 1  # parts that a batch is split into, one after another
    steps: int = 300
    lr: float = 3e-3
    warmup: int = 30
    decay: float = 0.1  # weight decay
    clip: float = 1.0
    dropout: float = 0.0
    dtype: str = "float32"  # bfloat16: autocast
    memory: str = "reverse"  # or keep, or a size
    exact: bool = False
    compile: bool = False
    shard: bool = False  # weights, gradients and optimizer over all processes (FSDP2)
    seed: int = 0
    save_every: int = 50
    fingerprint: str = ""  # of the text, which must not change before a run is resumed

    def __post_init__(self) -> None:
        self._check_types()
        self.config()  # raises for shapes that do not fit
        self.memory_mode()
        for name in ("batch", "accumulate", "steps", "save_every"):
            self._require(name, getattr(self, name) >= 1, "must be at least 1.")
        divides = self.batch % self.accumulate == 0
        self._require("accumulate", divides, f"does not divide the batch of {self.batch}.")
        self._require("dtype", self.dtype in DTYPES, f"must be {' or '.join(DTYPES)}.")
        self._require("lr", 0 < self.lr < math.inf, "must be a number above 0, such as 3e-3.")
        self._require("dropout", 0 <= self.dropout < 1, "must be at least 0 and below 1.")
        self._require("seed", 0 <= self.seed < 2**31, "must be at least 0 and below 2**31.")
        self._require("warmup", self.warmup >= 0, "must not be below 0.")
        self._require("decay", 0 <= self.decay < math.inf, "must be a number, at least 0.")
        self._require("clip", 0 < self.clip < math.inf, "must be a number above 0.")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_small = not isinstance(value, int) or value < 2**31
            self._require(field.name, is_small, "must be below 2**31.")

    def _check_types(self) -> None:
        """Whether each setting has the type of its default, as those of a file may not."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kinds = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
            allowed = kinds.get(str(field.type), (str, type(None)))
            is_bool = isinstance(value, bool)
            if not isinstance(value, allowed) or is_bool != (bool in allowed):
                raise ValueError(f"{field.name} is {value!r:.50}, not {field.type}.")

    def _require(self, name: str, holds: bool, message: str) -> None:
        if not holds:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: {message}")

    def config(self) -> Config:
        """The shape of the model."""
        return Config(
            depth=self.depth,
            width=self.width,
            heads=self.heads,
            context=self.context,
            dropout=self.dropout,
        )

    def memory_mode(self) -> rg.Reverse | rg.Keep | rg.Budget:
        """The memory mode that `memory` stands for."""
        if self.memory == "reverse":
            return rg.Reverse()
        if self.memory == "keep":
            return rg.Keep()
        return rg.Budget(self.memory)

    def check_memory(self) -> None:
        """Raise `ValueError` if such a model cannot be trained in the memory of this machine."""
        needed = self._least_bytes()
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > there:
            raise ValueError(
                f"such a model needs more than {human(needed)}, and this machine has "
                f"{human(there)}: use a smaller --width, --depth, --batch or --context."
            )

    def _least_bytes(self) -> int:
        """A lower bound of the memory that training needs: weights, gradients, moments, a batch."""
        width = self.width
        parameters = 256 * width + self.depth * 12 * width**2
        modules = self.depth * 2**14  # an empty layer takes more
        sequences = self.batch * self.context * 8
        streams = self.batch // self.accumulate * self.context * width * 4 * 2
        return 4 * 4 * parameters + modules + sequences + streams

    def digest(self) -> str:
        """A hash of the settings that decide the numbers of a step."""
        facts = dataclasses.asdict(self)
        lasting = {name: value for name, value in facts.items() if name not in MAY_CHANGE}
        return hashlib.sha256(json.dumps(lasting).encode()).hexdigest()

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Settings:
        """The settings in a file. Raises `ValueError` if it is not one of settings."""
        with open_regular(path) as file:
            content = file.read()
        try:
            found = json.loads(content)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if not isinstance(found, dict):
            raise ValueError(f"it has {type(found).__name__}, not settings by name")
        names = {field.name for field in dataclasses.fields(cls)}
        for name in found.keys() ^ names:
            raise ValueError(f"{name!r:.50} is {'missing' if name in names else 'no setting'}")
        return cls(**found)
