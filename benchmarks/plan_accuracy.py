"""How well the analytic cost model predicts published runs.

    python benchmarks/plan_accuracy.py --runs benchmarks/data/published_runs.json

Each row that can be read is predicted with the committed constants and compared with the published
step time, or with what its rate or TFLOP/s imply by the row's own convention of FLOPs. Rows of
8-bit precision stand apart. Cross-validation (not with `--no-cv`) fits the constants anew to the
committed runs without the row's whole family; `cv_coverage` is the fraction of rows within the 90%
interval that the other families give. `--fit` first fits and writes the package's
constants. Constants marked `judged` had no measurement behind them before the fit. The last line is
JSON; its `prior_` figures are of constants from datasheets and
microbenchmarks alone, as they were before any run was fitted.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from published import Case, read_file
from published.fit_constants import calibrate, coverage, cross_validate, error, percentile, save
from shardlib.cost.machine import constants as plan_constants
from shardlib.cost.machine.constants import PRIORS, committed, judged

DATA = Path(__file__).parent / "data" / "published_runs.json"
CONSTANTS = Path(plan_constants.__file__).parent / "constants.json"


def main() -> None:
    """Prints the table and the summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, default=DATA)
    parser.add_argument("--no-cv", action="store_true", help="leave out the cross-validation")
    parser.add_argument("--fit", action="store_true", help="fit the package's constants anew first")
    options = parser.parse_args()
    known = [case for case in read_file(DATA)[0] if not case.eight_bit]
    constants = committed()
    if options.fit:
        fit = calibrate(known)
        constants = fit.constants
        save(fit, CONSTANTS, known, cross_validate(known, known, constants))
    dims = json.loads(DATA.read_text())["model_dims"]["dims"]
    cases, left_out = read_file(options.runs, dims)
    halves = [case for case in cases if not case.eight_bit]
    errors = {case.id: error(case, constants) for case in cases}
    expected = {name: prior.value for name, prior in PRIORS.items()}
    from_datasheets = {case.id: error(case, expected) for case in halves}
    validated = {} if options.no_cv else cross_validate(halves, known, constants)
    print("16-bit rows")
    _table(halves, errors, validated)
    _families(halves, errors, validated)
    print("\n8-bit rows, apart: no constant was fitted to them")
    _table([case for case in cases if case.eight_bit], errors, {})
    print(f"\nleft out: {len(left_out)} rows, each for what its record lacks")
    for name, reason in left_out:
        print(f"  {name:32} {reason}")
    print()
    _assumptions(halves)
    _constants(constants)
    summary = {"rows": len(halves)} | _figures("", halves, errors)
    summary |= _figures("cv_", halves, validated) | _figures("prior_", halves, from_datasheets)
    experts = [case for case in halves if case.job.model.experts]
    stages = [case for case in halves if case.layout.stage > 1]
    summary |= _figures("cv_moe_", experts, validated)
    summary |= _figures("cv_pipelined_", stages, validated)
    summary |= _figures("eight_bit_", [case for case in cases if case.eight_bit], errors)
    several = len({case.family for case in halves}) > 1
    covered = round(coverage(halves, validated), 4) if validated and several else None
    print(json.dumps(summary | {"cv_coverage": covered}))


def _table(cases: Sequence[Case], errors: Mapping[str, float], cv: Mapping[str, float]) -> None:
    print(
        f"{'row':30} {'chip':8} {'chips':>5} {'model':22} {'layout':34} {'published':>10} "
        f"{'predicted':>10} {'TFLOP/s':>8} {'by':8} {'error':>7} {'cv':>7}"
    )
    for case in cases:
        chip = case.cluster.chip.name if case.cluster.chip else "?"
        predicted = case.seconds * (1 + errors[case.id])
        validated = f"{cv[case.id]:+7.1%}" if case.id in cv else ""
        print(
            f"{case.id:30} {chip:8} {case.cluster.num_chips:5} {case.model_name[:22]:22} "
            f"{str(case.layout)[:34]:34} {case.seconds:9.3f}s {predicted:9.3f}s "
            f"{case.tflops_per_chip:8.1f} {case.convention:8} {errors[case.id]:+7.1%} {validated}"
        )


def _families(cases: Sequence[Case], errors: Mapping[str, float], cv: Mapping[str, float]) -> None:
    print(f"\n{'family':28} {'rows':>4} {'bias':>7} {'median':>7} {'p90':>7} {'cv median':>9}")
    for family in sorted({case.family for case in cases}):
        ids = [case.id for case in cases if case.family == family]
        signed = [errors[i] for i in ids]
        sizes = sorted(map(abs, signed))
        validated = [abs(cv[i]) for i in ids if i in cv]
        print(
            f"{family:28} {len(ids):4} {statistics.median(signed):+7.1%} "
            f"{statistics.median(sizes):7.1%} {percentile(sizes, 0.9):7.1%} "
            f"{f'{statistics.median(validated):9.1%}' if validated else '':>9}"
        )


def _assumptions(cases: Sequence[Case]) -> None:
    """What was assumed where records are silent, with how many rows each touches."""
    counts: dict[str, int] = {}
    for case in cases:
        for text in case.assumed:
            counts[text] = counts.get(text, 0) + 1
    for text, count in sorted(counts.items()):
        print(f"assumed for {count:3} rows: {text}")


def _constants(constants: Mapping[str, float]) -> None:
    print(f"\n{'constant':22} {'fitted':>9} {'expected':>9}")
    for name, value in constants.items():
        source = "judged" if name in judged() else PRIORS[name].source
        print(f"{name:22} {value:9.4g} {PRIORS[name].value:9.4g} {source}")


def _figures(
    prefix: str, cases: Sequence[Case], errors: Mapping[str, float]
) -> dict[str, float | None]:
    """Median and 90th percentile of the absolute errors."""
    sizes = sorted(abs(errors[case.id]) for case in cases if case.id in errors)
    return {
        f"{prefix}median_error": round(statistics.median(sizes), 4) if sizes else None,
        f"{prefix}p90_error": round(percentile(sizes, 0.9), 4) if sizes else None,
    }


if __name__ == "__main__":
    main()
