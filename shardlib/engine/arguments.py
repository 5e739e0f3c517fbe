"""Arguments of the engine, checked before anything is queued or allocated."""

import dataclasses
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence, Set, ValuesView
from typing import Any, get_args

import jax
import numpy as np

from shardlib.engine.requests import Sampling, has_items, is_integer, is_number
from shardlib.engine.servable import Servable
from shardlib.errors import ModelError, did_you_mean
from shardlib.nn.attention import PageBackend
from shardlib.registry import Decoding, Encoding
from shardlib.sharding.constrain import Scope

Prompt = str | Sequence[int]


def one_sampling(sampling: Sampling | None, options: dict[str, Any]) -> Sampling:
    """Returns a sampling, given as one or by its fields."""
    if sampling is not None and options:
        raise ModelError(
            f"sampling is given, and {', '.join(options)} as well.\n"
            "  Set these fields in the Sampling."
        )
    known = [field.name for field in dataclasses.fields(Sampling)]
    if wrong := [name for name in options if name not in known]:
        raise ModelError(
            f"no option of a sampling is called {wrong[0]!r}.{did_you_mean(wrong[0], known)}\n"
            f"  Use one of: {', '.join(known)}."
        )
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ModelError(
            f"sampling is {type(sampling).__name__}.\n  Give a sl.Sampling, or its fields by name."
        )
    return Sampling(**options) if sampling is None else sampling


def prompt_list(prompts: Any) -> list[Any]:
    """Returns a list of prompts, also of a single one."""
    if isinstance(prompts, str | bytes):
        return [prompts]
    # Answers come in the order of their prompts: a set has no order, and what of a mapping are its
    # prompts is not known.
    if isinstance(prompts, Mapping | Set | ValuesView) or not has_items(prompts):
        raise ModelError(
            f"the prompts are {reprlib.repr(prompts)}.\n"
            "  Give a text, token ids, or a list of these."
        )
    every = list(prompts)
    is_one = bool(every) and not isinstance(every[0], str) and np.ndim(every[0]) == 0
    return [every] if is_one else every


def one_each(sampling: Sampling | Sequence[Sampling] | None, count: int) -> list[Sampling | None]:
    """Returns a sampling for each of `count` prompts."""
    if sampling is None or not isinstance(sampling, Sequence):
        return [sampling] * count
    if len(sampling) != count:
        raise ModelError(
            f"sampling has {len(sampling)} items for {count} prompts.\n"
            "  Give one for all prompts, or one for each."
        )
    return list(sampling)


def token_ids(prompt: Any) -> tuple[int, ...]:
    """Returns the ids of a prompt in any form of integers [n]."""
    try:
        ids = np.asarray(prompt)
    except ValueError:  # Rows of different lengths.
        ids = np.asarray(prompt, object)
    is_integers = np.issubdtype(ids.dtype, np.integer) or (
        # Integers beyond 64 bits, which no model has as tokens.
        ids.dtype == object and all(type(one) is int for one in ids.flat)
    )
    if ids.size and (ids.ndim != 1 or not is_integers):
        is_array = hasattr(prompt, "dtype")
        given = f"{ids.dtype}{list(ids.shape)}" if is_array else reprlib.repr(prompt)
        raise ModelError(
            f"the prompt is {given}, expected a text or integers [n].\n"
            "  Give the text, or the list of its token ids."
        )
    return tuple(ids.tolist())


def ways_of(
    servable: Servable,
) -> tuple[Decoding | None, Encoding | None, Callable[[Any], int | None]]:
    """Returns how a model decodes, how it encodes, and the function of its config that gives its
    positions; raises `ModelError` if it does neither."""
    if not hasattr(servable, "family"):
        given = repr(servable) if isinstance(servable, str) else type(servable).__name__
        raise ModelError(
            f"an engine serves a loaded model, not {given}.\n"
            "  Load it: sl.Engine(sl.hf.load(folder)) or sl.Engine(sl.load_run(run_dir))."
        )
    family = servable.family
    if (way := family.decoding or family.encoding) is not None:
        return family.decoding, family.encoding, way.max_length
    raise ModelError(
        f"a {type(servable.model).__name__} is not a decoder or an encoder of texts.\n"
        "  Load a language model, such as Llama or GPT-2, or one for embeddings, such as BERT."
    )


_USUAL: dict[str, Any] = {
    "page_size": 16,
    "lane": 32,
    "prefix_cache": True,
    "speculate": 0,
    "attention": "auto",
}
"""The defaults of options of `Engine`; that of others is None."""


def check_options(servable: Servable, **options: Any) -> None:
    """Raises `ModelError` for options of `Engine` that are not for the kind of the model, or for
    an `attention` that cannot run."""
    _check_attention(options["attention"], servable.scope)
    _check_kinds(options["adapters"], options["prefix_cache"])
    family = servable.family
    foreign, what = {"pooling"}, "a decoder"
    if family.encoding is not None and family.decoding is not None:
        foreign, what = {"pooling", "adapters"}, "an encoder with a decoder"
    elif family.encoding is not None:
        foreign, what = options.keys() - {"pooling"}, "an encoder and writes no text"
    wrong = [
        f"{name}={value!r}"
        for name, value in options.items()
        if name in foreign and (value or None) != (_USUAL.get(name) or None)
    ]
    if wrong:
        raise ModelError(
            f"{', '.join(wrong)} for a {type(servable.model).__name__}, which is {what}.\n"
            f"  Leave {'it' if len(wrong) == 1 else 'them'} out."
        )


