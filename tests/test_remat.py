import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from shardlib.errors import ConfigError
from shardlib.nn import remat


def body(w, x):
    hidden = remat.tag(jnp.sin(x @ w), "hidden")
    return jnp.sum(jnp.cos(hidden) @ w)


def saved_shapes(policy):
    """Shapes of what the forward pass keeps besides its arguments."""
    w, x = jnp.ones((4, 4)), jnp.ones((3, 4))
    _, pullback = jax.vjp(lambda w: remat.apply(policy, body)(w, x), w)
    return sorted(leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.shape == (3, 4))


def test_policies_keep_more_the_less_they_recompute():
    policies = ("none", "dots", "save:hidden", "offload:hidden", "full")
    counts = {p: len(saved_shapes(p)) for p in policies}
    assert counts["full"] < counts["save:hidden"] <= counts["dots"] <= counts["none"]
    assert counts["offload:hidden"] == counts["save:hidden"]


def test_dots_keep_convolutions():
    def convolved(kernel, x):
        y = jax.lax.conv(jnp.sin(x), kernel, (1, 1), "SAME")
        return jnp.sum(jnp.cos(y))

    kernel, x = jnp.ones((5, 2, 3, 3)), jnp.ones((1, 2, 4, 4))
    _, pullback = jax.vjp(lambda x: remat.apply("dots", convolved)(kernel, x), x)
    assert (1, 5, 4, 4) in {leaf.shape for leaf in jax.tree.leaves(pullback)}


def test_offloading_keeps_what_is_named_in_the_memory_of_the_host():
    w, x = jnp.ones((4, 4)), jnp.ones((3, 4))

    def shapes(policy):
        gradient = jax.grad(lambda w: remat.apply(policy, body)(w, x))
        return str(jax.make_jaxpr(gradient)(w))

    assert "f32<host>[3,4]" in shapes("offload:hidden")
    assert "<host>" not in shapes("save:hidden")


@pytest.mark.parametrize(
    ("policy", "length", "found"),
    [
        ("full", 8, [("full", 8)]),
        ("dots", 3, [("dots", 3)]),
        ("0-2:full,3-:dots", 8, [("full", 3), ("dots", 5)]),
        ("3-:save:a,b, 0-2:none", 8, [("none", 3), ("save:a,b", 5)]),
        ("0:full,1:full,2-7:dots", 8, [("full", 2), ("dots", 6)]),
        ("0-1:full,2-3:dots,4-5:full,6-7:dots", 4, [("full", 2), ("dots", 2)]),
    ],
)
def test_ranges_become_runs_of_layers(policy, length, found):
    assert remat.runs(policy, 8, length=length) == found


@pytest.mark.parametrize(
    ("length", "fault"),
    [
        (4, r"gives layer 0 'full' and layer 4 'dots', .*\n  Repeat the ranges every 4 layers"),
        (3, r"has ranges, but the 8 layers run in slices of 3, .*\n  Choose one policy for all"),
    ],
)
def test_ranges_that_slices_do_not_share_are_refused(length, fault):
    with pytest.raises(ConfigError, match=rf"^remat policy '0-1:full,2-:dots' {fault}"):
        remat.runs("0-1:full,2-:dots", 8, length=length)


@pytest.mark.parametrize(
    ("policy", "fault"),
    [
        ("0-2:full,4-:dots", "layer 3 has no policy"),
        ("0-4:full,3-:dots", "layers 3-4 have two policies"),
        ("0-:full,3-4:dots", "layers 3-4 have two policies"),
        ("0-:full,3-:dots", "layers 3- have two policies"),
        ("2-:dots", "layers 0-1 have no policy"),
        ("0-3:dots", "layers 4-7 have no policy"),
        ("0-8:dots", "the range 0-8 goes beyond the last layer, 7"),
        ("0-7:dots,9:full", "layer 8 has no policy; the range 9 goes beyond the last layer, 7"),
        ("0-7:dots,8-:full", "the range 8- goes beyond the last layer, 7"),
        ("4-3:dots,0-:full", "the range 4-3 holds no layer"),
    ],
)
def test_ranges_cover_every_layer_once(policy, fault):
    assert remat.check(policy, num_layers=8) == [
        f"remat policy {policy!r}: {fault}.\n"
        "  Write ranges of layers as in 0-7:full,8-:dots, counted from 0."
    ]


def test_without_the_number_of_layers_only_what_the_text_says_is_checked():
    assert remat.check("0-7:full,8-99:dots") == []
    assert len(remat.check("0-7:full,9-99:dots")) == 1


def test_every_fault_of_ranges_is_named_at_once():
    faults = remat.check("0-3:ful,4:save:z,5+:dots,6", ("a",), 8)
    parts = ("'5+:dots' is not a range", "'6' is not a range", "Did you mean 'full'?", "keeps 'z'")
    assert len(faults) == 4
    assert all(part in fault for part, fault in zip(parts, faults, strict=True))


def test_one_function_has_no_ranges():
    with pytest.raises(ConfigError, match=r"'0-:full' has ranges of layers, .*\n  Choose one"):
        remat.apply("0-:full", body)
    assert remat.apply("none", body) is body


def test_tag_is_the_name_that_jax_checkpoints_by():
    traced = jax.make_jaxpr(lambda x: remat.tag(x, "a"))(1.0)
    assert str(traced) == str(jax.make_jaxpr(lambda x: checkpoint_name(x, "a"))(1.0))


@pytest.mark.parametrize(
    ("policy", "fault"),
    [
        ("dot", r"is unknown\. Did you mean 'dots'\?\n  Choose none, .*\(attention_out, mlp_out\)"),
        ("save:", r"names nothing to keep\.\n  Add names \(attention_out, mlp_out\)"),
        (
            "save:mlp_out,atention_out,z",
            r"keeps 'atention_out', .*Did you mean 'attention_out'\?\n  Choose among .*\n.*'z'",
        ),
    ],
)
def test_faults_name_what_is_known(policy, fault):
    with pytest.raises(ConfigError, match=rf"^remat policy '{policy}' {fault}"):
        remat.apply(policy, body, tags=("attention_out", "mlp_out"))
