"""A common functional view of NNX and linen modules.

A module is split once into plain nested dicts of arrays with string keys: `params` (trained) and
`model_state` (updated by a forward pass, such as batch statistics, and untrained parameters). In a
traced step `call` merges them into a module, passes it to the loss, and collects the updates. The
state of random number generators is not stored. It is derived from a key, so a step's randomness
depends on that key alone, not on the mesh or on earlier runs of the module.
"""

from shardlib.functional.calls import call as call
from shardlib.functional.calls import updated as updated
from shardlib.functional.make import check_trained as check_trained
from shardlib.functional.make import functional as functional
from shardlib.functional.make import refuse_integer_params as refuse_integer_params
from shardlib.functional.make import refuse_no_params as refuse_no_params
from shardlib.functional.protocol import AxesByPath as AxesByPath
from shardlib.functional.protocol import FunctionalModule as FunctionalModule
from shardlib.functional.protocol import Inputs as Inputs
from shardlib.functional.protocol import Tree as Tree
from shardlib.functional.protocol import axis_names_of as axis_names_of
