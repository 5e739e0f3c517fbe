"""Plans, and fixes for a step that does not fit, against their programs: peak memory and fit.

    python benchmarks/plan_holds.py                  # scores the programs that are stored
    python benchmarks/plan_holds.py --missing        # compiles those that are not, and stores them
    python benchmarks/plan_holds.py --missing --only v5e-16 --most 4

A question is a published model (dense of 1B to 405B, or with experts), a cluster and a batch. Its
run keeps all activations, in one microbatch, with the state sharded over all devices, so that it
seldom fits. Its proposals are the first plan of `shardlib plan CONFIG --on CLUSTER`, and the first
three fixes that `shardlib explain CONFIG --on CLUSTER` would compile. Each is compiled ahead of
time with its settings, except an optimizer state in host memory on GPUs: XLA refuses to compile it
for GPUs that are not attached. The predicted peak is that of the cost model without the memory of
the runtime, which is in no program; whether a proposal fits is read from the program's peak.

The last line is JSON: `questions` and `proposals`; `compiled`, those whose programs are stored;
`out_of_memory`, those that do not fit; `within_8%`, a share, and `off`, those that are not in it;
`median_error`, `p90_error` and `max_error`, of absolute relative errors.
"""

import argparse
import dataclasses
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

import jax
import numpy as np

from compiled_peaks import Peaks, measured, predicted
from shardlib.config import from_dict, to_dict
from shardlib.cost.costs import Memory
from shardlib.errors import DoesNotFitError, MeshError, ShardlibError
from shardlib.hardware import Cluster, parse_cluster
from shardlib.hardware.capacity import capacity
from shardlib.plan.request import Question as Asked
from shardlib.plan.result import Plans
from shardlib.plan.settings import Settings, to_overrides
from shardlib.run.config import RunConfig
from shardlib.run.plans.planning import fixes_of, plan_run
from shardlib.run.reports.explaining import with_settings

STORED = Peaks(Path(__file__).parent / "data" / "proposed_memory.json")
MOST_ERROR = 0.08
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Question:
    """A model, a cluster and the sequences of a step."""

    model: str
    on: str
    batch: int
    length: int = 4096

    @property
    def name(self) -> str:
        return f"{self.model} {self.on} {self.batch}x{self.length}"

    @property
    def cluster(self) -> Cluster:
        return parse_cluster(self.on)

    def run(self) -> RunConfig:
        """Returns the run that is asked about."""
        # cuDNN's cannot be compiled where cuDNN is not installed; both keep as much.
        on_gpu = self.cluster.platform == "gpu"
        attention = {"attention": "blockwise"} if on_gpu else {}
        return from_dict(
            RunConfig,
            {
                "model": {"size": self.model, "remat": "none", **attention},
                "data": {"path": "corpus", "sequence_length": self.length},
                "optimizer": {"name": "adamw"},
                "train": {"steps": 1000, "global_batch": self.batch},
                "mesh": f"fsdp={self.cluster.num_devices}",
                "precision": "bf16",
            },
            "a question",
        )


