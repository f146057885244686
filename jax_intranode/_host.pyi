"""Slabs and groups of jax_intranode on the CPU."""

from collections.abc import Sequence

FFI_API_VERSION: tuple = (0, 3)

HEADER_BYTES: int = 65536

RECORD_BYTES: int = 0

ALGORITHMS: tuple = ...

DTYPES: tuple = ...

FAILURE_REASONS: dict = ...

MAX_WORLD_SIZE: int = 8

MAX_BUFFERS: int = 128

PACK_BYTES: int = 16

def packet_bytes(algorithm: str, dtype: str) -> int:
    """Bytes of the packet that carries PACK_BYTES of data."""

def epoch_buffer_bytes_needed(algorithm: str, dtype: str, nbytes: int, world_size: int) -> int:
    """Bytes of an epoch buffer that an operation takes."""

def failure_message(
    reason: int,
    algorithm: int,
    timeout_s: float,
    device_ids: Sequence[int],
    rank: int,
    missing: int,
    ordinal: int,
) -> str:
    """The message of a kernel that gave up."""

TILE_ROWS: int = 128

TILE_DEPTH: int = 64

TILE_COLUMNS: tuple = (128, 192, 224, 256)

WGRAD_COLUMNS: int = 256

MAX_MATRICES: int = 4

MAX_PIECES: int = 16

MIN_SLOTS: int = 4

MAX_RANKS_IN_STEP: int = 4

CHUNK_BYTES: int = 16384

PLAN_FIELDS: tuple = ...

def has_fused_kernel(operation: str, tile_columns: int, wgrad: bool) -> bool:
    """Whether a fused kernel is compiled for this width of tiles."""

def ring_data_offset(ring_bytes: int) -> int:
    """Bytes of a ring buffer before its data: the header and the flags."""

class Memory:
    @property
    def records(self) -> int:
        """Failure records: handlers on the CPU return their errors themselves."""

    @property
    def address(self) -> int: ...
    def handle(self) -> bytes:
        """What another process needs to open this memory."""

    def unlink(self) -> None:
        """Removes the name, once every peer has opened it."""

def allocate(device: int, bytes: int, shared: bool) -> Memory:
    """Allocates zeroed memory."""

def open(device: int, handle: bytes, bytes: int) -> Memory:
    """Opens a peer's memory."""

def enable_peer_access(device: int, peer: int) -> None: ...
def fill(device: int, address: int, value: int, bytes: int) -> None: ...
def write_word(device: int, address: int, value: int) -> None: ...
def read_word(device: int, address: int) -> int: ...
def load_kernels(device: int) -> None: ...
def create_communicator(
    device_ids: Sequence[int],
    group_size: int,
    members: Sequence[tuple[int, int, int, Sequence[int], int]],
    epoch_buffer_bytes: int,
    timeout_s: float,
    memory: Sequence[Memory],
) -> None: ...
def close() -> None:
    """Ends all communicators: programs that use them raise."""

def operations() -> int:
    """Operations that the devices of this process have executed."""

def failures() -> list:
    """
    Failure records of kernels; on the CPU handlers return their errors themselves.
    """

def end_compilation() -> None:
    """To be called whenever a program has been compiled."""

def handler_calls() -> int:
    """How often XLA has called a handler in this process."""

def registrations() -> dict:
    """FFI targets: name to handlers by stage."""
