"""Two real processes on one mesh: the tokens of one process."""

import json
import os
import socket
import subprocess
import sys

import jax
import pytest
from small_decoder import made
from test_engine import prompts

from shardlib.engine import Engine, Sampling

SAMPLINGS = [Sampling(max_tokens=10 + n, temperature=0.5 * (n % 2), seed=n) for n in range(6)]

PROGRAM = """
import dataclasses, json, sys
import jax

index, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", 2, index)
jax.config.update("jax_default_matmul_precision", "highest")
import shardlib as sl
from shardlib.errors import ModelError
from small_decoder import made
from test_engine import prompts
from test_processes import SAMPLINGS

mesh = sl.make_mesh("data=2,tensor=2")
with sl.use(mesh, sl.rules.STANDARD) as scope:
    served = made()
    served = dataclasses.replace(served, model=sl.shard(served.model), scope=scope)
engine = sl.Engine(served, context=128, slots=4, pages=20, chunk=32, speculate=3)
answers = engine.generate(prompts(6, seed=2), SAMPLINGS)
try:
    engine.submit([1], timeout_seconds=1.0)
except ModelError as error:
    fault = str(error)
print(json.dumps([[answer.ids for answer in answers], fault, engine.stats().pages_used]))
"""


@pytest.mark.process
def test_two_processes_have_the_tokens_of_one():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(index), port],
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
                "JAX_PLATFORMS": "cpu",
                "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    found = [
        json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in processes
    ]
    with jax.default_matmul_precision("highest"):
        right = Engine(made(), context=128).generate(prompts(6, seed=2), SAMPLINGS)
    for ids, fault, used in found:
        assert ids == [answer.ids for answer in right]
        assert "a timeout of a request on several processes" in fault
        assert used == 0
