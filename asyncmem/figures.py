"""How quantities are printed: every number that a person reads has a unit."""

_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SHORT_UNITS = ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (60.0, 1.0, "s"))


def format_size(nbytes: int) -> str:
    """Print a number of bytes in the largest binary unit it fills: "512 B", "64 MiB", "1.50 GiB".

    Whole numbers of the unit have no decimals, so a size that was written by hand comes back as it was written.
    """
    sign, rest = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    power = min(max(rest.bit_length() - 1, 0) // 10, len(_SIZE_UNITS) - 1)
    whole, remainder = divmod(rest, 1 << (10 * power))
    number = f"{rest / (1 << (10 * power)):.2f}" if remainder else f"{whole}"
    return f"{sign}{number} {_SIZE_UNITS[power]}"


def format_duration(seconds: float) -> str:
    """Print a time span in the unit that reads best: "340 ns", "1.2 ms", "12 s", "2 min 5 s", "3 h 10 min"."""
    if seconds == 0:
        return "0 s"
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    for below, scale, unit in _SHORT_UNITS:
        # Rounding comes first: 59.96 s is "1 min", not "60 s".
        if float(f"{seconds:.3g}") < below:
            return f"{_three_digits(seconds * scale)} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def format_share(share: float) -> str:
    """Print a share between 0 and 1 as a percentage: "80%", "99.5%"."""
    return f"{share * 100:.1f}".removesuffix(".0") + "%"


def format_count(number: int, noun: str, plural: str | None = None) -> str:
    """Print a count with its noun: "1 request", "12,000 requests"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"
