import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from shardlib import remat
from shardlib.errors import ConfigError


def body(w, x):
    hidden = remat.tag(jnp.sin(x @ w), "hidden")
    return jnp.sum(jnp.cos(hidden) @ w)


def saved_shapes(policy):
    """Shapes of what the forward pass keeps besides its arguments."""
    w, x = jnp.ones((4, 4)), jnp.ones((3, 4))
    _, pullback = jax.vjp(lambda w: remat.apply(policy, body)(w, x), w)
    return sorted(leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.shape == (3, 4))


def test_policies_keep_more_the_less_they_recompute():
    counts = {p: len(saved_shapes(p)) for p in ("none", "dots", "save:hidden", "full")}
    assert counts["full"] < counts["save:hidden"] <= counts["dots"] <= counts["none"]


def test_none_is_the_function_itself():
    assert remat.apply("none", body) is body


def test_tag_is_the_name_that_jax_checkpoints_by():
    traced = jax.make_jaxpr(lambda x: remat.tag(x, "a"))(1.0)
    assert str(traced) == str(jax.make_jaxpr(lambda x: checkpoint_name(x, "a"))(1.0))


@pytest.mark.parametrize(
    ("policy", "tags", "message"),
    [
        (
            "dot",
            None,
            "remat policy 'dot' is unknown. Did you mean 'dots'?\n"
            "  Choose none, dots, full, or save: with the names to keep.",
        ),
        (
            "some",
            ("a", "b"),
            "remat policy 'some' is unknown.\n"
            "  Choose none, dots, full, or save: with the names to keep (a, b).",
        ),
        (
            "save:",
            ("a", "b"),
            "remat policy 'save:' names nothing to keep.\n  Add names (a, b).",
        ),
        (
            "save:mlp_out,atention_out,z",
            ("attention_out", "mlp_out"),
            "remat policy 'save:mlp_out,atention_out,z' keeps 'atention_out', which the model "
            "does not tag. Did you mean 'attention_out'?\n"
            "  Choose among attention_out, mlp_out.\n"
            "remat policy 'save:mlp_out,atention_out,z' keeps 'z', which the model does not tag.\n"
            "  Choose among attention_out, mlp_out.",
        ),
    ],
)
def test_faults_name_what_is_known(policy, tags, message):
    with pytest.raises(ConfigError) as error:
        remat.apply(policy, body, tags=tags)
    assert str(error.value) == message
