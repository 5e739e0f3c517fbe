import functools

import pytest
from problems import PROBLEMS

from shardlib.rules import preset


@pytest.fixture(scope="session")
def compare():
    """Trains a case and holds it against one device, each of both once in a session."""

    @functools.cache
    def reference(model, microbatches, changes):
        return PROBLEMS[model].reference(microbatches, changes)

    @functools.cache
    def run(case):
        one = reference(case.model, case.microbatches, case.changes)
        make = PROBLEMS[case.model].make((*case.changes, *case.how)) if case.how else None
        return one.compare(
            case.mesh,
            rules=preset(case.rules),
            steps=case.steps,
            make_model=make,
            **dict(case.options),
        )

    return run
