"""lm-eval-harness: its tasks on a model of shardlib.

Source: Gao et al. 2024, "A framework for few-shot language model evaluation",
https://github.com/EleutherAI/lm-evaluation-harness.
"""

import dataclasses
import logging
import numbers
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardlib.data.instruct.encode import chat_encoder
from shardlib.data.instruct.template import ChatTemplate
from shardlib.errors import (
    ConfigError,
    DataError,
    ModelError,
    ShardlibError,
    did_you_mean,
    require,
)
from shardlib.evaluation.text_model import TextModel

_LOG = logging.getLogger(__name__)
_OF = "evaluation on tasks"
_READ = frozenset({"until", "max_gen_toks", "do_sample", "temperature"})
_COUNTS = frozenset({"alias", "name", "sample_len", "sample_count"})


@dataclasses.dataclass(frozen=True)
class Tasks:
    """Tasks that exist, with the harness's index of all tasks."""

    names: tuple[str, ...]
    manager: Any


@dataclasses.dataclass(frozen=True)
class TaskScores:
    """The scores of a task or of a group."""

    metrics: dict[str, float]
    stderrs: dict[str, float]
    """The standard error of metrics that have one."""
    version: Any
    num_fewshot: int | None
    """Examples before each question; None for groups."""


def find_tasks(names: Sequence[str], *, include_path: str | None = None) -> Tasks:
    """Returns tasks by their names, which are checked before any model is read.

    Args:
        names: Names of tasks, groups or tags of the harness, or of local ones; `*` matches any
            characters.
        include_path: A folder of tasks of your own, as YAML files.

    Raises:
        MissingExtraError: If lm-eval is not installed.
        ConfigError: If there are no names, a task is unknown, or the folder does not exist.
    """
    if not names:
        raise ConfigError("no tasks are named.\n  Name one, such as lambada_openai.")
    if include_path is not None and not Path(include_path).is_dir():
        raise ConfigError(f"{include_path!r} is not a folder.\n  Give a folder of YAML files.")
    manager = require("lm_eval.tasks", "eval", _OF).TaskManager(include_path=include_path)
    found = {name: manager.match_tasks([name]) for name in names}
    if unknown := [name for name, matches in found.items() if not matches]:
        hints = "".join(did_you_mean(name, manager.all_tasks) for name in unknown)
        raise ConfigError(
            f"no task is called {', '.join(map(repr, unknown))}.{hints}\n"
            "  `lm_eval ls tasks` lists the published ones; --include-path adds your own."
        )
    return Tasks(tuple(dict.fromkeys(one for each in found.values() for one in each)), manager)


def run_tasks(
    model: TextModel,
    tasks: Tasks,
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    unsafe_code: bool = False,
) -> dict[str, TaskScores]:
    """Returns the scores of each task by name.

    Args:
        model: The model.
        tasks: What `find_tasks` returns.
        num_fewshot: Examples before each question; None for what each task says.
        limit: Most questions of each task.
        chat: Whether questions are put into the chat template of the model.
        unsafe_code: Whether tasks may run the code that the model writes.

    Raises:
        DataError: If the data of a task cannot be read.
        ConfigError: If the harness refuses the tasks, or one asks for more tokens than the model
            has.
        ModelError: If `chat` is set and the model has no chat template.
    """
    lm_eval = require("lm_eval", "eval", _OF)
    try:
        results = lm_eval.simple_evaluate(
            model=harness_model(model, chat=chat),
            tasks=list(tasks.names),
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=tasks.manager,
            apply_chat_template=chat,
            confirm_run_unsafe_code=unsafe_code,
            log_samples=False,
        )
    except ShardlibError:
        raise
    except OSError as error:  # ConnectionError among them.
        raise DataError(
            f"the data of {', '.join(tasks.names)} cannot be read: {error}.\n"
            "  Connect to the network, or use tasks with local files."
        ) from error
    except ValueError as error:
        hint = "  Pass --unsafe-code if you trust it." if "unsafe" in str(error) else ""
        raise ConfigError(
            f"lm-eval-harness refuses {', '.join(tasks.names)}: {error}\n"
            + (hint or "  Correct the tasks, or choose others.")
        ) from error
    if results is None:  # Of several processes of a host, the harness answers the first alone.
        return {}
    return {
        name: TaskScores(
            *_split(metrics),
            version=results.get("versions", {}).get(name),
            num_fewshot=results.get("n-shot", {}).get(name),
        )
        for name, metrics in {**results["results"], **results.get("groups", {})}.items()
    }


