"""Texts from outside, as messages quote them."""

_MOST_CHARACTERS = 500


def shown(value: object) -> str:
    """The text of a value in a line: cut, and with ? for what a terminal might obey."""
    text = str(value)
    rest = "..." if len(text) > _MOST_CHARACTERS else ""
    return "".join(c if c.isprintable() else "?" for c in text[:_MOST_CHARACTERS]) + rest
