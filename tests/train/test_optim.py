"""Every update rule against its paper in numpy float64; masks, clipping, averages, precision."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardlib import registry
from shardlib.config import from_dict
from shardlib.errors import ConfigError, ModelError
from shardlib.optim.build import OptimizerConfig, build_optimizer, ema_params
from shardlib.optim.transforms import is_stacked
from shardlib.optim.update_rules import RULES, hidden_matrices
from shardlib.paths import matches, named_leaves

STEPS = 4
SHAPES = {
    "embedding": (5, 4),
    "layers/attention/query/kernel": (2, 4, 3, 2),
    "layers/attention/query/bias": (2, 3, 2),
    "layers/attention/out/kernel": (2, 3, 2, 4),
    "layers/mlp/up/kernel": (2, 4, 6),
    "layers/norm/scale": (2, 4),
    # Large enough for adafactor to factor it.
    "final/kernel": (128, 130),
}


def tree(flat):
    nested = {}
    for path, value in flat.items():
        *folders, name = path.split("/")
        node = nested
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = jnp.asarray(value, jnp.float32)
    return nested


def numbers(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {
        path: (scale * rng.standard_normal(shape)).astype(np.float32)
        for path, shape in SHAPES.items()
    }


def run(config, params, grads, *, global_batch=1):
    """Returns parameters and state after one update per tree of gradients."""
    optimizer = build_optimizer(config, steps=len(grads), global_batch=global_batch)

    @jax.jit
    def update(params, state, grads):
        updates, state = optimizer.transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = tree(params)
    state = optimizer.transform.init(params)
    for grad in grads:
        params, state = update(params, state, tree(grad))
    assert update._cache_size() == 1
    return params, state


# --- The papers, for one parameter (or one layer of a stack) in float64. ---
# `s` is this parameter's state, `t` counts from 1, `decayed` and `path` are the masks' view.


def adam_direction(g, s, t, b1, b2, eps):
    """Kingma and Ba 2015, algorithm 1."""
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g**2
    return (s["m"] / (1 - b1**t)) / (np.sqrt(s["v"] / (1 - b2**t)) + eps)


def adamw(path, x, g, s, t, lr, wd):
    return x - lr * (adam_direction(g, s, t, 0.9, 0.95, 1e-8) + wd * x)


def lion(path, x, g, s, t, lr, wd):
    """Chen et al. 2023, algorithm 2."""
    m = s.get("m", 0)
    s["m"] = 0.99 * m + 0.01 * g
    return x - lr * (np.sign(0.9 * m + 0.1 * g) + wd * x)


def sgd(path, x, g, s, t, lr, wd):
    """Goyal et al. 2017, equation 9, with weight decay in the gradient."""
    s["u"] = 0.9 * s.get("u", 0) + g + wd * x
    return x - lr * s["u"]


def nesterov_sgd(path, x, g, s, t, lr, wd):
    """Sutskever et al. 2013 as PyTorch and optax write it: look ahead along the new momentum."""
    g = g + wd * x
    s["u"] = 0.9 * s.get("u", 0) + g
    return x - lr * (g + 0.9 * s["u"])


def norm_ratio(path, x, u):
    return 1.0 if excluded(path) else np.linalg.norm(x.ravel()) / np.linalg.norm(u.ravel())


def lars(path, x, g, s, t, lr, wd):
    """You et al. 2017, algorithm 1; biases and scales have ratio 1."""
    g = g + wd * x
    trust = 1.0 if excluded(path) else 0.001 * norm_ratio(path, x, g)
    s["v"] = 0.9 * s.get("v", 0) + lr * trust * g
    return x - s["v"]


def lamb(path, x, g, s, t, lr, wd):
    """You et al. 2020, algorithm 2."""
    u = adam_direction(g, s, t, 0.9, 0.999, 1e-6) + wd * x
    return x - lr * norm_ratio(path, x, u) * u


def adafactor(path, x, g, s, t, lr, wd):
    """Shazeer and Stern 2018, algorithms 4 (matrices) and 5 (vectors)."""
    b2 = 1 - t**-0.8
    g2 = g**2 + 1e-30
    if x.ndim == 2 and min(x.shape) >= 128:
        s["r"] = b2 * s.get("r", 0) + (1 - b2) * g2.sum(1)
        s["c"] = b2 * s.get("c", 0) + (1 - b2) * g2.sum(0)
        v = np.outer(s["r"], s["c"]) / s["r"].sum()
    else:
        s["v"] = b2 * s.get("v", 0) + (1 - b2) * g2
        v = s["v"]
    u = g / np.sqrt(v)
    u = u / max(1, np.sqrt(np.mean(u**2)))
    return x - lr * (max(1e-3, np.sqrt(np.mean(x**2))) * u + wd * x)


def muon(path, x, g, s, t, lr, wd):
    """Jordan et al. 2024 with Adam's bias corrections; RMS as in Liu et al. 2025, equation 4."""
    inputs = {"query/kernel": 1, "out/kernel": 2, "up/kernel": 1, "final/kernel": 1}
    count = next((n for end, n in inputs.items() if path.endswith(end)), None)
    if count is None:
        return adamw(path, x, g, s, t, lr, wd)
    b = 0.95
    s["m"] = b * s.get("m", 0) + (1 - b) * g
    m = b * s["m"] / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t)
    y = m.reshape(int(np.prod(m.shape[:count])), -1)
    fan = max(y.shape)
    y = y / np.linalg.norm(y)
    for _ in range(5):
        a = y @ y.T
        y = 3.4445 * y + (-4.7750 * a + 2.0315 * a @ a) @ y
    return x - lr * (0.2 * np.sqrt(fan) * y.reshape(x.shape) + wd * x)


