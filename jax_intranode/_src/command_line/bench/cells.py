"""Numbers as the tables show them."""


def optional(value: float | None, width: int) -> str:
    """Formats a number with two decimals; "-" for None."""
    return f"{'-':>{width}}" if value is None else f"{value:{width}.2f}"


def shipped_text(choice: str | None, time: str) -> str:
    """Returns the end of a row: what runs without JAX_INTRANODE_TUNING, and its time.

    Args:
        choice: what runs; None if the variable is not set.
        time: its time as text.
    """
    return "" if choice is None else f" | shipped: {choice:>14} {time}"


def milliseconds(us: float | None) -> str:
    """Formats a time in microseconds as milliseconds, eight columns wide; "-" for None."""
    return f"{'-':>8}" if us is None else f"{us / 1e3:8.3f}"
