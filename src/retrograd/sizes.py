"""Bytes as people read them. Always in binary units: B, KiB, MiB, GiB."""

MIB = 2**20


def human(bytes_: float) -> str:
    """A size to print: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if bytes_ < 1024:
            return f"{bytes_:.3g} {unit}"
        bytes_ /= 1024
    return f"{bytes_:.3g} GiB"
