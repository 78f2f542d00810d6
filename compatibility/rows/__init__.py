"""Every row, by its key."""

from __future__ import annotations

from compatibility.rows import (
    basics,
    compiling,
    data_parallel,
    in_backward,
    model_parallel,
    nested,
    sharding,
    threads,
    trainers,
    transforms,
)
from compatibility.verdict import Row

_TOPICS = (
    basics.ROWS,
    data_parallel.ROWS,
    sharding.ROWS,
    sharding.CHECKPOINTS,
    model_parallel.ROWS,
    compiling.ROWS,
    nested.ROWS,
    transforms.FUNC,
    transforms.EXPORT,
    transforms.COPIES,
    in_backward.ROWS,
    trainers.ROWS,
    threads.ROWS,
)
ROWS: dict[str, Row] = {row.key: row for rows in _TOPICS for row in rows}
