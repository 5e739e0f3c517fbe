"""Grouped-query attention over packed documents, on one or more devices; rotary embeddings."""

from shardlib.nn.attention.attend import attend as attend
from shardlib.nn.attention.backends import Backend as Backend
from shardlib.nn.attention.backends import resolve_backend as resolve_backend
from shardlib.nn.attention.order import Order as Order
from shardlib.nn.attention.order import positions as positions
from shardlib.nn.attention.order import scores_per_device as scores_per_device
from shardlib.nn.attention.order import unzigzag as unzigzag
from shardlib.nn.attention.order import zigzag as zigzag
from shardlib.nn.attention.page_attention import attend_pages as attend_pages
from shardlib.nn.attention.paged import PageBackend as PageBackend
from shardlib.nn.attention.paged import Pages as Pages
from shardlib.nn.attention.paged import Rows as Rows
from shardlib.nn.attention.paged import empty_pages as empty_pages
from shardlib.nn.attention.paged import pages_read as pages_read
from shardlib.nn.attention.paged import write_texts as write_texts
from shardlib.nn.attention.plan import ContextMethod as ContextMethod
from shardlib.nn.attention.plan import ContextPlan as ContextPlan
from shardlib.nn.attention.plan import plan_context as plan_context
from shardlib.nn.attention.rotary import frequencies as frequencies
from shardlib.nn.attention.rotary import rotate as rotate
from shardlib.nn.attention.rotary import rotations as rotations
from shardlib.nn.attention.rotary_scaling import LinearScaling as LinearScaling
from shardlib.nn.attention.rotary_scaling import LongScaling as LongScaling
from shardlib.nn.attention.rotary_scaling import RotaryScaling as RotaryScaling
from shardlib.nn.attention.rotary_scaling import YarnScaling as YarnScaling
