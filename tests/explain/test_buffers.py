"""Live ranges of programs written by hand, and of real ones beside what XLA says of them."""

import jax
import jax.numpy as jnp
import pytest

from shardlib.explain.hlo.buffers import live_ranges


def program(entry, others="", header=""):
    first = f"HloModule m, is_scheduled=true{header}"
    return f"{first}\n{others}\nENTRY %main (p: f32[256]) -> f32[] {{\n{entry}\n}}\n"


def totals(text):
    """Bytes alive at each instruction, in KiB."""
    return [total / 1024 for total in live_ranges(text).totals]


def test_arguments_stay_and_temporaries_come_and_go():
    text = program("""
  %p = f32[256]{0} parameter(0)
  %a = f32[512]{0} broadcast(%p), dimensions={0}
  %b = f32[256]{0} reduce(%a, %p), dimensions={0}, to_apply=%add
  ROOT %c = f32[1024]{0} broadcast(%b), dimensions={0}
""")
    # 1 of the argument all along; 2 of `a` until `b` is made; the result until the end.
    assert totals(text) == [1 + 2, 1 + 2 + 1, 1 + 1 + 4]
    ranges = live_ranges(text)
    assert (ranges.peak_bytes, ranges.peak) == (6 * 1024, 2)
    alive = [(b.name, b.bytes, b.argument, b.is_output) for b in ranges.alive(ranges.peak)]
    assert alive == [("c", 4096, None, True), ("p", 1024, 0, False), ("b", 1024, None, False)]


LOOP = """
%body (t: (f32[256], f32[8,256])) -> (f32[256], f32[8,256]) {
  %t = (f32[256]{0}, f32[8,256]{1,0}) parameter(0)
  %x = f32[256]{0} get-tuple-element(%t), index=0
  %stack = f32[8,256]{1,0} get-tuple-element(%t), index=1
  %work = f32[4096]{0} broadcast(%x), dimensions={0}
  %next = f32[256]{0} reduce(%work, %x), dimensions={0}, to_apply=%add
  %update = f32[8,256]{1,0} dynamic-update-slice(%stack, %next, %i)
  ROOT %out = (f32[256]{0}, f32[8,256]{1,0}) tuple(%next, %update)
}

%cond (t.1: (f32[256], f32[8,256])) -> pred[] {
  %t.1 = (f32[256]{0}, f32[8,256]{1,0}) parameter(0)
  ROOT %lt = pred[] constant(false)
}
"""


def test_what_a_loop_carries_is_alive_around_what_one_turn_needs():
    text = program(
        """
  %p = f32[256]{0} parameter(0)
  %start = f32[256]{0} broadcast(%p), dimensions={0}
  %zeros = f32[8,256]{1,0} broadcast(%p), dimensions={}
  %waits = f32[1024]{0} broadcast(%p), dimensions={0}
  %init = (f32[256]{0}, f32[8,256]{1,0}) tuple(%start, %zeros)
  %loop = (f32[256]{0}, f32[8,256]{1,0}) while(%init), condition=%cond, body=%body
  %stacked = f32[8,256]{1,0} get-tuple-element(%loop), index=1
  ROOT %end = f32[] reduce(%stacked, %waits), dimensions={0,1}, to_apply=%add
""",
        LOOP,
    )
    ranges = live_ranges(text)
    # The argument, the carried row and stack, what waits behind the loop, and the work of a turn.
    assert ranges.peak_bytes == (1 + 1 + 8 + 4 + 16) * 1024
    assert ranges.label(ranges.peak) == "work"
    (stack,) = [b for b in ranges.buffers if b.shape.startswith("f32[8,256]")]
    assert stack.name == "zeros"
    # The update writes in place, and the end still reads it.
    assert ranges.label(stack.end) == "end"


def test_what_a_turn_has_read_is_gone_until_it_makes_the_next():
    body = """
%body (t: (f32[4096])) -> (f32[4096]) {
  %t = (f32[4096]{0}) parameter(0)
  %x = f32[4096]{0} get-tuple-element(%t), index=0
  %small = f32[256]{0} reduce(%x, %zero), dimensions={0}, to_apply=%add
  %large = f32[2048]{0} broadcast(%small), dimensions={0}
  %small.2 = f32[256]{0} reduce(%large, %zero), dimensions={0}, to_apply=%add
  %next = f32[4096]{0} broadcast(%small.2), dimensions={0}
  ROOT %out = (f32[4096]{0}) tuple(%next)
}

%cond (t.1: (f32[4096])) -> pred[] {
  %t.1 = (f32[4096]{0}) parameter(0)
  ROOT %lt = pred[] constant(false)
}
"""
    text = program(
        """
  %p = f32[256]{0} parameter(0)
  %start = f32[4096]{0} broadcast(%p), dimensions={0}
  %init = (f32[4096]{0}) tuple(%start)
  %loop = (f32[4096]{0}) while(%init), condition=%cond, body=%body
  ROOT %end = f32[4096]{0} get-tuple-element(%loop), index=0
""",
        body,
    )
    ranges = live_ranges(text)
    at = {ranges.label(n): total / 1024 for n, total in enumerate(ranges.totals)}
    assert (at["small"], at["large"], at["next"]) == (1 + 16 + 1, 1 + 1 + 8, 1 + 1 + 16)
    (carried,) = [b for b in ranges.buffers if b.bytes == 4096 * 4]
    assert (carried.name, len(carried.spans), carried.is_output) == ("start", 2, True)


