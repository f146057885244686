"""Peer buffers: named memory that the ranks of a group share, for kernels of users.

The kernels are in a library of the user's, which is compiled against the headers in
`get_include()`. Its FFI handlers look a buffer up by its name. The HLO has no address, but this
name and a text for messages.
A buffer is allocated when it is made, by all processes together, and never at execution.
"""

import ctypes
import math
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_intranode._src.group import communicator, key_value_store, rendezvous, slabs
from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.group.agreed import native_ordinal
from jax_intranode._src.group.partition import Partition
from jax_intranode._src.health import call_sites
from jax_intranode._src.jax_private import trace_state
from jax_intranode._src.native import extension, ffi_headers
from jax_intranode._src.selection import config

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
# Buffers have a multiple of these bytes. CUDA IPC exports whole blocks of 2 MiB: what else lies in
# one would be exported, too.
_UNIT_BYTES = {"cpu": 32, "gpu": 2 << 20}
_FFI_PLATFORMS = {"cpu": "cpu", "gpu": "CUDA"}


def get_include() -> str:
    """The folder of the C++ headers for kernels of your own, ``jax_intranode/peer_ffi.h``.

    A library also needs XLA's headers, which are in ``jax.ffi.include_dir()``.

    Examples:
        >>> import os
        >>> os.listdir(os.path.join(jax_intranode.get_include(), "jax_intranode"))  # doctest: +SKIP
        ['device.h', 'peer.h', 'peer_ffi.h', 'peer_types.h']
    """
    return str(Path(__file__).parents[2] / "include")


