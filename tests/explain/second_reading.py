"""A second reading of the traffic of a compiled program.

It shares nothing with `shardlib.explain`, and takes another way to each number: it walks from the
entry down instead of from a collective up, tells a reduce-scatter of TPUs by its shapes and not by
its name, and finds the axes of a group by the coordinates of its members, where shardlib compares
it with the groups of all axes.
"""

import collections
import itertools
import math
import re

import numpy as np

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
COLLECTIVE = re.compile(rf" = (?P<shape>.*?) (?P<kind>{KINDS})(?P<start>-start)?\(")
SENT = re.compile(r" = \((?P<shape>\w+\[[\d,]*\])\S*, u32\[\].*? send\(")
CALLED = re.compile(r"\b(?:calls|body|condition|to_apply)=%?([\w.\-]+)")
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
WIDTHS = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "pred": 1, "f64": 8}


def sent_bytes(text, mesh, slices=1):
    """Returns the bytes that a device sends in one run, by kind, mesh axes and network.

    Args:
        text: The program.
        mesh: Devices by axis; the first one crosses the slices.
        slices: TPU slices; the text is that of one of them.
    """
    first = next(iter(mesh))
    inner = {**mesh, first: mesh[first] // slices}
    computations = _computations(text)
    runs = _runs(computations)
    found = collections.Counter()
    for name, (result, lines) in computations.items():
        for line in lines:
            if match := COLLECTIVE.search(line):
                kind, axes, sent = _collective(match, line, inner, result)
                found[kind, axes, "ici"] += runs[name] * sent
            elif "_xla_megascale_transfer_type" in line and (match := SENT.search(line)):
                kind = re.search(r'_transfer_type="(\w+)"', line)[1].lower().replace("_", "-")
                share = _share(kind, slices)
                found[kind, (first,), "dcn"] += runs[name] * share * _bytes(match["shape"])
            elif re.search(r" (send|recv)\(", line) and "_transfer_type" not in line:
                found["unread", None, "?"] += 1
    return {key: sent for key, sent in found.items() if sent}


def _computations(text):
    """Returns, by name, the shape that a computation returns and its lines."""
    found = {}
    heads = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> (.*) \{\n((?:(?!\}$).*\n)*)\}$", re.M)
    for entry, name, result, body in heads.findall(text):
        found[name] = (result, body.splitlines())
        if entry:
            found["entry"] = found.pop(name)
    return found


def _runs(computations):
    """Returns how often each computation runs."""
    runs = collections.Counter()
    waiting = [("entry", 1)]
    while waiting:
        name, times = waiting.pop()
        runs[name] += times
        for line in computations[name][1]:
            if "async-update(" in line or "async-done(" in line:
                continue
            names = CALLED.findall(line)
            for branches in BRANCHES.findall(line):
                names += re.findall(r"[\w.\-]+", branches)
            trips = _trips(line, computations) if " while(" in line else 1
            waiting += [(called, times * trips) for called in names if called in computations]
    return runs


def _trips(line, computations):
    """Returns how often a loop runs: as its line says, or up to what its condition compares; not a
    number where neither tells, and then nothing that is sent in it is one."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    if known:
        return int(known[1])
    name = re.search(r"condition=%?([\w.\-]+)", line)[1]
    condition = computations[name][1]
    text = "\n".join(condition)
    constants = dict(re.findall(r"%([\w.\-]+) = s32\[\]\S* constant\((\d+)\)", text))
    (root,) = (line for line in condition if line.lstrip().startswith("ROOT"))
    bounds = [constants[name] for name in re.findall(r"%([\w.\-]+)", root) if name in constants]
    return int(bounds[0]) if len(bounds) == 1 else math.nan


def _collective(match, line, mesh, result):
    kind, shape = match["kind"], match["shape"]
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?\})\}", line)[1]
        groups = [[int(i) for i in pair] for pair in re.findall(r"(\d+),(\d+)", pairs)]
        moving = [group for group in groups if group[0] != group[1]]
        return kind, _varying(moving, mesh), _bytes(re.findall(r"\w+\[[\d,]*\]", shape)[0])
    groups = _groups(line)
    axes = _varying(groups, mesh)
    if axes is not None and len(groups[0]) != math.prod(mesh[axis] for axis in axes):
        axes = None
    size = _bytes(shape)
    if match["start"] and kind != "all-reduce":
        # The shape of a start is that of operands and results, one as large as the other or, of
        # what is gathered or scattered, as all parts.
        ratio = len(groups[0]) if kind in ("all-gather", "reduce-scatter") else 1
        size = size * ratio / (ratio + 1)
    elif kind == "reduce-scatter":
        size *= len(groups[0])
    elif kind == "all-reduce" and 0 < _bytes(result) * len(groups[0]) == size:
        kind = "reduce-scatter"  # of TPUs: a fusion that returns a part of what it reduces
    return kind, axes, size * _share(kind, len(groups[0]))


def _share(kind, devices):
    """What a device sends of a buffer by ring algorithms."""
    return (2 if kind == "all-reduce" else 1) * (devices - 1) / devices


def _groups(line):
    rows = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line)
    if rows:
        return [[int(i) for i in row.split(",")] for row in re.findall(r"\{([\d,]+)\}", rows[1])]
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\S+?),? ", line)
    if iota:
        return _iota(iota[3]).reshape(int(iota[1]), int(iota[2])).tolist()
    form = r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\]\S*?|[\d,]*)\))? \{(.*?)\}"
    axes, order, named = re.search(form, line).groups()
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    together = re.findall(r"'(\w+)'", named)
    assert ":" not in named, f"a part of an axis: {line}"
    count = math.prod(sizes.values())
    if not order:
        ids = np.arange(count)
    elif order.startswith("["):
        ids = _iota(order)
    else:
        ids = np.array([int(i) for i in order.split(",")])
    grid = ids.reshape(tuple(sizes.values()))
    groups = []
    for fixed in itertools.product(*(range(n) for a, n in sizes.items() if a not in together)):
        at = iter(fixed)
        where = tuple(slice(None) if axis in together else next(at) for axis in sizes)
        groups.append(grid[where].reshape(-1).tolist())
    return groups


def _iota(text):
    """Reads `[2,8]T(1,0)`: the numbers from 0 in rows of 8, columns first."""
    dims, order = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
    dims = [int(dim) for dim in dims.split(",")]
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids.transpose([int(i) for i in order.split(",")]) if order else ids).reshape(-1)


def _varying(groups, mesh):
    """Returns the axes along which the members of each group differ; None if groups disagree."""
    found = set()
    for group in groups:
        coordinates = np.unravel_index(np.array(group), tuple(mesh.values()))
        zipped = zip(mesh, coordinates, strict=True)
        found.add(tuple(axis for axis, at in zipped if len(set(at.tolist())) > 1))
    return found.pop() if len(found) == 1 else None


def _bytes(shape):
    total = 0
    for dtype, dims in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", shape):
        total += WIDTHS[dtype] * math.prod(int(dim) for dim in dims.split(",") if dim)
    return total
