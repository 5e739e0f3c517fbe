"""Device meshes: named axes and device order."""

from shardlib.mesh.device_order import draw as draw
from shardlib.mesh.make import STANDARD_AXES as STANDARD_AXES
from shardlib.mesh.make import AxisTypes as AxisTypes
from shardlib.mesh.make import MeshAxis as MeshAxis
from shardlib.mesh.make import MeshConfig as MeshConfig
from shardlib.mesh.make import MeshSpec as MeshSpec
from shardlib.mesh.make import abstract_mesh as abstract_mesh
from shardlib.mesh.make import auto_mesh as auto_mesh
from shardlib.mesh.make import describe as describe
from shardlib.mesh.make import entry_axes as entry_axes
from shardlib.mesh.make import make_mesh as make_mesh
from shardlib.mesh.make import mesh_sizes as mesh_sizes
from shardlib.mesh.make import spec_axes as spec_axes