def _split(found: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the metrics that are numbers and their standard errors, without the name of the usual
    filter."""
    metrics, stderrs = {}, {}
    for name, value in found.items():
        if name in _COUNTS or not isinstance(value, numbers.Real):
            continue
        name = name.removesuffix(",none")
        kind = stderrs if "_stderr" in name else metrics
        kind[name.replace("_stderr", "")] = float(value)
    return metrics, stderrs


def harness_model(model: TextModel, *, chat: bool = False) -> Any:
    """Returns a model as an `lm_eval.api.model.LM`, for `lm_eval.simple_evaluate(model=...)`.

    Texts longer than the model's length are cut at their start, as the harness's own models do, and
    their number is logged. With `chat`, special tokens that a text names are special tokens.

    Raises:
        MissingExtraError: If lm-eval is not installed.
        ModelError: If `chat` is set and the model has no chat template.
        DataError: If the folder of the model has none, or it is malformed.
    """
    require("lm_eval", "eval", _OF)
    from lm_eval.api.model import TemplateLM

    template, encode = _template(model) if chat else None, _encoder(model, chat)

    class HarnessModel(TemplateLM):
        """A `TextModel` behind the interface of the harness."""

        @property
        def tokenizer_name(self) -> str:
            return getattr(model.tokenizer, "fingerprint", "")

        @property
        def eot_token_id(self) -> int:
            return model.tokenizer.eot

        @property
        def prefix_token_id(self) -> int:
            return model.prefix

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **options: Any
        ) -> list[int]:
            return encode(string, add_special_tokens is not False)

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return None if template is None else template.source

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            assert template is not None, "checked above"
            return template.text(chat_history, None, add_generation_prompt)

        def _loglikelihood_tokens(self, requests: Any, **options: Any) -> list[tuple[float, bool]]:
            _check_answers(model, requests)
            return _scored(model, [(context, added) for _, context, added in requests])

        def loglikelihood_rolling(self, requests: Any, **options: Any) -> list[float]:
            texts = [request.args[0] for request in requests]
            return _rolling(model, [encode(text, model.framing == "file") for text in texts])

        def generate_until(self, requests: Any, **options: Any) -> list[str]:
            pairs = [request.args for request in requests]
            return _generated(model, [(encode(text), options) for text, options in pairs])

    return HarnessModel()


def _template(model: TextModel) -> ChatTemplate:
    if model.template is None:
        raise ModelError(
            "the model was not trained on chats, so it has no chat template.\n  Leave out --chat."
        )
    return model.template()


def _encoder(model: TextModel, chat: bool) -> Callable[..., list[int]]:
    """Returns `encode(text, framed=True)`, the tokens of a text."""
    of_chat = chat_encoder(model.tokenizer) if chat else None

    def encode(text: str, framed: bool = True) -> list[int]:
        if of_chat is None:
            return model.tokens(text) if framed else model.tokenizer.encode(text)
        ids, frame = of_chat(text, ())[0].tolist(), model.tokens("")
        return ids if not framed or ids[: len(frame)] == frame else [*frame, *ids]

    return encode


def _check_answers(model: TextModel, requests: Any) -> None:
    """Raises `ConfigError` for answers that have no tokens of their own, or too many."""
    faults = []
    for (context, answer), _, added in requests:
        if not added:
            faults.append(f"{answer!r} joins the last token of {context[-40:]!r}")
        elif len(added) > model.max_length:
            faults.append(f"{answer[:40]!r} has {len(added)} tokens of {model.max_length} at most")
    if faults:
        raise ConfigError(
            f"{len(faults)} of {len(requests)} answers cannot be scored:\n  "
            + "\n  ".join(faults[:5])
            + "\n  Begin answers with a space (target_delimiter), and shorten long ones."
        )


def _scored(
    model: TextModel, pairs: Sequence[tuple[list[int], list[int]]]
) -> list[tuple[float, bool]]:
    """Returns of each pair of tokens, given and added, the log-probability of what is added, and
    whether it is the likeliest."""
    rows = [[*(context or [model.prefix]), *added] for context, added in pairs]
    found = []
    scored = model.scores(_cut(rows, model.max_length + 1))
    for scores, (_, added) in zip(scored, pairs, strict=True):
        is_greedy = bool(scores.is_greedy[-len(added) :].all())
        found.append((float(scores.logprobs[-len(added) :].sum()), is_greedy))
    return found


def _rolling(model: TextModel, texts: Sequence[list[int]]) -> list[float]:
    """Returns the log-probability of whole texts, read in windows of the model's length."""
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    windows, owners = [], []
    for owner, tokens in enumerate(texts):
        parts = get_rolling_token_windows(
            token_list=tokens,
            prefix_token=model.prefix,
            max_seq_len=model.max_length,
            context_len=1,
        )
        for part in map(make_disjoint_window, parts):
            windows.append(part)
            owners.append(owner)
    values = [value for value, _ in _scored(model, windows)]
    return np.bincount(owners, values, minlength=len(texts)).tolist()


def _generated(model: TextModel, requests: Sequence[tuple[list[int], dict[str, Any]]]) -> list[str]:
    """Returns the continuation of each row of tokens up to its stop strings."""
    from lm_eval.models.utils import normalize_gen_kwargs

    wanted: list[Any] = [normalize_gen_kwargs(options) for _, options in requests]
    _check_wanted(model, wanted)
    groups: dict[tuple[int, float], list[int]] = {}
    for index, options in enumerate(wanted):
        temperature = float(options.get("temperature", 1.0)) if options["do_sample"] else 0.0
        groups.setdefault((int(options["max_gen_toks"]), temperature), []).append(index)
    found = [""] * len(requests)
    for (length, temperature), indices in groups.items():
        prompts = [requests[index][0] or [model.prefix] for index in indices]
        prompts = _cut(prompts, model.max_length - length)
        stops = [wanted[index]["until"] for index in indices]
        rows = model.continued(
            prompts,
            length,
            temperature=temperature,
            ended=lambda at, tokens, stops=stops: model.has_ended(tokens, stops[at]),
        )
        for index, row in zip(indices, rows, strict=True):
            found[index] = model.written(row, wanted[index]["until"])
    return found


def _check_wanted(model: TextModel, wanted: Sequence[Any]) -> None:
    """Raises `ConfigError` if a task asks for too many tokens; logs options without effect."""
    longest = max((int(options["max_gen_toks"]) for options in wanted), default=0)
    if longest >= model.max_length:
        raise ConfigError(
            f"a task writes up to {longest} tokens (max_gen_toks), but the model has "
            f"{model.max_length} with the question.\n"
            "  Lower max_gen_toks in generation_kwargs of the task."
        )
    ignored = {name for options in wanted if options["do_sample"] for name in options} - _READ
    if ignored:
        _LOG.warning("sampling has no %s: ignored", ", ".join(sorted(ignored)))


def _cut(rows: list[list[int]], longest: int) -> list[list[int]]:
    """Returns the ends of rows that are too long, and logs their number."""
    if count := sum(len(row) > longest for row in rows):
        _LOG.warning("%d of %d texts are longer than the model takes: cut", count, len(rows))
    return [row[-longest:] for row in rows]
