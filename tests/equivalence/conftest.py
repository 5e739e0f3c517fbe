import functools

import pytest
from problems import PROBLEMS


@pytest.fixture(scope="package")
def compare():
    """Trains a case and holds it against one device; each training on one device is made once.

    With `keep` a comparison stays, with its compiled program, until it is asked for without.
    """
    kept = {}

    @functools.cache
    def reference(model, microbatches, changes):
        return PROBLEMS[model].reference(microbatches, changes)

    def run(case):
        one = reference(case.model, case.reference_microbatches, case.changes)
        make = PROBLEMS[case.model].make((*case.changes, *case.how)) if case.how else None
        return one.compare(
            case.mesh, rules=case.rules, steps=case.steps, make_model=make, **case.options
        )

    def compared(case, *, keep=False):
        found = kept.pop(case) if case in kept else run(case)
        if keep:
            kept[case] = found
        return found

    return compared
