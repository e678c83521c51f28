"""How a comparison writes its figures: times, bytes, means, and lines of cells as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def aligned(lines: Sequence[Sequence[str]], numbers: Sequence[bool]) -> str:
    """Return lines of cells, the head first, as a Markdown table. `numbers`: which columns are those."""
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    adjust: list[Callable[[str, int], str]] = [str.rjust if number else str.ljust for number in numbers]
    rows = [
        "| " + " | ".join(a(c, w) for a, c, w in zip(adjust, line, widths, strict=True)) + " |"
        for line in lines
    ]
    rule = ["-" * (w - 1) + ":" if number else "-" * w for number, w in zip(numbers, widths, strict=True)]
    return "\n".join([rows[0], "| " + " | ".join(rule) + " |", *rows[1:]]) + "\n"


def dash(value: float | None, form: str | Callable[[float], str]) -> str:
    """Write a value by a format or a function, None as a dash."""
    if value is None:
        return "-"
    return form.format(value) if isinstance(form, str) else form(value)


def plus_minus(value: float | None, deviation: float | None) -> str:
    """Write `90.00 ± 1.00`, or what of it is known."""
    return dash(value, "{:.2f}") + ("" if deviation is None else f" ± {deviation:.2f}")


def size(nbytes: float) -> str:
    """Write bytes as `512 B`, `3.07 MB` or `1.64 GB`, by powers of 1000."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """Write seconds as `8.3s`, `21s`, `2m36s` or `1h02m`."""
    if round(seconds, 1) < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
