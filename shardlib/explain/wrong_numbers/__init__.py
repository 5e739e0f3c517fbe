"""Numbers that a compiled program gets wrong, by its text alone."""
from shardlib.explain.wrong_numbers.interpret import Reader, Contradiction
from shardlib.explain.wrong_numbers import tiles, operations
from shardlib.explain.wrong_numbers.values import shapes_of, Value

def quick(module, devices, outputs=None):
    reader = Reader(module, devices)
    args = []
    entry = module.computations[module.entry]
    params = sorted((i for i in entry if i.opcode == "parameter"), key=lambda i: int(i.operands))
    for p in params:
        (shape,) = shapes_of(p.shape)[:1] or [()]
        args.append(tiles.by_text(p.attributes.get("sharding", ""), shape, reader.context) or tiles.nothing_known(shape))
    out = reader.run(module.entry, args)
    root = next(i for i in entry if i.root)
    outs = out if not isinstance(out, Value) else (out,)
    for o, s in zip(outs, outputs or []):
        exp = tiles.by_sharding(s, o.layout.shape, reader.context)
        if exp is None: continue
        for d in range(len(o.layout.dims)):
            if reader.differ(o.layout, d, exp.layout, d):
                reader._note(Contradiction("rows", module.entry, root, shape=o.layout.shape))
    return reader