def test_a_donated_argument_takes_the_result():
    entry = """
  %p = f32[256]{0} parameter(0)
  %new = f32[256]{0} reduce(%p, %p), dimensions={0}, to_apply=%add
  ROOT %r = (f32[256]{0}) tuple(%new)
"""
    header = ", input_output_alias={ {0}: (0, {}, may-alias) }, entry_computation_layout={()}"
    assert live_ranges(program(entry)).peak_bytes == 2 * 1024
    donated = live_ranges(program(entry, header=header))
    assert donated.peak_bytes == 1024
    (both,) = [b for b in donated.buffers if b.bytes]
    assert (both.argument, both.is_output) == (0, True)


FUSED = """
%fused (a: f32[1024], b: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %b = f32[1024]{0} parameter(1)
  %turned = f32[1024]{0} reverse(%b), dimensions={0}
  ROOT %sum = f32[1024]{0} add(%a, %turned)
}

%updated (c: f32[1024], d: f32[256]) -> f32[1024] {
  %c = f32[1024]{0} parameter(0)
  %d = f32[256]{0} parameter(1)
  %written = f32[1024]{0} dynamic-update-slice(%c, %d, %i)
  ROOT %same = f32[1024]{0} bitcast(%written)
}
"""


TPU_CONFIG = 'backend_config={{"aliasing_operands":{{"lists":[{}]}}}}'
SHARED, APART = 1 + 4 + 4, 1 + 4 + 4 + 4


@pytest.mark.parametrize(
    ("instruction", "read_later", "peak"),
    [
        # Element for element: into the memory of an operand that nobody reads later.
        ("add(%x, %y)", "p", SHARED),
        ("add(%x, %y)", "x", SHARED),
        ("add(%x, %x)", "x, %y", APART),
        ("fusion(%x, %y), kind=kLoop, calls=%fused", "y", SHARED),
        ("fusion(%x, %y), kind=kLoop, calls=%fused", "x", APART),
        # An update in place.
        ("fusion(%x, %p), kind=kLoop, calls=%updated", "y", SHARED),
        ("dynamic-update-slice(%x, %p, %i)", "y", SHARED),
        ("reverse(%x), dimensions={0}", "y", APART),
        ("copy(%x)", "y", APART),
        # The compiler for TPUs says itself which operand it is.
        (f"fusion(%x, %y), calls=%fused, {TPU_CONFIG.format('')}", "y", APART),
        (
            "fusion(%x, %y), calls=%turned, " + TPU_CONFIG.format('{"indices":["0","2"]}'),
            "y",
            SHARED,
        ),
        ("custom-call(%x, %y), output_to_operand_aliasing={{}: (1, {})}", "x", SHARED),
    ],
)
def test_a_result_may_take_the_memory_of_an_operand(instruction, read_later, peak):
    text = program(
        f"""
  %p = f32[256]{{0}} parameter(0)
  %x = f32[1024]{{0}} broadcast(%p), dimensions={{0}}
  %y = f32[1024]{{0}} broadcast(%p), dimensions={{0}}
  %z = f32[1024]{{0}} {instruction}
  ROOT %r = f32[] custom-call(%z, %{read_later})
""",
        FUSED,
    )
    assert totals(text)[2] == peak


def test_the_halves_of_asynchronous_operations():
    text = program("""
  %p = f32[256]{0} parameter(0)
  %ag = (f32[256]{0}, f32[2048]{0}) all-gather-start(%p), dimensions={0}
  %copy = (f32[256]{0}, f32[256]{0}, u32[]) copy-start(%p)
  %other = f32[512]{0} broadcast(%p), dimensions={0}
  %copied = f32[256]{0} copy-done(%copy)
  %gathered = f32[2048]{0} all-gather-done(%ag)
  %ar = f32[512]{0} all-reduce-start(%other), to_apply=%add
  %summed = f32[512]{0} all-reduce-done(%ar)
  ROOT %r = (f32[2048]{0}, f32[512]{0}, f32[256]{0}) tuple(%gathered, %summed, %copied)
""")
    # The argument; the gathered; the copy, and 4 bytes of its context; `other`, then its sum.
    context = 4 / 1024
    assert totals(text)[:3] == [1 + 8, 1 + 8 + 1 + context, 1 + 8 + 1 + context + 2]
    assert totals(text)[5] == 1 + 8 + 1 + 2