PAPERS = {
    "adamw": adamw,
    "lion": lion,
    "sgd": sgd,
    "nesterov": nesterov_sgd,
    "lars": lars,
    "lamb": lamb,
    "adafactor": adafactor,
    "muon": muon,
}


def excluded(path):
    return path.endswith(("/bias", "/scale"))


def by_paper(rule, params, grads, lr, wd):
    state = {}
    params = {path: x.astype(np.float64) for path, x in params.items()}
    for t, grad in enumerate(grads, start=1):
        for path, x in params.items():
            decay = 0.0 if excluded(path) else wd
            layers = range(x.shape[0]) if path.startswith("layers/") else [...]
            for layer in layers:
                s = state.setdefault((path, layer), {})
                x[layer] = rule(path, x[layer], grad[path][layer].astype(float), s, t, lr, decay)
    return params


@pytest.mark.parametrize("name", [*RULES, "nesterov"])
def test_update_rule_is_that_of_the_paper(name):
    keys = {"name": "sgd", "nesterov": True} if name == "nesterov" else {"name": name}
    params, grads = numbers(0, 0.5), [numbers(1 + step) for step in range(STEPS)]
    config = OptimizerConfig(schedule="constant", learning_rate=0.05, weight_decay=0.1, **keys)
    got, _ = run(config, params, grads)
    want = by_paper(PAPERS[name], params, grads, config.learning_rate, config.weight_decay)
    for path, leaf in named_leaves(got).items():
        # Muon's iteration multiplies rounding (6e-8) by up to 3.4445**5 = 485.
        atol = 2e-5 if name == "muon" else 1e-6
        np.testing.assert_allclose(leaf, want[path], rtol=1e-5, atol=atol, err_msg=path)
        assert np.any(np.asarray(leaf) != params[path]), path


def test_weight_decay_spares_exactly_the_patterns():
    params, zero = numbers(0), {path: np.zeros(shape) for path, shape in SHAPES.items()}
    config = OptimizerConfig(
        schedule="constant",
        learning_rate=0.5,
        weight_decay=0.25,
        no_decay=("**/bias", "embedding", "layers/*/up/*"),
    )
    got, _ = run(config, params, [zero])
    for path, leaf in named_leaves(got).items():
        spared = any(matches(pattern, path) for pattern in config.no_decay)
        want = params[path] * np.float32(1.0 if spared else 0.875)
        np.testing.assert_allclose(leaf, want, rtol=1e-6, err_msg=path)


