"""Questions to the planner about serving, and their validation."""

import dataclasses
import re
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from shardlib.errors import ConfigError, did_you_mean
from shardlib.functional.quantized import Bits, check_bits
from shardlib.hardware import Cluster, MixedCluster, of_one_kind
from shardlib.plan.request import tokens_of

_BINARY = {"": 1.0, "k": 2.0**10, "m": 2.0**20}
_SECONDS = {"ms": 1e-3, "s": 1.0}
ServePrecision = Literal["bf16", "f32"]


@dataclasses.dataclass(frozen=True)
class Slo:
    """Times that answers keep, in seconds; None for any."""

    ttft: float | None = None
    """To the first token of a prompt that starts at once."""
    itl: float | None = None
    """Between tokens, also while a prompt is read."""

    @classmethod
    def parse(cls, text: "str | Slo | None") -> "Slo":
        """Returns the times of a text such as `ttft=1s,itl=50ms`.

        Raises:
            ConfigError: If it cannot be read.
        """
        if text is None or isinstance(text, Slo):
            return text or cls()
        found: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            match = re.fullmatch(r"(\w+)\s*=\s*([\d.]+(?:e-?\d+)?)\s*(ms|s)", part.lower())
            names = [field.name for field in dataclasses.fields(cls)]
            try:
                seconds = float(match[2]) * _SECONDS[match[3]] if match else 0.0
            except ValueError:
                seconds = 0.0
            if match is None or match[1] not in names or seconds <= 0:
                name = part.partition("=")[0].strip()
                hint = "" if name in names else did_you_mean(name, names)
                raise ConfigError(
                    f"slo has {part!r}: it takes ttft and itl, each a time in s or ms.{hint}\n"
                    "  Write it as in ttft=1s,itl=50ms."
                )
            found[match[1]] = seconds
        return cls(**found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingQuestion:
    """A question to the planner about serving; `plan_serving` documents the fields."""

    cluster: Cluster
    context: int
    prompt: int
    slo: Slo = Slo()
    precision: ServePrecision = "bf16"
    weights: Bits | None = None
    cache: Bits | None = None
    page_size: int = 16
    lane: int = 32

    @property
    def answer(self) -> int:
        """Tokens of an answer."""
        return self.context - self.prompt

    @property
    def dtype(self) -> jax.typing.DTypeLike:
        """The dtype of weights, activations and the cache, unless they have 8 bits."""
        return jnp.float32 if self.precision == "f32" else jnp.bfloat16

    @property
    def kinds(self) -> str:
        """The precision, and the bits of weights and cache if they differ."""
        bits = {"weights": self.weights, "cache": self.cache}
        return ", ".join([self.precision, *(f"{k} {v}" for k, v in bits.items() if v)])


def serving_question(
    on: str | Cluster | MixedCluster,
    context: float | str,
    prompt: float | str | None,
    slo: str | Slo | None,
    precision: ServePrecision,
    weights: Bits | None = None,
    cache: Bits | None = None,
) -> ServingQuestion:
    """Returns a question, from arguments as of `plan_serving`.

    Raises:
        ConfigError: If an argument is wrong.
        MeshError: If the cluster is unknown.
        ModelError: If `weights` or `cache` is neither None nor `int8`.
    """
    check_bits(weights=weights, cache=cache)
    tokens = tokens_of(context, _BINARY)
    assert tokens is not None
    of_prompt = tokens_of(prompt, _BINARY)
    whole = int(tokens)
    read = whole // 2 if of_prompt is None else int(of_prompt)
    if not 1 <= read < whole:
        raise ConfigError(
            f"a prompt of {read} tokens and an answer do not fit a context of {whole}.\n"
            "  Give a longer context, or a shorter prompt."
        )
    known = get_args(ServePrecision)
    if precision not in known:
        raise ConfigError(
            f"no precision of serving is called {precision!r}."
            f"{did_you_mean(str(precision), known)}\n  Choose one of: {', '.join(known)}."
        )
    return ServingQuestion(
        cluster=of_one_kind(on), context=whole, prompt=read, slo=Slo.parse(slo),
        precision=precision, weights=weights, cache=cache,
    )  # fmt: skip
