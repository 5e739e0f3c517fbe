"""Tokens that travel to a host once, for all their experts there."""

import dataclasses
import importlib
from itertools import combinations
from pathlib import Path

import pytest

from shardlib.cost.layout import Layout, Software
from shardlib.cost.transformer.flops import step_flops
from shardlib.cost.transformer.step_time import step_time
from shardlib.cost.workload import Experts, Job
from shardlib.hardware import parse_cluster
from shardlib.plan.workloads.named_models import NAMED

DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "published_runs.json"


@pytest.mark.parametrize(("number", "per_token", "hosts"), [(8, 2, 2), (8, 3, 4), (12, 4, 3)])
def test_hosts_reached_is_the_mean_over_all_choices(number, per_token, hosts):
    choices = list(combinations(range(number), per_token))
    here = number // hosts
    others = [len({expert // here for expert in choice} - {0}) for choice in choices]
    found = Experts(number, per_token, 64).hosts_reached(hosts)
    assert found == pytest.approx(sum(others) / len(others))


def test_groups_limit_the_hosts_of_a_token():
    free, limited = Experts(256, 8, 64), Experts(256, 8, 64, groups=(8, 4))
    assert free.hosts_reached(8) > limited.hosts_reached(8) == pytest.approx(3.5)
    assert free.hosts_reached(2) == limited.hosts_reached(2) < 1


def test_fewer_copies_cross_the_network_and_none_within_a_host():
    model = NAMED["deepseek-v3"].model
    once, each = (Software(dispatch_once=yes) for yes in (True, False))
    for cluster, size, less in [("8x8xh800", 64, True), ("8xh800", 8, False)]:
        layout, job = Layout(expert=size), Job(model, 4096, size)
        seconds = [step_time(job, layout, parse_cluster(cluster), s).expert for s in (once, each)]
        assert (seconds[0] < 0.6 * seconds[1]) == less
        assert seconds[0] <= seconds[1]


@pytest.fixture
def cases(monkeypatch):
    monkeypatch.syspath_prepend(str(DATA.parents[1]))
    read, _ = importlib.import_module("published").read_file(DATA)
    return {case.id: case for case in read}


@pytest.mark.parametrize(
    ("name", "within"),
    [("llama3_herd-001", 0.1), ("llama3_herd-002", 0.1), ("deepseek_v3-001", 0.2)],
)
def test_the_largest_published_runs(cases, name, within):
    """Grattafiori et al. 2024, table 4; DeepSeek-AI 2024, "DeepSeek-V3", table 1."""
    case = cases[name]
    found = step_time(case.job, case.layout, case.cluster, case.software)
    assert found.total == pytest.approx(case.seconds, rel=within)
    if name == "llama3_herd-002":
        peak = case.cluster.num_chips * case.cluster.chip.bf16_flops
        assert step_flops(case.job, "full") / found.total / peak == pytest.approx(0.41, rel=0.1)
        alone = dataclasses.replace(case.layout, chunks=1)
        assert step_time(case.job, alone, case.cluster, case.software).bubble > 3 * found.bubble
