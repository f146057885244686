"""Commands of `python -m jax_intranode` that look at an installation and a node."""


class WrongInput(Exception):
    """What a user has asked for cannot be served. The message is one line, without a traceback."""
