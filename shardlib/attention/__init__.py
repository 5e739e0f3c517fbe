"""Attention over packed documents with grouped heads, and rotary positions."""

from shardlib.attention.attend import Backend as Backend
from shardlib.attention.attend import attend as attend
from shardlib.attention.attend import resolve_backend as resolve_backend
from shardlib.attention.rotary import RotaryScaling as RotaryScaling
from shardlib.attention.rotary import frequencies as frequencies
from shardlib.attention.rotary import rotate as rotate
from shardlib.attention.rotary import rotations as rotations
