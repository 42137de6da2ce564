"""How commands say errors and numbers."""

from __future__ import annotations


def error_line(command: str, error: Exception) -> str:
    """What a command says of an error, on one line."""
    return f"{command}: error: {' '.join(str(error).split())}"


def plural(number: int, one: str, many: str) -> str:
    """A number and its noun."""
    return f"{number} {one if number == 1 else many}"


def size_text(number: int) -> str:
    """Bytes in units of 1024, three digits."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(number, 1).bit_length() - 1, 49) // 10
    return f"{number / 1024**power:.3g} {units[power]}"
