"""Files that commands write."""

from pathlib import Path

from jax_intranode._src.commands import WrongInput


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
