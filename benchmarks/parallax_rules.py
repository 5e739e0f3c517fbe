"""Rules that google-parallax's AUTO finds for a model, if it is installed and does not stop.

Source: https://github.com/google/parallax (PyPI google-parallax), `sharding/auto_shard.py`. AUTO
places parameters over one of the two axes of a mesh. The batch is for the user to place.
"""

import traceback
from typing import Any


def parallax_rules(make: Any, batch: Any, mesh: str) -> Any:
    """Returns `AxisRules` for the parameters of a model on a mesh of `fsdp` or `data`, and
    `tensor`; or the reason why there are none, as text."""
    try:
        from parallax.sharding import auto_shard
    except ImportError:
        return "google-parallax is not installed"
    import jax
    from flax import nnx

    import shardlib as sl
    from shardlib.paths import named_leaves

    sizes = sl.MeshConfig.parse(mesh).sizes
    if len(sizes) != 2:
        return "google-parallax takes meshes of two axes"
    graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    data, model = sizes
    try:
        with jax.sharding.use_abstract_mesh(
            jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
        ):
            (placed, _), _ = auto_shard.get_shardings(
                lambda state, batch: nnx.merge(graph, state)(batch),
                state,
                batch,
                data_axis_name=data,
                model_axis_name=model,
            )
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return f"google-parallax stops with {type(error).__name__} at {at.name}: {at.line}"
    axes = {path.removesuffix("/value"): tuple(spec) for path, spec in named_leaves(placed).items()}
    return sl.rules.STANDARD.override(paths=axes, params={model: model})
