"""Bytes as people read them. Always in binary units: B, KiB, MiB, GiB."""

MIB = 2**20


def human(bytes_: float) -> str:
    """A size to print: `1.5 MiB`."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if bytes_ < 1024:
            break
        bytes_, unit = bytes_ / 1024, larger
    return f"{bytes_:.0f} {unit}" if bytes_ >= 1000 else f"{bytes_:.3g} {unit}"
