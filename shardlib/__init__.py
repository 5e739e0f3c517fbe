"""Named sharding for Flax models on any mesh.

```python
mesh = sl.make_mesh("data=2,fsdp=-1")
with sl.use(mesh, sl.rules.STANDARD):
    state = sl.init_state(lambda rngs: Model(rngs=rngs), optax.adamw(3e-4), seed=0)
    step = sl.make_train_step(loss_fn)
    for batch in batches:
        state, metrics = step(state, batch)
```
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlib import finetune as finetune
    from shardlib import hf as hf
    from shardlib import losses as losses
    from shardlib import rules as rules
    from shardlib import testing as testing
    from shardlib.engine import Engine as Engine
    from shardlib.engine import Grammar as Grammar
    from shardlib.engine import Sampling as Sampling
    from shardlib.errors import ShardlibError as ShardlibError
    from shardlib.explain import draw as draw
    from shardlib.explain import explain as explain
    from shardlib.find import find_rules as find_rules
    from shardlib.functional.precision import Precision as Precision
    from shardlib.losses.aggregate import Max as Max
    from shardlib.losses.aggregate import Mean as Mean
    from shardlib.losses.aggregate import Min as Min
    from shardlib.losses.aggregate import Output as Output
    from shardlib.losses.aggregate import Sum as Sum
    from shardlib.mesh import MeshConfig as MeshConfig
    from shardlib.mesh import make_mesh as make_mesh
    from shardlib.nn import attention as attention
    from shardlib.nn import moe as moe
    from shardlib.nn import remat as remat
    from shardlib.nn.stack import scan_layers as scan_layers
    from shardlib.nn.stack import stack_layers as stack_layers
    from shardlib.partitioner import partitioned as partitioned
    from shardlib.plan import plan as plan
    from shardlib.plan.serving import plan_serving as plan_serving
    from shardlib.rules import AxisRules as AxisRules
    from shardlib.run.load_run import load_run as load_run
    from shardlib.runtime.distributed import local_cpu_devices as local_cpu_devices
    from shardlib.sharding.constrain import constrain as constrain
    from shardlib.sharding.constrain import use as use
    from shardlib.sharding.partition import shard as shard
    from shardlib.train.evaluate import evaluate as evaluate
    from shardlib.train.evaluate import make_eval_step as make_eval_step
    from shardlib.train.fit_microbatches import fit_microbatches as fit_microbatches
    from shardlib.train.guards import GuardsConfig as GuardsConfig
    from shardlib.train.guards import SpikeConfig as SpikeConfig
    from shardlib.train.local_sgd.outer import LocalSGDConfig as LocalSGDConfig
    from shardlib.train.local_sgd.outer import make_local_sgd as make_local_sgd
    from shardlib.train.measure_groups import measure_groups as measure_groups
    from shardlib.train.offload import offload_optimizer as offload_optimizer
    from shardlib.train.pipeline.config import PipelineConfig as PipelineConfig
    from shardlib.train.reduce.reduction import ReductionConfig as ReductionConfig
    from shardlib.train.state import TrainState as TrainState
    from shardlib.train.state import abstract_state as abstract_state
    from shardlib.train.state import init_state as init_state
    from shardlib.train.state import materialize as materialize
    from shardlib.train.step import make_train_step as make_train_step

__version__ = "0.1.0"

# Imported at first use, so that `import shardlib` stays cheap.
_HOME = {
    "AxisRules": "rules",
    "Engine": "engine",
    "GuardsConfig": "train.guards",
    "LocalSGDConfig": "train.local_sgd.outer",
    "Max": "losses.aggregate",
    "Mean": "losses.aggregate",
    "MeshConfig": "mesh",
    "Min": "losses.aggregate",
    "Output": "losses.aggregate",
    "PipelineConfig": "train.pipeline.config",
    "Precision": "functional.precision",
    "ReductionConfig": "train.reduce.reduction",
    "Grammar": "engine",
    "Sampling": "engine",
    "ShardlibError": "errors",
    "SpikeConfig": "train.guards",
    "Sum": "losses.aggregate",
    "TrainState": "train.state",
    "abstract_state": "train.state",
    "constrain": "sharding.constrain",
    "draw": "explain",
    "evaluate": "train.evaluate",
    "explain": "explain",
    "find_rules": "find",
    "fit_microbatches": "train.fit_microbatches",
    "init_state": "train.state",
    "load_run": "run.load_run",
    "local_cpu_devices": "runtime.distributed",
    "make_eval_step": "train.evaluate",
    "make_local_sgd": "train.local_sgd.outer",
    "make_mesh": "mesh",
    "make_train_step": "train.step",
    "materialize": "train.state",
    "measure_groups": "train.measure_groups",
    "offload_optimizer": "train.offload",
    "partitioned": "partitioner",
    "plan": "plan",
    "plan_serving": "plan.serving",
    "scan_layers": "nn.stack",
    "shard": "sharding.partition",
    "stack_layers": "nn.stack",
    "use": "sharding.constrain",
}
_MODULES = {
    "finetune": "finetune",
    "hf": "hf",
    "attention": "nn.attention",
    "losses": "losses",
    "moe": "nn.moe",
    "remat": "nn.remat",
    "rules": "rules",
    "testing": "testing",
}

__all__ = [*_HOME, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


class _Package(ModuleType):
    """A package that keeps `shardlib.explain` and `shardlib.plan` functions.

    Importing a submodule binds it to its name in the package. If a public function has that name,
    the function is bound instead.
    """

    def __setattr__(self, name: str, value: object) -> None:
        is_shadow = name in _HOME and isinstance(value, ModuleType)
        super().__setattr__(name, getattr(value, name) if is_shadow else value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"shardlib.{_MODULES[name]}")
    if name in _HOME:
        value = getattr(importlib.import_module(f"shardlib.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'shardlib' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