def _check_kinds(adapters: Any, prefix_cache: Any) -> None:
    """Raises `ModelError` for adapters without names, and for a flag other than a boolean."""
    if adapters is not None and not isinstance(adapters, Mapping):
        raise ModelError(
            f"adapters is {type(adapters).__name__}, expected models by their names.\n"
            '  Give {"name": model}.'
        )
    if not isinstance(prefix_cache, bool):
        raise ModelError(f"prefix_cache is {prefix_cache!r}.\n  Give True or False.")


def check_version(version: Any) -> None:
    """Raises `ModelError` for a version of parameters other than an integer."""
    if version is not None and not is_integer(version):
        raise ModelError(f"the version is {version!r}.\n  Give an integer, such as the step.")


def _check_attention(attention: Any, scope: Scope | None) -> None:
    platform = jax.default_backend() if scope is None else scope.mesh.devices.flat[0].platform
    known = get_args(PageBackend)
    if attention not in known:
        raise ModelError(
            f"attention={attention!r} is not known.{did_you_mean(str(attention), known)}\n"
            f"  Choose one of: {', '.join(known)}."
        )
    if attention == "cudnn" and platform not in ("gpu", "cuda"):
        raise ModelError(
            f"attention='cudnn' needs NVIDIA GPUs, and the platform is {platform}.\n"
            "  Use attention='auto' or 'xla'."
        )


def check_limits(priority: Any, timeout_seconds: Any) -> None:
    """Raises `ModelError` for a priority that is not an integer, and for a time that is not a
    number of seconds which can be added to a clock. A scheduler could not compare another
    priority."""
    wrong = []
    if not is_integer(priority):
        wrong.append(f"priority={priority!r}, which must be an integer")
    if timeout_seconds is not None and not is_number(timeout_seconds, 0, 1e38):
        given = reprlib.repr(timeout_seconds)
        wrong.append(f"timeout_seconds={given}, which must be a number from 0 to 1e38, or None")
    if wrong:
        raise ModelError(f"the request has {'; '.join(wrong)}.\n  Change these values.")


def start_tokens(servable: Servable) -> tuple[int, ...]:
    """Returns the tokens that a decoder with an encoder reads before its answer; none of others."""
    decoding = servable.family.decoding
    if decoding is None or decoding.start_token is None:
        return ()
    return (decoding.start_token(servable.config),)


def check_encoded(sampling: Sampling, kind: str, starts: tuple[int, ...]) -> None:
    """Raises `ModelError` for a request that a model with an encoder cannot answer.

    Args:
        sampling: What is asked for.
        kind: The name of the model.
        starts: The result of `start_tokens`.
    """
    if not starts and not sampling.embedding:
        raise ModelError(
            f"a {kind} is an encoder, which writes no text.\n"
            "  Ask for embeddings: engine.embed(texts), or /v1/embeddings."
        )
    if starts and sampling.embedding:
        raise ModelError(
            f"a {kind} has a decoder for its output, and no embeddings.\n"
            "  Embed texts with a decoder or an encoder alone, such as BERT."
        )
    if sampling.prompt_logprobs:
        raise ModelError(
            f"prompt_logprobs (echo with logprobs) for a {kind}, whose encoder reads the prompt "
            "without log probabilities.\n  Leave it out."
        )


def check_adapter(name: str | None, adapters: Collection[str]) -> None:
    """Raises `ModelError` for an adapter that the engine does not have."""
    if name is None or name in adapters:
        return
    use = f"Use one of: {', '.join(adapters)}." if adapters else "Give the engine this adapter."
    raise ModelError(f"no adapter is called {name!r}.{did_you_mean(name, adapters)}\n  {use}")


def check_exact(params: Any) -> None:
    """Raises `ModelError` for parameters with which bits depend on other requests."""
    kinds = {
        (str(x.dtype), next(iter(x.sharding.device_set)).platform)
        for x in jax.tree.leaves(params)
        if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
    }
    if others := sorted(kinds - {("float32", "cpu")}):
        raise ModelError(
            f"deterministic=True with parameters in {' on '.join(others[0])}: it is for float32 on "
            "a CPU.\n  Load the model with dtype=jnp.float32, or leave deterministic out."
        )


def check_same(old: Any, new: Any) -> None:
    """Raises `ModelError` if two trees differ in names, shapes or dtypes."""
    shapes = [
        {jax.tree_util.keystr(path): (x.shape, x.dtype) for path, x in leaves}
        for leaves in (jax.tree.leaves_with_path(old), jax.tree.leaves_with_path(new))
    ]
    differing = sorted(
        path for path in {**shapes[0], **shapes[1]} if shapes[0].get(path) != shapes[1].get(path)
    )
    if differing:
        raise ModelError(
            f"the new parameters differ in {', '.join(differing[:4])}"
            f"{' and more' if len(differing) > 4 else ''}.\n"
            "  Give the state of a module with the same shapes and dtypes."
        )


def tokens_left(num_tokens: int, num_encoded: int, sampling: Sampling, context: int) -> int:
    """Returns the most tokens of an answer to a prompt, of which an encoder reads the first ones.

    Raises:
        ModelError: If the prompt, or its answer, is too long for the context.
    """
    size, left = num_encoded or num_tokens, context - num_tokens
    if num_encoded == num_tokens:
        if left < 0:
            raise ModelError(
                f"the text has {size} tokens, and the model embeds at most {context}.\n"
                "  Shorten it, or embed its parts."
            )
        return 1
    if left < 1:
        raise ModelError(
            f"the prompt has {size} tokens, but the context of {context} must hold "
            "the answer too.\n  Shorten the prompt, or give the engine a longer context."
        )
    if sampling.max_tokens is not None and sampling.max_tokens > left:
        raise ModelError(
            f"a prompt of {size} tokens and max_tokens={sampling.max_tokens} exceed the "
            f"context of {context} tokens.\n  Ask for at most {left} tokens."
        )
    return left
