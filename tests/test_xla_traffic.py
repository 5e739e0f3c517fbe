"""What XLA sends in vain by docs/xla_traffic.md is still sent."""

import pathlib
import re

import pytest

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "xla_traffic.md"
COMPILERS = {"TPU": ("libtpu", "tpu"), "GPU": ("jax_cuda12_plugin", "cuda")}
"""The package that compiles for a platform, and the extra that has it."""


def programs():
    """Returns title, platform and program of each fault."""
    text = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    program = r"^## ([^\n]*?) \((\w+)\)$.*?```python\n(.*?)```"
    return re.findall(program, text, re.DOTALL | re.MULTILINE)


@pytest.mark.aot
@pytest.mark.parametrize(("title", "on", "program"), programs(), ids=[p[0] for p in programs()])
def test_it_is_still_sent(title, on, program, capsys):
    package, extra = COMPILERS[on]
    pytest.importorskip(package, reason=f"needs the extra {extra}")
    assert len(program.splitlines()) <= 15
    names = {}
    exec(compile(program, "fault.py", "exec"), names)
    assert names["found"], (
        f"XLA has mended: {title}. Remove it from {DOCUMENT.name} once this version is the oldest "
        "that is supported."
    )