QUESTIONS = (
    Question("llama3-8b", "v5e-16", 128),
    Question("llama3.2-1b", "8xh100", 256),
    Question("mixtral-8x7b", "v5p-128", 256),
    Question("llama3-70b", "64xh100", 256),
    Question("qwen3-30b-a3b", "32xh100", 256),
    Question("llama3-70b", "v5e-256", 512),
    Question("llama3-8b", "8xh100", 128, 8192),
    Question("deepseek-v2-lite", "v5e-64", 256),
    Question("llama3.1-405b", "v6e-256", 256, 8192),
    Question("llama2-13b", "16xa100-80", 256),
    Question("llama3.2-3b", "v5e-8", 64),
    Question("qwen3-14b", "v6e-64", 256),
    Question("mixtral-8x7b", "64xh100", 512),
    Question("gemma-7b", "v5p-16", 128, 8192),
    Question("llama3-8b", "v5p-8", 64, 8192),
    Question("qwen2.5-7b", "8xa100-80", 128),
    Question("llama3-70b", "v5p-128", 256, 8192),
    Question("deepseek-v2-lite", "16xh100", 256),
    Question("mixtral-8x22b", "v6e-256", 512),
    Question("llama3.2-1b", "v5e-8", 128, 8192),
    Question("qwen3-32b", "32xh100", 256, 8192),
    Question("llama2-70b", "v6e-128", 512),
    Question("qwen3-8b", "v5e-32", 128, 8192),
    Question("qwen3-30b-a3b", "v5p-64", 256),
    Question("llama2-7b", "8xh100", 256),
    Question("gemma2-9b", "v6e-16", 64, 8192),
    Question("llama3-8b", "64xh100", 512, 8192),
    Question("gpt2-xl", "8xa100-80", 512, 1024),
    Question("mistral-7b", "v5e-64", 256, 8192),
    Question("qwen3-1.7b", "v6e-8", 128),
    Question("llama2-13b", "v5e-128", 512),
    Question("mixtral-8x7b", "v6e-64", 256),
    Question("llama3.1-405b", "v5p-1024", 512, 8192),
    Question("qwen2.5-72b", "64xa100-80", 256),
    Question("qwen3-4b", "v5e-16", 256),
    Question("pythia-12b", "16xh100", 512, 2048),
    Question("llama3.2-3b", "8xa100-80", 256),
    Question("opt-30b", "v5p-32", 256, 2048),
    Question("qwen3-14b", "16xh100", 256),
    Question("llama3-8b", "v6e-256", 1024),
)
"""The most diverse come first."""


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A change of a run that is said to fit."""

    question: Question
    what: str
    """`plan`, or `fix 1` to `fix 3`."""
    settings: Settings
    cluster: Cluster
    """That of the question, or a larger one."""
    memory: Memory

    @property
    def name(self) -> str:
        """The question and all that the proposal changes, in one line."""
        changes = to_overrides(_changed(self.question.run(), self.settings))
        larger = [] if self.cluster.name == self.question.cluster.name else [self.cluster.name]
        return " ".join([self.question.name, *larger, *changes])

    def config(self) -> RunConfig:
        """Returns the run with the change."""
        return with_settings(self.question.run(), self.settings)


def _changed(config: RunConfig, settings: Settings) -> Settings:
    """Returns the settings whose values differ from those of a run."""

    def value(path: str) -> Any:
        at = to_dict(config)
        for key in path.split("."):
            at = at[key]
        return at

    return {path: new for path, new in settings.items() if value(path) != new}


def proposals(question: Question) -> Iterator[Proposal]:
    """Yields the first plan of a question, if it has any, and its fixes."""
    config, cluster = question.run(), question.cluster
    try:
        plans = plan_run(config, Asked(on=question.on, top=1))
    except MeshError as error:
        print(f"{question.name}: {str(error).splitlines()[0]}", flush=True)
    else:
        assert isinstance(plans, Plans)
        best = plans.best
        yield Proposal(question, "plan", plans.settings(best), best.cluster, best.memory)
    peak = predicted(config, cluster).total
    for number, fix in enumerate(fixes_of(config, cluster, peak), 1):
        plan = fix.plan
        yield Proposal(question, f"fix {number}", fix.settings, plan.cluster, plan.memory)


@dataclasses.dataclass(frozen=True)
class Scored:
    """A proposal with the peak of its program, in bytes of one device."""

    proposal: Proposal
    peak: int

    @property
    def error(self) -> float:
        """Predicted over compiled, less 1; what the runtime takes is in neither."""
        memory = self.proposal.memory
        return (memory.total - memory.runtime) / self.peak - 1

    @property
    def fits(self) -> bool:
        limit = capacity(self.proposal.cluster.chip)
        assert limit is not None
        return self.peak <= limit.usable_bytes

    @property
    def line(self) -> str:
        """Both peaks in GiB, the error, whether it fits, and the proposal."""
        memory = self.proposal.memory
        numbers = f"{self.peak / _GIB:8.2f} {(memory.total - memory.runtime) / _GIB:9.2f}"
        fits = "yes" if self.fits else "NO"
        return (
            f"{numbers} {self.error:+6.1%}  {fits:4} {self.proposal.what:5}  {self.proposal.name}"
        )


def compile_missing(wanted: list[Proposal], most: int | None) -> None:
    """Compiles proposals that are not stored, and stores their peaks, each as soon as it is known.

    Args:
        wanted: The proposals. Every plan comes before every fix.
        most: Most programs to compile; None for all.
    """
    for proposal in sorted(wanted, key=lambda p: p.what != "plan"):
        if most == 0:
            return
        if proposal.name in STORED.load()["cells"]:
            continue
        most = None if most is None else most - 1
        try:
            found = measured(proposal.config(), proposal.cluster)
        except DoesNotFitError as error:
            found = {"peak": error.needed_bytes}
        except (ShardlibError, jax.errors.JaxRuntimeError) as error:
            print(f"not compiled: {proposal.name}: {str(error).splitlines()[0]}", flush=True)
            continue
        STORED.add(proposal.name, found)
        print(Scored(proposal, found["peak"]).line, flush=True)


def summary(questions: int, proposed: int, scores: list[Scored]) -> dict[str, Any]:
    """Returns the last line."""
    errors = [abs(score.error) for score in scores]
    off = [score for score in scores if abs(score.error) > MOST_ERROR]
    return {
        "questions": questions,
        "proposals": proposed,
        "compiled": len(scores),
        "out_of_memory": [score.proposal.name for score in scores if not score.fits],
        f"within_{MOST_ERROR:.0%}": round(1 - len(off) / max(len(scores), 1), 4),
        "off": {score.proposal.name: round(score.error, 3) for score in off},
        "median_error": round(statistics.median(errors), 4) if errors else None,
        "p90_error": round(float(np.quantile(errors, 0.9)), 4) if errors else None,
        "max_error": round(max(errors), 4) if errors else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--missing", action="store_true", help="compile those that are not stored")
    parser.add_argument("--only", default="", help="questions whose name holds this")
    parser.add_argument("--most", type=int, help="most programs to compile")
    options = parser.parse_args()
    asked = [question for question in QUESTIONS if options.only in question.name]
    proposed = [proposal for question in asked for proposal in proposals(question)]
    if options.missing:
        compile_missing(proposed, options.most)
    data = STORED.load()
    print("compiled with " + ", ".join(f"{k} {v}" for k, v in data["versions"].items()))
    known = [proposal for proposal in proposed if proposal.name in data["cells"]]
    scores = [Scored(proposal, data["cells"][proposal.name]["peak"]) for proposal in known]
    print(f"{'compiled':>8} {'predicted':>9} {'error':>6}  fits  what   proposal")
    print("\n".join(score.line for score in scores))
    print(json.dumps(summary(len(asked), len(proposed), scores)))


if __name__ == "__main__":
    main()
