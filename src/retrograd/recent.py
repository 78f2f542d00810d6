"""`Recent`: a dict that forgets what was not asked for the longest time."""

from __future__ import annotations

from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(dict[Key, Value], Generic[Key, Value]):
    """Remembers up to `size` entries.

    Example:
        >>> recent = Recent(size=2)
        >>> for name in "aba":
        ...     _ = recent.find(name) or recent.add(name, name.upper())
        >>> recent.add("c", "C")
        'C'
        >>> list(recent)
        ['a', 'c']
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def find(self, key: Key) -> Value | None:
        """An entry, which is now the most recent one."""
        if key in self:
            self[key] = self.pop(key)
        return self.get(key)

    def add(self, key: Key, value: Value) -> Value:
        self[key] = value
        while len(self) > self.size:
            del self[next(iter(self))]
        return value