@dataclass(frozen=True, eq=False)
class PeerBuffer:
    """Memory of one shape on each device of a group, which all ranks of the group can access.

    It is not a ``jax.Array``, because XLA takes arrays for immutable. `peer_buffer` makes it.

    Attributes:
        name: the name by which handlers look it up.
        shape: the shape on each device.
        dtype: the type of an element.
        axis_names: the mesh axes over which the ranks of a group lie.
        mesh: the mesh.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axis_names: tuple[str, ...]
    mesh: jax.sharding.Mesh
    _rendezvous: Any = field(repr=False)
    _data: dict[int, int] = field(repr=False)  # address of the data, by local device id

    @property
    def nbytes(self) -> int:
        """Bytes on each device."""
        return _nbytes(self.shape, self.dtype)

    @property
    def world_size(self) -> int:
        """Number of ranks of a group."""
        return math.prod(self.mesh.shape[axis] for axis in self.axis_names)

    @property
    def closed(self) -> bool:
        """Whether `close` or ``shutdown`` has ended it."""
        return not any(
            each is self._rendezvous and each.peer_buffers.get(self.name) is self
            for each in rendezvous.all_rendezvous()
        )

    def ffi_call(
        self,
        target: str,
        result_shape_dtypes: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
        *,
        vmap_method: str | None = None,
        input_output_aliases: Mapping[int, int] | None = None,
    ) -> Callable[..., Any]:
        """A function that calls a handler on this buffer; to be called inside ``shard_map``.

        It is ``jax.ffi.ffi_call`` with two more attributes, which name the buffer and the call
        site. The handler's ``Bind()`` reads them. All ranks of a group must call it equally
        often and in the same order. The rank of a device is its position along `axis_names` in the
        mesh of the buffer, so the mesh of ``shard_map`` must have the same devices in the same
        order. It has no gradient of its own: see ``jax.custom_vjp``.

        Args:
            target: the name under which `register_ffi_library` has registered the handler.
            result_shape_dtypes: ``jax.ShapeDtypeStruct`` of the result, or a sequence of them.
                Results vary over the axes of the buffer, and over those of the operands.
            vmap_method: as in ``jax.ffi.ffi_call``.
            input_output_aliases: as in ``jax.ffi.ffi_call``.

        Returns:
            A function of the operands, by position, and the handler's attributes, by keyword.

        Raises:
            ValueError: the buffer is closed, an axis is not bound here, or has another size than
                in the mesh of the buffer. The returned function raises it.
        """

        def call(*operands: Any, **attributes: Any) -> Any:
            self._check_call(target)
            types = [jax.typeof(x) for x in operands]
            site = " ".join([target, self.name, *(t.str_short() for t in types)])
            call_sites.describe_site(site, f"{target} on the peer buffer {self.name!r}", types)
            extension.module("cpu").lower_peer_site(site, self.name)
            over: frozenset[Any] = frozenset()
            if trace_state.check_vma():
                over = over.union(self.axis_names, *(t.manual_axis_type.varying for t in types))
            results = jax.tree.map(lambda r: _varying(r, over), result_shape_dtypes)
            return jax.ffi.ffi_call(
                target,
                results,
                vmap_method=vmap_method,
                input_output_aliases=dict(input_output_aliases or {}),
            )(*operands, peer_buffer=self.name, site=site, **attributes)

        return call

    def read(self) -> dict[int, np.ndarray[Any, Any]]:
        """The contents on the devices of this process, by device id. For tests.

        It does not wait for earlier calls: block on their results first.

        Raises:
            ValueError: the buffer is closed.
        """
        self._check_open()
        return {
            device_id: np.frombuffer(
                self._module.read_bytes(self._ordinal(device_id), address, self.nbytes), self.dtype
            ).reshape(self.shape)
            for device_id, address in self._data.items()
        }

    def write(self, values: ArrayLike | Mapping[int, ArrayLike]) -> None:
        """Sets the contents on the devices of this process. For tests.

        No call may run on the buffer meanwhile, on any rank.

        Args:
            values: what `read` returns, of some of the devices; or one array for all of them.

        Raises:
            ValueError: the buffer is closed, an array has another shape or dtype, or a device is
                none of this process's.
        """
        self._check_open()
        if not isinstance(values, Mapping):
            values = dict.fromkeys(self._data, values)
        arrays = {device_id: np.asarray(value) for device_id, value in values.items()}
        for device_id, array in arrays.items():
            if device_id not in self._data:
                raise ValueError(
                    f"{self}: device {device_id!r} has no part of it in this process; these have: "
                    f"{list(self._data)}"
                )
            if array.shape != self.shape or array.dtype != self.dtype:
                raise ValueError(
                    f"{self}: got {array.dtype}{list(array.shape)} for device {device_id}; pass an "
                    "array of the buffer's shape and dtype"
                )
        for device_id, array in arrays.items():
            self._module.write_bytes(
                self._ordinal(device_id), self._data[device_id], array.tobytes()
            )

    def close(self) -> None:
        """Ends the buffer in this process. Programs that use it raise from then on.

        Block on the results of these programs first. All processes must close the buffer before
        its name is used again. The memory is freed when the last of the programs is gone. To close
        a buffer again does nothing.
        """
        with rendezvous.lock:
            if not self.closed:
                del self._rendezvous.peer_buffers[self.name]
                self._module.close_peer_buffer(self.name)

    def __str__(self) -> str:
        return f"the peer buffer {self.name!r} of {self.dtype}{list(self.shape)}"

    @property
    def _module(self) -> Any:
        return extension.module(self._rendezvous.platform)

    def _ordinal(self, device_id: int) -> int:
        return native_ordinal(self._rendezvous.devices[device_id])

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self} is closed; make it again with jax_intranode.peer_buffer")

    def _check_call(self, target: str) -> None:
        self._check_open()
        where = f"{target} on {self}"
        for axis in self.axis_names:
            if not trace_state.axis_is_bound(axis):
                raise ValueError(
                    f"{where}: the axis {axis!r} is not bound here; call it inside jax.shard_map "
                    "over this axis"
                )
            size, here = self.mesh.shape[axis], jax.lax.axis_size(axis)
            if here != size:
                raise ValueError(
                    f"{where}: the axis {axis!r} has {here} devices here, and {size} in the mesh "
                    "of the buffer; use the same mesh"
                )
        mesh = trace_state.set_mesh() or trace_state.eager_mesh()
        if mesh is not None and list(mesh.devices.flat) != list(self.mesh.devices.flat):
            raise ValueError(
                f"{where}: the mesh has other devices here, or in another order, than the mesh of "
                "the buffer; use the same mesh"
            )


def peer_buffer(
    name: str,
    shape: Sequence[int],
    dtype: DTypeLike,
    axis_name: str | Sequence[str],
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> PeerBuffer:
    """Makes named memory that kernels of your own share with their peers.

    Every device of the mesh gets zeroed memory of this shape. The ranks of a group, which lie along
    `axis_name`, can read and write each other's. All processes of the mesh must call it, with the
    same arguments and in the same order, before a program that uses the buffer is compiled or
    loaded. It blocks until they have, for at most JAX_INTRANODE_TIMEOUT_S, and at most 5 minutes.
    Groups are those that ``psum`` over the same axes has: 2 to 8 devices of one host.

    JAX_INTRANODE_PEER_BUFFERS_MIB limits the buffers of each set of devices. ``shutdown`` ends all.
    A second call with the same arguments returns the same buffer.

    Args:
        name: letters, digits, and ``_.-``; at most 100.
        shape: the shape on each device.
        dtype: the type of an element: any of NumPy's or JAX's with a fixed size.
        axis_name: a mesh axis or several.
        mesh: the mesh; by default, that of ``jax.set_mesh``.

    Returns:
        The buffer. `PeerBuffer.ffi_call` calls a handler on it.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument has a wrong value, another buffer has the name, or there is no room
            for it.
        RuntimeError: the devices can't share memory, or a process did not make the same buffer;
            the text says why.
        CommunicationError: an operation on these devices has failed before.

    Examples:
        >>> buffer = jax_intranode.peer_buffer("mine", (4, 2), jnp.uint32, "model", mesh=mesh)
        >>> buffer.world_size, buffer.nbytes
        (2, 32)
        >>> buffer.close()
    """
    mesh = _mesh(mesh)
    axes = _axes(axis_name, mesh)
    shape, dtype = _shape(shape), _dtype(dtype)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"peer_buffer: name is {name!r}; use 1 to 100 letters, digits, and the signs _ . -"
        )
    where = f"peer_buffer({name!r})"
    if _nbytes(shape, dtype) == 0:
        raise ValueError(f"{where}: shape is {list(shape)}; a buffer needs at least one element")
    partition = partition_lib.partition(mesh, tuple(axes))
    if partition.group_size == 1:
        raise ValueError(f"{where}: the axes {axes} have one device; a group needs 2 to 8")
    agreed = rendezvous.rendezvous_of(mesh.devices.flat)
    reason = agreed.reason or communicator.communicator(agreed, partition)
    if reason is not None:
        raise RuntimeError(f"{where}: these devices can't share memory: {reason}")
    with rendezvous.lock:
        found = _open_buffer(name)
        if found is not None:
            same = (found.shape, found.dtype, found.axis_names) == (shape, dtype, axes)
            if same and found.mesh == mesh:
                return found
            raise ValueError(f"{where}: there is {found} already; close it first")
        _check_room(where, agreed, shape, dtype)
        try:
            data = _make(agreed, partition, name, shape, dtype)
        except key_value_store.Refused as refusal:
            raise RuntimeError(f"{where}: {refusal}") from None
        made = PeerBuffer(name, shape, dtype, axes, mesh, agreed, data)
        agreed.peer_buffers[name] = made
        return made


def register_ffi_library(
    path: str | os.PathLike[str], targets: Mapping[str, str], *, platform: str
) -> None:
    """Loads a library of handlers for peer buffers, and registers them with XLA.

    Do this before a program that calls one of them is compiled or loaded. A registration lasts as
    long as the process.

    Args:
        path: the shared library.
        targets: for each name that `PeerBuffer.ffi_call` is to take, the symbol of the handler,
            which JAX_INTRANODE_PEER_HANDLER has defined.
        platform: "cpu" or "gpu": for which the library was compiled.

    Raises:
        ValueError: an argument has a wrong value, the library has no such symbol, or it was
            compiled with another version of the headers, or for another platform.
        OSError: the library can't be loaded.
    """
    where = f"register_ffi_library({os.fspath(path)!r})"
    if platform not in _FFI_PLATFORMS:
        raise ValueError(f"{where}: platform is {platform!r}; use 'cpu' or 'gpu'")
    module = extension.module(platform)
    if module is None:
        raise ValueError(f"{where}: jax_intranode was built without CUDA kernels")
    for target in targets:
        if not _NAME.fullmatch(target):
            raise ValueError(
                f"{where}: the target is {target!r}; use letters, digits, and the signs _ . -"
            )
    library = ctypes.CDLL(os.fspath(path))
    entry = _symbol(library, "jax_intranode_peer_library")
    if entry is None:
        raise ValueError(
            f"{where}: the library has no JAX_INTRANODE_PEER_LIBRARY(); add it to one of its "
            "files, after #include <jax_intranode/peer_ffi.h>"
        )
    try:
        runtime = ffi_headers.version_in(Path(jax.ffi.include_dir()))
        module.add_peer_library(entry, runtime)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    handlers = {target: _symbol(library, symbol) for target, symbol in targets.items()}
    for target, address in handlers.items():
        if address is None:
            raise ValueError(
                f"{where}: the library exports no {targets[target]}; "
                "JAX_INTRANODE_PEER_HANDLER defines handlers"
            )
    for target, address in handlers.items():
        stages = {
            "instantiate": module.peer_instantiate(),
            "execute": jax.ffi.pycapsule(ctypes.c_void_p(address)),
        }
        jax.ffi.register_ffi_target(target, stages, platform=_FFI_PLATFORMS[platform])
    _libraries.append(library)


_libraries: list[ctypes.CDLL] = []  # never closed: XLA keeps the handlers


def _symbol(library: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError:
        return None


def _varying(result: Any, over: frozenset[Any]) -> jax.ShapeDtypeStruct:
    """The type of a result that varies over these axes."""
    if not over:
        return jax.ShapeDtypeStruct(result.shape, result.dtype)
    here = jax.sharding.get_abstract_mesh()
    return jax.ShapeDtypeStruct(
        result.shape,
        result.dtype,
        sharding=jax.sharding.NamedSharding(here, jax.P(*[None] * len(result.shape))),
        manual_axis_type=jax.sharding.ManualAxisType(varying=over),
    )


# Arguments.


def _mesh(mesh: jax.sharding.Mesh | None) -> jax.sharding.Mesh:
    mesh = mesh if mesh is not None else trace_state.set_mesh() or trace_state.mesh_of_with()
    if mesh is None:
        raise ValueError("peer_buffer: no mesh is set; pass mesh=, or call jax.set_mesh before")
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"peer_buffer: mesh is {mesh!r}; pass a jax.sharding.Mesh")
    return mesh


def _axes(axis_name: str | Sequence[str], mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    unknown = [axis for axis in axes if axis not in mesh.axis_names]
    if unknown or not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"peer_buffer: axis_name is {axis_name!r}; name one or several of the mesh's axes, "
            f"each once: {list(mesh.axis_names)}"
        )
    return axes


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise TypeError(f"peer_buffer: shape is {shape!r}; pass a sequence of sizes")
    return sizes


def _dtype(dtype: Any) -> np.dtype[Any]:
    try:
        found = jax.numpy.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.hasobject or found.itemsize == 0:
        raise TypeError(f"peer_buffer: dtype is {dtype!r}; pass a dtype of a fixed size")
    return found


def _nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize


# Making.


def _open_buffer(name: str) -> PeerBuffer | None:
    for each in rendezvous.all_rendezvous():
        if name in each.peer_buffers:
            return each.peer_buffers[name]
    return None


def _check_room(where: str, agreed: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Refuses a buffer that is too large beside those on the same devices.

    Every process finds the same, because all make the same buffers of a mesh in the same order.
    """
    limit = config.get().peer_buffers_mib << 20
    taken = sum(_counted(agreed.platform, each.nbytes) for each in agreed.peer_buffers.values())
    wanted = _counted(agreed.platform, _nbytes(shape, dtype))
    if taken + wanted > limit:
        raise ValueError(
            f"{where}: {wanted} bytes on each device, and {taken} in other buffers, are more than "
            f"JAX_INTRANODE_PEER_BUFFERS_MIB={config.get().peer_buffers_mib} allows; raise it, or "
            "close a buffer"
        )