@pytest.mark.parametrize(
    ("opcode", "header", "peak"),
    [
        ("all-reduce", "", 1 + 4 + 4),
        ("all-reduce", ", entry_computation_layout={(f32[256]{0:T(256)})->f32[]}", 1 + 4),
        ("all-reduce-start", "", 1 + 4),
    ],
)
def test_accelerators_sum_in_place(opcode, header, peak):
    text = program(
        f"""
  %p = f32[256]{{0}} parameter(0)
  %x = f32[1024]{{0}} broadcast(%p), dimensions={{0}}
  %sum = f32[1024]{{0}} {opcode}(%x), channel_id=1, to_apply=%add
  ROOT %r = f32[] custom-call(%sum)
""",
        header=header,
    )
    assert totals(text)[1] == peak


def test_a_buffer_comes_from_its_first_writer_that_has_a_source():
    text = program(
        """
  %p = f32[256]{0} parameter(0), metadata={op_name="x"}
  %stack = f32[8,256]{1,0} broadcast(%p), dimensions={}
  %first = f32[8,256]{1,0} dynamic-update-slice(%stack, %p, %i), metadata={\
op_name="jit(step)/jvp()/dot_general" source_file="model.py" source_line=7}
  ROOT %second = f32[8,256]{1,0} dynamic-update-slice(%first, %p, %i), metadata={\
op_name="jit(step)/mul" source_file="model.py" source_line=9}
"""
    )
    (stack,) = [b for b in live_ranges(text).buffers if b.bytes == 8 * 1024]
    assert (stack.name, stack.opcode) == ("stack", "broadcast")
    computation, writer, output = stack.made_by
    assert (computation, writer.name, output) == ("main", "first", 0)


def test_branches_and_calls_return_what_their_roots_are():
    others = """
%left (a: f32[256]) -> f32[512] {
  %a = f32[256]{0} parameter(0)
  %big = f32[4096]{0} broadcast(%a), dimensions={0}
  ROOT %l = f32[512]{0} reduce(%big, %a), dimensions={0}, to_apply=%add
}

%right (b: f32[256]) -> f32[512] {
  %b = f32[256]{0} parameter(0)
  ROOT %r = f32[512]{0} broadcast(%b), dimensions={0}
}
"""
    text = program(
        """
  %p = f32[256]{0} parameter(0)
  %which = pred[] constant(true)
  %c = f32[512]{0} conditional(%which, %p, %p), true_computation=%left, false_computation=%right
  ROOT %d = f32[512]{0} call(%p), to_apply=%right
""",
        others,
    )
    assert live_ranges(text).peak_bytes == (1 + 2 + 16) * 1024


def test_what_cannot_be_read_is_left_out():
    text = program("""
  %p = f32[256]{0} parameter(0)
  %odd = future[8] frobnicate(%a, {weird}), thing=<[=
  %x = f32[1024]{0} unheard-of(%p, %nowhere), with={a=b}
  ROOT %r = f32[] reduce(%x, %odd), dimensions={0}, to_apply=%add
""")
    assert live_ranges(text).peak_bytes >= 5 * 1024
    assert live_ranges("").totals == ()
    assert live_ranges("").timeline() == ()


def scanned_step(layers, width, rows):
    """A training step of a scanned MLP with saved activations, donated parameters."""

    def loss(params, x):
        def layer(h, weights):
            return jnp.tanh(h @ weights) @ weights.T, None

        h, _ = jax.lax.scan(layer, x, params)
        return jnp.mean(h**2)

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return params - 0.1 * gradients, value

    params = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    return jax.jit(step, donate_argnums=0).lower(params, x).compile()


@pytest.mark.parametrize("sizes", [(4, 128, 512), (8, 256, 64), (2, 64, 2048)])
def test_a_cpu_program_holds_what_its_live_ranges_tell(sizes):
    compiled = scanned_step(*sizes)
    stats = compiled.memory_analysis()
    held = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    held += stats.output_size_in_bytes - stats.alias_size_in_bytes
    live = live_ranges(compiled.as_text()).peak_bytes
    assert live <= held
    # What XLA adds is gaps between buffers: here room for one more activation, and rounding.
    _, width, rows = sizes
    assert held - live <= rows * width * 4 + 64 * 100
