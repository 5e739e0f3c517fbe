"""The memory of the hosts, as a place for arrays that a device need not hold all the time.

Arrays there have the memory kind `HOST`; `jax.device_put` moves them to a device and back, also
inside of a compiled program, where XLA runs the copies beside the computation. CPU devices have the
kind as well, so that programs can be tried out; their memory is the host's either way.
"""

from collections.abc import Collection
from typing import Any

import jax
from jax.sharding import Mesh

from shardlib.errors import MeshError

HOST = "pinned_host"
DEVICE = "device"


def check_host_memory(mesh: Any, purpose: str) -> None:
    """Checks that the devices of a mesh can reach their hosts' memory.

    Args:
        mesh: A mesh; of an `AbstractMesh` nothing is known, and nothing is checked. None for the
            default devices.
        purpose: What needs it, as a noun phrase that starts the message.

    Raises:
        MeshError: If they cannot.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        return
    devices = list(mesh.devices.flat) if mesh is not None else jax.local_devices()
    # What a device can address is known to its own process only. Devices that a program is merely
    # compiled for belong to none.
    mine = [device for device in devices if device.process_index == jax.process_index()]
    device = (mine or devices)[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    fault = missing_host_memory(device.platform, kinds, purpose)
    if fault is not None:
        raise MeshError(fault)


def missing_host_memory(platform: str, kinds: Collection[str], purpose: str) -> str | None:
    """Returns why `purpose` cannot be had on a platform with these kinds of memory, or None."""
    if HOST in kinds:
        return None
    return (
        f"{purpose} needs {HOST} memory, but the {platform} devices of this mesh have "
        f"{', '.join(kinds) or 'none that is known'}.\n"
        "  Leave it out, or run on TPU, GPU or CPU."
    )
