"""The programs of a run, traced before anything is allocated."""

from typing import NamedTuple

from jaxtyping import PyTree

from shardlib.data import Tokenizer
from shardlib.run.checks import check_activation_rules
from shardlib.run.sampling import Sampler
from shardlib.run.setup import Setup
from shardlib.sharding.constrain import recording
from shardlib.train.evaluate import EvalStep
from shardlib.train.local_sgd.outer import LocalSGD
from shardlib.train.step import TrainStep


class Programs(NamedTuple):
    """The steps of a run and its text sampler."""

    train: TrainStep | LocalSGD
    evaluate: EvalStep
    sample: Sampler | None


def traced(parts: Setup, batch: PyTree, held_out: PyTree, tokenizer: Tokenizer | None) -> Programs:
    """Returns the programs of a run, each traced once. Tracing finds computations that fail and
    arrays that cannot be placed before anything is allocated. The mesh may be abstract.

    Batches are `ShapeDtypeStruct`s, rows in plain order; without evaluation or sampling, `held_out`
    or `tokenizer` is None.

    Raises:
        ConfigError: If the config does not fit the mesh, or its ranges of layers do not fit the
            stages.
        RuleError: If an activation cannot be placed, or a rule of the config names an activation
            axis that the model does not have.
        ModelError: If the model cannot be computed as configured or split into stages, or its text
            cannot be sampled.
    """
    config, options = parts.config, parts.config.train
    step, state = parts.train_step(), parts.saved_state()
    batch = parts.arranged(batch)
    with recording() as met:
        step.program(state, batch).trace(state, batch)
    check_activation_rules(config, met)
    evaluate = parts.eval_step()
    if held_out is not None:
        evaluate.program(parts.abstract, held_out).trace(parts.abstract, held_out)
    if parts.family.generate is None or not options.sample_length or tokenizer is None:
        return Programs(step, evaluate, None)
    sampler = Sampler(parts, tokenizer)
    sampler.trace(parts.abstract, options.sample_prompt, length=options.sample_length)
    return Programs(step, evaluate, sampler)
