"""Peak host memory while a large training state is made on 8 devices, fully sharded.

`sl.init_state` makes every leaf on its shards inside of one program. The baseline makes the whole
state on one device and then spreads it with `jax.device_put`. The devices are virtual CPU devices,
whose memory is the host's: all shards together, which is the size of the state, are the least that
can be. Each way runs in a process of its own, one after the other; what counts is the growth of the
peak of its resident memory from just before the state is made.

    python benchmarks/init_memory.py                       # 1 B parameters, 4 GB, SGD
    python benchmarks/init_memory.py --optimizer adamw     # 12 GB

The last line is JSON: `init_state_ratio` and `one_device_ratio` are peak bytes over bytes of the
state, `ratio` the first over the second.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
from typing import Any

WAYS = ("init_state", "one_device")


def peak_bytes() -> int:
    """Returns the most bytes this process has held resident so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def make_state(way: str, flags: argparse.Namespace) -> dict[str, Any]:
    """Makes the state in one of the two ways; returns what it took."""
    import jax
    import optax

    import shardlib as sl
    from shardlib.registry import DataSpec
    from shardlib.train.state import state_shardings
    from shardlib_models.transformer import FAMILY

    jax.config.update("jax_num_cpu_devices", flags.devices)
    model = FAMILY.config(
        num_layers=flags.layers, embed_dim=flags.embed, num_heads=flags.embed // 64
    )
    data = DataSpec(vocab_size=flags.vocab, sequence_length=1024)
    optimizer = {"sgd": optax.sgd(1e-3), "adamw": optax.adamw(1e-3)}[flags.optimizer]
    rules = sl.rules.STANDARD

    def make(rngs: Any) -> Any:
        return FAMILY.make(model, data, rngs)

    mesh = sl.make_mesh(f"fsdp={flags.devices}")
    abstract = sl.abstract_state(make, optimizer, mesh=mesh, rules=rules)
    alone = sl.make_mesh("fsdp=1", devices=jax.devices()[:1])
    before = peak_bytes()
    if way == "init_state":
        state = sl.init_state(make, optimizer, mesh=mesh, rules=rules)
    else:
        whole = sl.init_state(make, optimizer, mesh=alone, rules=rules)
        placed = state_shardings(abstract)
        state = jax.device_put(jax.tree.leaves(whole), jax.tree.leaves(placed))
    jax.block_until_ready(state)
    leaves = jax.tree.leaves((abstract.params, abstract.opt_state))
    return {
        "peak_bytes": peak_bytes() - before,
        "state_bytes": sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves),
        "num_params": sum(math.prod(x.shape) for x in jax.tree.leaves(abstract.params)),
    }


def in_own_process(way: str, arguments: list[str]) -> dict[str, Any]:
    """Returns what `make_state` finds in a process of its own."""
    command = [sys.executable, __file__, "--way", way, *arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--embed", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.way:
        print(json.dumps(make_state(flags.way, flags)))
        return
    found = {way: in_own_process(way, sys.argv[1:]) for way in WAYS}
    state_bytes = found[WAYS[0]]["state_bytes"]
    figures = {"num_params": found[WAYS[0]]["num_params"], "state_bytes": state_bytes}
    for way in WAYS:
        figures[f"{way}_peak_bytes"] = found[way]["peak_bytes"]
        figures[f"{way}_ratio"] = round(found[way]["peak_bytes"] / state_bytes, 3)
    peaks = [found[way]["peak_bytes"] for way in WAYS]
    print(json.dumps({**figures, "ratio": round(peaks[0] / peaks[1], 3)}))


if __name__ == "__main__":
    main()
