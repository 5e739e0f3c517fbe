"""Host memory for arrays that a device does not need all the time.

Such arrays have the memory kind `HOST`. `jax.device_put` moves them to a device and back, also
inside a compiled program, where XLA overlaps the copies with computation. CPU devices have the
memory kind too, so that programs can be tried out; their memory is host memory either way.
"""

from collections.abc import Collection

import jax
from jax.sharding import AbstractMesh, Mesh

from shardlib.errors import MeshError

HOST = "pinned_host"
DEVICE = "device"


def check_host_memory(
    mesh: Mesh | AbstractMesh | None, purpose: str, *, on_absent_gpus: bool = False
) -> None:
    """Checks that the devices of a mesh can access the memory of their hosts.

    Args:
        mesh: A mesh. An `AbstractMesh` has no known memory and is not checked. None for the default
            devices.
        purpose: The feature that needs it, as a noun phrase that starts the message.
        on_absent_gpus: Whether XLA compiles it for GPUs that are not attached. They name no memory,
            but all GPUs have it.

    Raises:
        MeshError: If they cannot.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        return
    devices = list(mesh.devices.flat) if mesh is not None else jax.local_devices()
    # The memory that a device can address is known to its own process only. Devices of an
    # ahead-of-time topology belong to no process.
    mine = [device for device in devices if device.process_index == jax.process_index()]
    device = (mine or devices)[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if on_absent_gpus and device.platform == "gpu" and not kinds:
        return
    fault = missing_host_memory(device.platform, kinds, purpose)
    if fault is not None:
        raise MeshError(fault)


def missing_host_memory(platform: str, kinds: Collection[str], purpose: str) -> str | None:
    """Returns why a platform with these memory kinds lacks support for `purpose`, or None."""
    if HOST in kinds:
        return None
    return (
        f"{purpose} needs {HOST} memory, but the {platform} devices of this mesh have "
        f"{', '.join(kinds) or 'none that is known'}.\n"
        "  Leave it out, or run on TPU, GPU or CPU."
    )
