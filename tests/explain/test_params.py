"""The report on who is sharded how: rows, totals, faults, text and JSON."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import shardlib as sl
from shardlib.mesh import abstract_mesh

RULES = sl.AxisRules(
    params={
        "vocab": "tensor",
        "heads": ["tensor", "data", None],
        "embed": "fsdp",
        "norm": None,
        "expert": "expert",
    },
    activations={"*": None},
    paths={"**/plain": ("norm",), "no/such": ()},
    auto=sl.rules.Auto("fsdp", min_elements=256),
)


class Model(nnx.Module):
    def __init__(self, rngs):
        def param(shape, *axes):
            value = jax.random.normal(rngs.params(), shape)
            return nnx.Param(value, out_sharding=axes or None, eager_sharding=False)

        self.table = param((64, 32), "vocab", "embed")
        self.heads = param((64, 3, 32), "vocab", "heads", "embed")
        self.scale = param((32,), "norm")
        self.free = param((16, 32))
        self.small = param((5,))
        self.sub = nnx.Dict(plain=param((7,)))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))


def report(mesh="fsdp=4,tensor=2", num_devices=8, rules=RULES, optimizer=None):
    state = sl.abstract_state(
        Model,
        optimizer or optax.sgd(0.1, momentum=0.9),
        mesh=abstract_mesh(mesh, num_devices),
        rules=rules,
    )
    return sl.explain(state)


def rows(found, section="params"):
    return {row.path: row for row in found.rows if row.section == section}


def test_a_row_for_each_leaf():
    found = report()
    assert list(rows(found)) == ["free", "heads", "scale", "small", "sub/plain", "table"]
    assert list(rows(found, "model_state")) == ["count"]
    momentum = [f"0/trace/{path}" for path in rows(found)]
    assert list(rows(found, "opt_state")) == momentum


def test_copies_and_replicated_bytes():
    found = rows(report("data=2,fsdp=4"))
    assert (found["table"].copies, found["table"].replicated_bytes) == (2, 64 * 32 * 4)
    assert (found["scale"].copies, found["scale"].replicated_bytes) == (8, 7 * 32 * 4)
    assert found["free"].spec == (None, "fsdp")


def test_totals():
    found = report()
    sizes = {"table": 2048, "heads": 6144, "scale": 32, "free": 512, "small": 5, "sub/plain": 7}
    assert found.num_params() == sum(sizes.values())
    assert found.total_bytes("params") == 4 * sum(sizes.values())
    assert found.total_bytes("opt_state") == found.total_bytes("params")
    assert found.total_bytes() == 2 * found.total_bytes("params") + 4
    each = 4 * (2048 // 8 + 6144 // 8 + 32 + 512 // 4 + 5 + 7)
    assert found.bytes_per_device("params") == each
    assert found.bytes_per_device() == 2 * each + 4


class TestFaults:
    """What `--strict` fails on."""

    def test_none_where_all_is_as_the_rules_say(self):
        assert report().faults(threshold_bytes=1) == []
        assert report("data=1", 1).faults(threshold_bytes=1) == []
        rules = dataclasses.replace(sl.rules.DATA, params=(("*", ((),)),))
        assert report("data=8", rules=rules).faults(1) == []

    def test_a_mesh_that_lacks_what_the_rules_ask_for(self):
        found = report("data=8")
        # The heads could have gone over data, which does not divide them.
        free, heads, table = map(str, found.faults(threshold_bytes=1))
        assert free.startswith("free (2.0 KiB) is replicated: fsdp has size 1")
        assert "heads (24.0 KiB) is replicated: heads: not data: data=8 does not divide 3" in heads
        assert table.endswith("this mesh has no tensor, fsdp")
        assert [fault.path for fault in found.faults(8192)] == ["heads", "table"]
        assert found.faults() == []


def test_json():
    found = report()
    data = json.loads(found.to_json())
    assert data == json.loads(json.dumps(found.to_dict()))
    assert data["mesh"] == {"fsdp": 4, "tensor": 2}
    assert data["num_params"] == found.num_params()
    assert data["bytes_total"]["params"] == found.total_bytes("params")
    assert data["bytes_per_device"]["opt_state"] == found.bytes_per_device("opt_state")
    assert data["unused_rules"] == ["expert"]
    assert data["unused_paths"] == ["no/such"]
    (row,) = (row for row in data["rows"] if row["path"] == "heads")
    assert row == {
        "section": "params",
        "path": "heads",
        "shape": [64, 3, 32],
        "dtype": "float32",
        "logical_axes": ["vocab", "heads", "embed"],
        "origin": "metadata",
        "spec": ["tensor", None, "fsdp"],
        "refused": ["heads: not tensor: mesh axis 'tensor' already shards dim 0"],
        "absent_mesh_axes": ["data"],
        "note": "",
        "bytes_total": 24576,
        "bytes_per_device": 3072,
        "copies": 1,
        "asked_for": False,
        "fell_back": False,
        "memory_kind": None,
        "replicated_bytes": 0,
    }


def test_a_state_in_memory_has_the_report_of_its_plan():
    mesh, optimizer = sl.make_mesh("fsdp=4,tensor=2"), optax.sgd(0.1, momentum=0.9)
    state = sl.init_state(Model, optimizer, mesh=mesh, rules=RULES)
    assert sl.explain(state) == report()
