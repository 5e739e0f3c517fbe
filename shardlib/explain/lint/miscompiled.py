"""Check for miscompiled operations (SL205 to SL210), which `explain.wrong_numbers` finds."""

from collections.abc import Iterator

from shardlib.explain.lint.findings import Finding
from shardlib.explain.lint.subject import Subject
from shardlib.explain.wrong_numbers import read


def miscompiled(subject: Subject) -> Iterator[Finding]:
    """Yields SL205 to SL210: miscompiled operations of any size."""
    specs = {number: leaf.spec for number, leaf in subject.by_number.items() if leaf.spec}
    for fault in read(subject.module, subject.mesh, subject.jaxpr, specs):
        yield Finding(
            fault.code,
            fault.where.place(),
            f"{fault.what[:-1]}: the loss or its gradients are wrong.",
            f"{fault.fix} Then compare with one device with sl.testing.assert_equivalent.",
            fault.where.source,
            fault.where.name,
        )
