"""Attention over packed documents with grouped heads, on one device or many; rotary positions."""

from shardlib.attention.attend import attend as attend
from shardlib.attention.backends import Backend as Backend
from shardlib.attention.backends import resolve_backend as resolve_backend
from shardlib.attention.order import Order as Order
from shardlib.attention.order import scores_per_device as scores_per_device
from shardlib.attention.order import unzigzag as unzigzag
from shardlib.attention.order import zigzag as zigzag
from shardlib.attention.plan import ContextMethod as ContextMethod
from shardlib.attention.plan import ContextPlan as ContextPlan
from shardlib.attention.plan import plan_context as plan_context
from shardlib.attention.rotary import RotaryScaling as RotaryScaling
from shardlib.attention.rotary import frequencies as frequencies
from shardlib.attention.rotary import rotate as rotate
from shardlib.attention.rotary import rotations as rotations
