"""Random programs under rules that are found for them."""

import dataclasses

import jax
import optax

import shardlib as sl
from random_programs.draws import Random
from random_programs.placements import Placement
from random_programs.program import Program
from shardlib.errors import DoesNotFitError
from shardlib.find import FoundRules, equivalence
from shardlib.mesh import MeshConfig

MESHES = "data=2,fsdp=2,tensor=2", "fsdp=4,tensor=2", "fsdp=2,tensor=4", "fsdp=8", "data=2,tensor=4"
LEAST_ELEMENTS = 64
"""Parameters of random programs are small, and are to be cut all the same."""
SHARES = 1.0, 0.7, 0.5, 0.35
"""Parts of the memory of the free answer, of which one is left to a program."""


def with_found_rules(program: Program) -> Program:
    """Returns the program on a mesh of its seed, under rules found for it.

    What is quickest for a small program is to cut nothing. So less memory than that takes is left
    to three of four programs, and every other one gets another answer than the first.
    """
    equivalence.MIN_ELEMENTS = LEAST_ELEMENTS
    random = Random(program.seed, 2)
    rows = jax.tree.leaves(program.batch)[0].shape[0]
    sizes = {mesh: MeshConfig.parse(mesh).sizes for mesh in MESHES}
    fitting = [m for m in MESHES if not rows % (sizes[m].get("data", 1) * sizes[m].get("fsdp", 1))]
    mesh = random.pick(*fitting)

    def find(**options: object) -> FoundRules:
        return sl.find_rules(
            program.module,
            loss=program.loss,
            batch=dict(program.batch),
            optimizer=optax.sgd(0.1, momentum=0.9),
            on=random.pick("8xh100", "v5e-8"),
            mesh=mesh,
            inputs=program.inputs,
            precision="f32",
            **options,  # type: ignore[arg-type]
        )

    found = find()
    share = random.pick(*SHARES)
    try:
        if share < 1:
            found = find(memory_bytes=share * found.solution.memory_bytes)
        if program.seed % 2:
            found = find(forbidden=[found])
    except DoesNotFitError:
        pass  # The answer before it stands.
    placement = Placement("found", found.rules, {}, {})
    return dataclasses.replace(program, mesh=mesh, placement=placement)