def _allocated(platform: str, nbytes: int) -> int:
    """Bytes on each device that a buffer of `nbytes` takes, its header included."""
    unit = _UNIT_BYTES[platform]
    return -(-(extension.module(platform).PEER_HEADER_BYTES + nbytes) // unit) * unit


def _counted(platform: str, nbytes: int) -> int:
    """What it takes of JAX_INTRANODE_PEER_BUFFERS_MIB: on the CPU its data only."""
    return nbytes if platform == "cpu" else _allocated(platform, nbytes)


def _make(
    agreed: Any, partition: Partition, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> dict[int, int]:
    """Allocates a buffer in all processes; returns the address of the data of each local device.

    Every step ends with an exchange.

    Raises:
        Refused: there is no buffer, on any process.
    """
    module = extension.module(agreed.platform)
    deadline = key_value_store.Deadline(config.get().meeting_s)
    made = agreed.peer_buffers_made[name] = agreed.peer_buffers_made.get(name, 0) + 1
    prefix = f"peer_buffer/{name}/{made}/"
    nbytes = _allocated(agreed.platform, _nbytes(shape, dtype))
    owners: list[Any] = []

    def allocate(local: list[int], shared: bool) -> tuple[dict[int, Any], int]:
        ordinals = {i: native_ordinal(agreed.devices[i]) for i in local}
        return {i: module.allocate(n, nbytes, shared) for i, n in ordinals.items()}, nbytes

    # What is made must be the same everywhere.
    wanted = f"{dtype.name}{list(shape)} for groups {partition.groups()}"
    for process, text in enumerate(agreed.exchange(f"{prefix}what", lambda: wanted, deadline)):
        if text != wanted:
            raise key_value_store.Refused(
                f"process {process} of the mesh makes {text}, this one {wanted}"
            )
    own, addresses = slabs.share(agreed, prefix, deadline, allocate, owners)
    records = {i: memory.records for i, memory in own.items()}
    module.create_peer_buffer(
        name,
        list(partition.device_ids),
        partition.group_size,
        communicator.members_of(agreed, partition, addresses, records),
        -(-_nbytes(shape, dtype) // 32) * 32,
        config.get().wait_s,
        owners,
    )
    return {i: own[i].address + module.PEER_HEADER_BYTES for i in own}
