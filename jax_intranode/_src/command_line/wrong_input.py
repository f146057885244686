"""What a user has asked for on the command line, and cannot be served."""

from pathlib import Path


class WrongInput(ValueError):
    """The message is one line; the command line shows it without a traceback."""


def check_writable(option: str, file: Path) -> None:
    """Raises WrongInput if a file cannot be written, before anything takes time.

    Args:
        option: the option that named it.
        file: the file.
    """
    directory = file.absolute().parent
    if file.is_dir():
        raise WrongInput(f"{option} {file}: this is a directory: name a file")
    if not directory.is_dir():
        raise WrongInput(
            f"{option} {file}: there is no directory {directory}: make it, or choose another"
        )
