"""Bytes and FLOPs of the kernels of programs written by hand."""

import math

from shardlib.explain.analysis.kernel_cost import KernelCosts
from shardlib.explain.hlo.text import parse

# Kernels of a scheduled program: a slice of a stack is read, another is written in place.
PROGRAM = """HloModule jit_step, is_scheduled=true, num_partitions=1, \
entry_computation_layout={(f32[8,64,64]{2,1,0})->f32[8,64,64]{2,1,0}}

%read (stack: f32[8,64,64], i: s32[]) -> f32[64,64] {
  %stack = f32[8,64,64]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = f32[1,64,64]{2,1,0} dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={1,64,64}
  ROOT %flat = f32[64,64]{1,0} bitcast(%cut)
}

%write (into: f32[8,64,64], new: f32[64,64], j: s32[]) -> f32[8,64,64] {
  %into = f32[8,64,64]{2,1,0} parameter(0)
  %new = f32[64,64]{1,0} parameter(1)
  %j = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %one = f32[1,64,64]{2,1,0} bitcast(%new)
  ROOT %put = f32[8,64,64]{2,1,0} dynamic-update-slice(%into, %one, %j, %zero.1, %zero.1)
}

%body (t: (s32[], f32[8,64,64])) -> (s32[], f32[8,64,64]) {
  %t = (s32[], f32[8,64,64]{2,1,0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %all = f32[8,64,64]{2,1,0} get-tuple-element(%t), index=1
  %w = f32[64,64]{1,0} fusion(%all, %n), kind=kLoop, calls=%read
  %square = f32[64,64]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(step)/jvp()/while/body/dot_general"}
  %next = f32[8,64,64]{2,1,0} fusion(%all, %square, %n), kind=kLoop, calls=%write
  ROOT %out = (s32[], f32[8,64,64]{2,1,0}) tuple(%n, %next)
}

%cond (t.1: (s32[], f32[8,64,64])) -> pred[] {
  %t.1 = (s32[], f32[8,64,64]{2,1,0}) parameter(0)
  ROOT %go = pred[] custom-call(%t.1), custom_call_target="go"
}

ENTRY %main (p: f32[8,64,64]) -> f32[8,64,64] {
  %p = f32[8,64,64]{2,1,0} parameter(0)
  %first = s32[] constant(0)
  %init = (s32[], f32[8,64,64]{2,1,0}) tuple(%first, %p)
  %loop = (s32[], f32[8,64,64]{2,1,0}) while(%init), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"8"}}
  ROOT %result = f32[8,64,64]{2,1,0} get-tuple-element(%loop), index=1
}
"""


def test_bytes_of_slices_and_of_updates_in_place():
    module = parse(PROGRAM)
    work = KernelCosts(module)
    matrix = 4 * 64 * 64
    found = {
        kernel.name: (work.bytes_of(where, kernel), work.flops_of(where, kernel))
        for where, kernel in work.kernels
        if where == "body"
    }
    assert found == {
        "w": (2 * matrix + 4, 0.0),
        "square": (3 * matrix, 2 * 64**3),
        "next": (2 * matrix + 4, 0.0),
    }
    assert math.isclose(sum(size for size, _ in found.values()), 7 * matrix + 8)


def test_a_combined_all_reduce_reads_and_writes_all_of_its_arrays():
    module = parse("""ENTRY %main (a: f32[1024], b: f32[8]) -> f32[8] {
  %a = f32[1024]{0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %s = (f32[1024]{0}, f32[8]{0}) all-reduce-start(%a, %b), channel_id=1, to_apply=%add
  %d = (f32[1024]{0}, f32[8]{0}) all-reduce-done(%s)
  ROOT %r = f32[8]{0} get-tuple-element(%d), index=1
}
""")
    work = KernelCosts(module)
    (found,) = (work.bytes_of(where, kernel) for where, kernel in work.kernels)
    assert found == 2 * (4096 + 32)
