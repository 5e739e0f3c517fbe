"""One functional view of NNX and linen modules.

A module is split once into plain nested dicts of arrays with string keys: `params` (trained) and
`model_state` (what a forward pass updates, such as batch statistics, and parameters that are not
trained). Inside of a traced step `call` merges them into a module, gives it to the loss, and
collects what the calls updated. The state of random number generators is kept nowhere: it is
derived from a key, so that a step's randomness depends on that key alone and neither on the mesh
nor on how often the module ran before.
"""

from shardlib.functional.calls import call as call
from shardlib.functional.calls import updated as updated
from shardlib.functional.make import functional as functional
from shardlib.functional.make import refuse_no_params as refuse_no_params
from shardlib.functional.protocol import AxesByPath as AxesByPath
from shardlib.functional.protocol import FunctionalModule as FunctionalModule
from shardlib.functional.protocol import Inputs as Inputs
from shardlib.functional.protocol import Tree as Tree
from shardlib.functional.protocol import axis_names_of as axis_names_of