def test_clipping_scales_all_gradients_by_one_factor():
    params, grad = numbers(0), numbers(1)
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in grad.values()))
    keys = {"name": "sgd", "momentum": 0.0, "schedule": "constant", "learning_rate": 1.0}
    for limit in (norm / 4, norm * 4):
        got, _ = run(OptimizerConfig(**keys, clip_norm=float(limit)), params, [grad])
        for path, leaf in named_leaves(got).items():
            want = params[path] - grad[path] * min(1.0, limit / norm)
            np.testing.assert_allclose(leaf, want, rtol=1e-5, atol=1e-6, err_msg=path)


def test_muon_takes_each_expert_as_a_matrix():
    rng = np.random.default_rng(0)
    experts, grad = rng.normal(size=(2, 2, 3, 8, 12))
    # Gradients of very different sizes show any mixing.
    grad = grad * (100.0 ** np.arange(3))[None, :, None, None]
    config = OptimizerConfig(name="muon", schedule="constant", learning_rate=0.1)
    together, _ = run(config, {"layers/experts/up": experts}, [{"layers/experts/up": grad}])
    pairs = [(layer, expert) for layer in range(2) for expert in range(3)]
    alone, _ = run(
        config,
        {f"{layer}/{expert}/up": experts[layer, expert] for layer, expert in pairs},
        [{f"{layer}/{expert}/up": grad[layer, expert] for layer, expert in pairs}],
    )
    for layer, expert in pairs:
        # Muon's iteration multiplies rounding (6e-8) by up to 485, and steps are 0.07 at most.
        np.testing.assert_allclose(
            together["layers"]["experts"]["up"][layer, expert],
            alone[str(layer)][str(expert)]["up"],
            atol=2e-6,
            rtol=1e-6,
        )


def test_muon_leaves_biases_of_experts_to_adamw():
    dims = hidden_matrices(OptimizerConfig(name="muon")).dims
    assert dims("layers/mlp/experts/gate", 4) is not None
    assert dims("layers/mlp/experts/gate_bias", 3) is None
    assert dims("layers/mlp/experts/down_bias", 3) is None


STACKS = {
    "clip": ("text/layers/", "image/layers/"),
    "t5": ("encoder/layers/", "decoder/layers/"),
    "bert": ("encoder/layers/",),
}


@pytest.mark.parametrize("name", STACKS)
def test_optimizers_know_every_stack_of_layers(name):
    family, extra = registry.family(name), {"image": {"patch_size": 8}} if name == "clip" else {}
    config = from_dict(family.config, {"name": name, **extra}, name)
    data = registry.DataSpec(99, 16, image_shape=(16, 16, 1), num_types=2, target_length=8)
    model = nnx.eval_shape(lambda: family.make(config, data, nnx.Rngs(0)))
    leaves = {path: x.shape for path, x in named_leaves(nnx.to_pure_dict(nnx.state(model))).items()}
    muon = OptimizerConfig(name="muon")
    stacked, dims = is_stacked(muon.stacked), hidden_matrices(muon).dims
    for stack in STACKS[name]:
        inside = {path.removeprefix(stack) for path in leaves if path.startswith(stack)}
        assert {"attention/query/kernel", "attention/out/kernel", "mlp/up/kernel"} <= inside
    for path, shape in leaves.items():
        of_layers = path.startswith(STACKS[name])
        assert stacked(path) == of_layers, path
        # The first dim counts layers; matrices outside of them are the first and the last ones.
        is_matrix = of_layers and path.endswith("kernel")
        found = dims(path, len(shape))
        assert (found is not None) == is_matrix, path
        if found is not None:
            assert 0 not in (*found.reduction_axis, *found.output_axis)
        kept = any(matches(pattern, path) for pattern in muon.no_decay)
        last = path.split("/")[-1]
        assert kept == (last in ("bias", "scale", "log_scale") or "/bias/" in path), path


def test_average_follows_its_recurrence_and_is_donated_apart_from_the_parameters():
    config = OptimizerConfig(ema_decay=0.5, learning_rate=0.1)
    optimizer = build_optimizer(config, steps=9, global_batch=1)
    params = tree(numbers(0))
    state = jax.jit(optimizer.transform.init)(params)
    want = {path: np.asarray(x, np.float64) for path, x in named_leaves(params).items()}

    def update(params, state, grads):
        updates, state = optimizer.transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    update = jax.jit(update, donate_argnums=(0, 1))
    for t in range(1, 10):
        params, state = update(params, state, tree(numbers(t)))
        rate = min(0.5, (1 + t) / (10 + t))
        for path, x in named_leaves(params).items():
            want[path] = rate * want[path] + (1 - rate) * np.asarray(x, np.float64)
    for path, x in named_leaves(ema_params(state)).items():
        np.testing.assert_allclose(x, want[path], rtol=1e-5, atol=1e-6, err_msg=path)
    plain = build_optimizer(OptimizerConfig(), steps=9, global_batch=1)
    assert ema_params(plain.transform.init(params)) is None


