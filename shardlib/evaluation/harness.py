"""lm-eval-harness: its tasks on a model of shardlib.

Source: Gao et al. 2024, "A framework for few-shot language model evaluation",
https://github.com/EleutherAI/lm-evaluation-harness.
"""

import logging
from collections.abc import Sequence
from typing import Any

from shardlib.data.tokenizer import JsonTokenizer
from shardlib.errors import ConfigError, did_you_mean, require
from shardlib.evaluation.text_model import TextModel

_LOG = logging.getLogger(__name__)
_ADDED_TOKENS = 256
"""Tokens to add where a task does not say: the default of the harness."""


def harness_model(model: TextModel) -> Any:
    """Returns a model as an `lm_eval.api.model.LM`, for `lm_eval.simple_evaluate(model=...)`.

    Texts longer than the model's length are cut at their start, as the harness's own models do, and
    their number is logged.

    Raises:
        MissingExtraError: If lm-eval is not installed.
    """
    require("lm_eval", "eval", "evaluation on tasks")
    from lm_eval.api.model import TemplateLM

    class HarnessModel(TemplateLM):
        """A `TextModel` behind the interface of the harness."""

        @property
        def eot_token_id(self) -> int:
            return model.tokenizer.eot

        @property
        def prefix_token_id(self) -> int:
            return model.prefix

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **options: Any
        ) -> list[int]:
            return _tokens(model, string, framed=add_special_tokens is not False)

        def _loglikelihood_tokens(self, requests: Any, **options: Any) -> list[tuple[float, bool]]:
            return _scored(model, [(context, added) for _, context, added in requests])

        def loglikelihood_rolling(self, requests: Any, **options: Any) -> list[float]:
            return _rolling(model, [request.args[0] for request in requests])

        def generate_until(self, requests: Any, **options: Any) -> list[str]:
            return _generated(model, [request.args for request in requests])

    return HarnessModel()


def _tokens(model: TextModel, text: str, *, framed: bool = True) -> list[int]:
    """Returns the tokens of a text, framed by the special tokens that the tokenizer's file puts
    around one, such as the first token of a Llama."""
    tokenizer = model.tokenizer
    if framed and isinstance(tokenizer, JsonTokenizer):
        return tokenizer.framed([text])[0].ids
    return tokenizer.encode(text)


def _scored(
    model: TextModel, pairs: Sequence[tuple[list[int], list[int]]]
) -> list[tuple[float, bool]]:
    """Returns of each pair of tokens, given and added, the log-probability of what is added, and
    whether it is the likeliest."""
    rows = _cut([[*context, *added] for context, added in pairs], model.max_length + 1)
    found = []
    for scores, (_, added) in zip(model.scores(rows), pairs, strict=True):
        last = min(len(added), len(scores.logprobs))
        is_greedy = bool(scores.is_greedy[-last:].all())
        found.append((float(scores.logprobs[-last:].sum()), is_greedy))
    return found


def _rolling(model: TextModel, texts: Sequence[str]) -> list[float]:
    """Returns the log-probability of whole texts, read in windows of the model's length."""
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    windows, owners = [], []
    for owner, text in enumerate(texts):
        parts = get_rolling_token_windows(
            token_list=_tokens(model, text),
            prefix_token=model.prefix,
            max_seq_len=model.max_length,
            context_len=1,
        )
        for part in map(make_disjoint_window, parts):
            windows.append(part)
            owners.append(owner)
    totals = [0.0] * len(texts)
    for owner, (value, _) in zip(owners, _scored(model, windows), strict=True):
        totals[owner] += value
    return totals


def _generated(model: TextModel, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Returns the continuation of each text up to its stop strings."""
    found = [""] * len(requests)
    groups: dict[tuple[int, float], list[int]] = {}
    for index, (_, options) in enumerate(requests):
        groups.setdefault(_drawing(options), []).append(index)
    for (length, temperature), indices in groups.items():
        length = min(length, model.max_length - 1)
        prompts = [_tokens(model, requests[i][0]) or [model.prefix] for i in indices]
        prompts = _cut(prompts, model.max_length - length)
        rows = model.continued(prompts, length, temperature=temperature)
        for index, row in zip(indices, rows, strict=True):
            found[index] = _text(model, row, requests[index][1])
    return found


def _text(model: TextModel, row: list[int], options: dict[str, Any]) -> str:
    """Returns the text of tokens up to the first end of a text or stop string."""
    row = row[: row.index(model.tokenizer.eot)] if model.tokenizer.eot in row else row
    # A model may pad its vocabulary beyond the tokenizer's.
    text = model.tokenizer.decode(t for t in row if t < model.tokenizer.vocab_size)
    stops = options.get("until") or []
    for stop in [stops] if isinstance(stops, str) else stops:
        text = text.split(stop)[0] if stop else text
    return text


def run_tasks(
    model: TextModel,
    tasks: Sequence[str],
    *,
    include_path: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Returns the metrics of each task by name.

    Args:
        model: The model.
        tasks: Names of tasks, groups or tags of the harness, or of local ones.
        include_path: A folder of tasks of your own, as YAML files.
        num_fewshot: Examples before each question; None for what each task says.
        limit: Most questions of each task.

    Raises:
        MissingExtraError: If lm-eval is not installed.
        ConfigError: If a task is unknown.
    """
    lm_eval = require("lm_eval", "eval", "evaluation on tasks")
    manager = require("lm_eval.tasks", "eval", "evaluation on tasks").TaskManager(
        include_path=include_path
    )
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        hints = "".join(did_you_mean(task, manager.all_tasks) for task in unknown)
        raise ConfigError(
            f"no task is called {', '.join(map(repr, unknown))}.{hints}\n"
            "  `lm_eval ls tasks` lists the published ones; --include-path adds your own."
        )
    results = lm_eval.simple_evaluate(
        model=harness_model(model),
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=0,
    )
    if results is None:  # Of several processes of a host, the harness answers the first alone.
        return {}
    found = {**results["results"], **results.get("groups", {})}
    return {task: _numbers(metrics) for task, metrics in found.items()}


def _numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns the metrics that are numbers, without the name of the usual filter."""
    return {
        name.removesuffix(",none"): value
        for name, value in metrics.items()
        if isinstance(value, int | float) and "_stderr" not in name
    }


def _drawing(options: dict[str, Any]) -> tuple[int, float]:
    """Returns how many tokens a request adds, and its temperature."""
    temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
    return int(options.get("max_gen_toks") or _ADDED_TOKENS), temperature


def _cut(rows: list[list[int]], longest: int) -> list[list[int]]:
    """Returns the ends of rows that are too long, and logs their number."""
    if count := sum(len(row) > longest for row in rows):
        _LOG.warning("%d of %d texts are longer than the model takes: cut", count, len(rows))
    return [row[-longest:] for row in rows]
