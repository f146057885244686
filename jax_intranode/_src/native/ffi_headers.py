"""The version of XLA's foreign function interface (FFI) that a jaxlib has, from its headers."""

import re
from pathlib import Path


def version_in(include: Path) -> tuple[int, int]:
    """Returns the major and the minor version, from the directory of jaxlib's headers.

    Raises:
        ImportError: there is no such header, or it does not have the version.
    """
    header = include / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError as error:
        raise ImportError(
            f"jax_intranode: jaxlib's header {header} cannot be read: {error.strerror}. Install "
            "jaxlib anew."
        ) from error

    def number(name: str) -> int:
        match = re.search(rf"#define {name} (\d+)", text)
        if match is None:
            raise ImportError(f"jax_intranode: {header} does not define {name}.")
        return int(match.group(1))

    return number("XLA_FFI_API_MAJOR"), number("XLA_FFI_API_MINOR")