def test_complex_parameters_are_refused():
    optimizer = build_optimizer(OptimizerConfig(ema_decay=0.9), steps=9, global_batch=1)
    with pytest.raises(ModelError, match=r"the parameters a/w are complex.*\n  Make a step with"):
        optimizer.transform.init({"a": {"w": jnp.zeros(2, jnp.complex64), "b": jnp.zeros(2)}})


@pytest.mark.mesh
@pytest.mark.parametrize("name", sorted(RULES))
def test_bfloat16_parameters_keep_a_float32_state(name):
    config = OptimizerConfig(name=name, schedule="constant", learning_rate=0.05, ema_decay=0.9)
    optimizer = build_optimizer(config, steps=9, global_batch=1)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree(numbers(0)))
    state = optimizer.transform.init(params)
    updates, new = jax.jit(optimizer.transform.update)(tree(numbers(1)), state, params)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    for path, x in named_leaves(new).items():
        assert x.dtype in (jnp.float32, jnp.int32), path
    # The same parameters in float32 take the same step, to one rounding of the update.
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    exact, _ = optimizer.transform.update(tree(numbers(1)), optimizer.transform.init(wide), wide)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float32), b, rtol=2**-8, atol=1e-6
        ),
        updates,
        exact,
    )


def test_stored_bfloat16_momentum_is_the_only_difference():
    keys = {"name": "sgd", "schedule": "constant", "learning_rate": 1.0, "momentum": 0.5}
    params, grads = numbers(0), [numbers(1), numbers(2)]
    got, state = run(OptimizerConfig(**keys, momentum_dtype="bfloat16"), params, grads)
    for path, leaf in named_leaves(got).items():
        stored = np.asarray(jnp.asarray(grads[0][path]).astype(jnp.bfloat16), np.float32)
        want = params[path] - grads[0][path] - (grads[1][path] + 0.5 * stored)
        np.testing.assert_allclose(leaf, want, rtol=1e-5, atol=1e-5, err_msg=path)
    moments = [x for path, x in named_leaves(state).items() if "/trace/" in path]
    assert {x.dtype for x in moments} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"learning_rate": 0.0, "betas": (0.9, 1.0)},
            r"(?s)_rate is 0.0 .*positive.*betas is .*1.0",
        ),
        ({"warmup_steps": -1}, "warmup_steps is -1 but must be 0 or more"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0 but must be positive or null"),
        ({"ema_decay": 1.0}, r"ema_decay is 1.0 but must be in \(0, 1\) or null"),
        ({"schedule": "step", "step_boundaries": (0.5, 0.25)}, "step_boundaries is .*increasing"),
        ({"momentum": 0.9}, "momentum does nothing with name=adamw: .* sgd, lars, muon. Remove it"),
        ({"schedule": "constant", "min_fraction": 0.0}, "min_fraction does nothing with schedule="),
        ({"name": "sgd", "nesterov": True, "momentum": 0.0}, "nesterov does nothing .*Remove one"),
        ({"no_decay": ("embedding",)}, "no_decay does nothing with weight_decay=0. Remove it or"),
    ],
)
def test_faulty_configs_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**keys)


def test_patterns_that_name_nothing_are_refused_before_any_state_is_made():
    config = OptimizerConfig(weight_decay=0.1, no_decay=("**/scale", "embeding"))
    optimizer = build_optimizer(config, steps=9, global_batch=1)
    params = {"embedding": jnp.ones((2, 2)), "norm": {"bias": jnp.ones(2)}}
    with pytest.raises(
        ConfigError, match=r"(?s)optimizer\.no_decay: 'embeding'.*Remove it or correct"
    ):
        optimizer.transform.init(params)
