"""Plans to serve a decoder: the mesh, slots and chunk of each engine, and what they take."""

from typing import Any

from shardlib.errors import ConfigError
from shardlib.functional.quantized import Bits
from shardlib.hardware import Cluster
from shardlib.plan.serving.question import ServePrecision, Slo, serving_question
from shardlib.plan.serving.result import ServingPlans as ServingPlans
from shardlib.plan.serving.result import answer
from shardlib.plan.serving.search import ServingMemory as ServingMemory
from shardlib.plan.serving.search import ServingPlan as ServingPlan
from shardlib.plan.serving.served_model import served_model


def plan_serving(
    model: Any,
    *,
    on: str | Cluster,
    context: int | str = "8k",
    prompt: int | str | None = None,
    slo: str | Slo | None = None,
    precision: ServePrecision = "bf16",
    weights: Bits | None = None,
    cache: Bits | None = None,
    top: int = 5,
) -> ServingPlans:
    """Returns the best ways to serve a decoder on a cluster, by the cost model of `plan`.

    Copies of the model lie over `tensor` and `expert`, under the rules `serve`. Each has an
    `Engine` of its own, or one engine holds all of them along `data`; both are planned. Nothing is
    allocated or compiled:

    ```python
    print(sl.plan_serving("llama3-8b", on="8xh100", context="8k", slo="ttft=1s,itl=50ms"))
    ```

    Args:
        model: A name such as `llama3-8b`, a Hugging Face folder with a config.json, the config
            of a decoder, or the config of a run.
        on: The cluster, such as `8xh100` or `v5e-8`.
        context: Tokens of a prompt and its answer, as a number or as in `8k` (8 x 1024).
        prompt: Tokens of a prompt; default: half of the context. An answer has the rest.
        slo: Times to keep, as in `ttft=1s,itl=50ms`: seconds to the first token of a prompt that
            starts at once with all slots taken, and between tokens while a prompt is read.
        precision: Of weights, activations and the cache: `bf16` or `f32`.
        weights, cache: `int8` for 8 bits, as in `Engine`.
        top: Number of meshes to return.

    Raises:
        ModelError: If the model is unknown, is not a decoder that the engine runs, has fewer
            positions than the context, or nothing of it can have 8 bits.
        MeshError: If the cluster is unknown, the model does not fit it, or no plan keeps the times.
        ConfigError: If arguments are wrong.
    """
    question = serving_question(on, context, prompt, slo, precision, weights, cache)
    if top < 1:
        raise ConfigError(f"top is {top}, but at least one mesh is returned.\n  Give 1 or more.")
    served = served_model(model, question.dtype, weights=weights, cache=cache)
    served.check_context(question.context)
    return answer(served, question, top)
