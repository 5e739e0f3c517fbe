"""Compiled steps: one program for each structure of the arguments, checked before its first run."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from shardlib.errors import ModelError, WrongProgramError, did_you_mean
from shardlib.explain.wrong_numbers import FAULTS, Fault, wrong_numbers
from shardlib.hardware.compiler_options import Value, options_on
from shardlib.losses.aggregate import Aggregate, is_output
from shardlib.losses.signature import Inputs
from shardlib.paths import named_leaves
from shardlib.sharding.constrain import Scope
from shardlib.train.batches import host_arrays, moved, structure
from shardlib.train.state import Definition, TrainState

AnyMesh = Mesh | AbstractMesh

_SHOWN = 5
"""Maximum number of faults in a message, because faults rarely come alone."""


class State(Protocol):
    """The fields of a training state that every compiled step reads."""

    @property
    def step(self) -> jax.Array: ...

    @property
    def definition(self) -> Definition: ...


@dataclasses.dataclass
class PlacedProgram:
    """A jitted step that moves its arguments to their shardings.

    Arguments with other shardings are detected by the error that JAX raises, so arguments that need
    not move cost nothing. After the first move, all later arguments are inspected before the call.
    """

    jitted: Any
    placed: tuple[PyTree, ...]
    """The shardings of the arguments after the state."""
    traced: Any = None
    """The jitted step without compiler options, for calls inside of another program, which JAX
    refuses with them. None if the step has no options."""
    moves: bool = False

    def __call__(self, state: State, *arguments: PyTree) -> Any:
        if self.traced is not None and _is_traced(state.step):
            return self.traced(state, *arguments)
        if self.moves:
            return self.jitted(state, *(moved(arguments, self.placed) or arguments))
        try:
            return self.jitted(state, *arguments)
        except (TypeError, ValueError):
            new = moved(arguments, self.placed)
            if new is None:
                raise
        self.moves = True
        return self.jitted(state, *new)


@dataclasses.dataclass(eq=False)
class ProgramCheck:
    """Checks each compiled program of a step once.

    Attributes:
        allowed: Codes of faults that do not raise, keys of `FAULTS`.
    """

    allowed: tuple[str, ...] = ()
    _checked: set[Any] = dataclasses.field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        for fault in unknown_codes(self.allowed):
            raise ModelError(f"{fault}\n  Name codes of faults, such as ('SL205',).")

    def __call__(
        self, program: PlacedProgram, arguments: Sequence[PyTree], mesh: Mesh | AbstractMesh
    ) -> None:
        """Compiles a jitted program and refuses it if it computes wrong numbers.

        JAX caches the compiled program and runs it when the program is called.

        Raises:
            WrongProgramError: If the compiled program does not compute what the source says.
        """
        leaves = jax.tree.leaves(arguments)
        if program.jitted in self._checked or any(map(_is_traced, leaves)):
            return
        if mesh.size > 1:
            state, *others = arguments
            others = moved(tuple(others), program.placed) or others
            traced = program.jitted.trace(state, *others)
            faults = wrong_numbers(traced.lower().compile(), mesh, traced.jaxpr)
            refused = [fault for fault in faults if fault.code not in self.allowed]
            if refused:
                raise WrongProgramError(_wrong_program(refused), tuple(refused))
        self._checked.add(program.jitted)


def unknown_codes(codes: Sequence[str]) -> list[str]:
    """Returns a list with one message that names all codes missing from `FAULTS`, or an empty
    list."""
    unknown = [code for code in codes if code not in FAULTS]
    if not unknown:
        return []
    return [
        f"allow_wrong_numbers names {', '.join(map(repr, unknown))}, but the codes are "
        f"{', '.join(FAULTS)}.{did_you_mean(str(unknown[0]), FAULTS)}"
    ]


def _wrong_program(faults: Sequence[Fault]) -> str:
    count = len(faults)
    codes = ", ".join(repr(code) for code in dict.fromkeys(fault.code for fault in faults))
    more = [f"and {count - _SHOWN} more"] if count > _SHOWN else []
    lines = [*map(str, faults[:_SHOWN]), *more]
    return (
        "the compiled program does not compute the same numbers as the step: "
        + "; ".join(lines).replace(".;", ";")
        + f'\n  {faults[0].fix} Or let shardlib place every value with constrain="auto". If '
        "sl.testing.assert_equivalent passes for the step, set "
        f"allow_wrong_numbers=({codes},)."
    )


@dataclasses.dataclass(eq=False, kw_only=True)
class JittedStep(abc.ABC):
    """A step that is compiled once for each structure of its arguments.

    A subclass defines `_compile`.
    """

    check: ProgramCheck = dataclasses.field(default_factory=ProgramCheck)
    """The check of a program before its first run."""
    compiler_options: Mapping[str, Value | None] = dataclasses.field(default_factory=dict)
    """Compiler options that replace or complete the defaults of
    `shardlib.hardware.compiler_options.OPTIONS`; None removes a default."""
    _programs: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    def lower(self, state: Any, batch: PyTree, *inputs: PyTree) -> jax.stages.Lowered:
        """Lowers the step for arguments that may be abstract."""
        batch = self.arrange(state, batch)
        return self.program(state, batch, *inputs).lower(state, batch, *inputs)

    def program(self, state: Any, batch: PyTree, *inputs: PyTree) -> Any:
        """Returns the jitted step for states, batches and inputs of this structure. It takes the
        rows of a batch as they are, without `arrange`.

        Raises:
            DataError: If a leaf of the batch is not an array [batch, ...].
            RuleError: If the mesh does not divide the batch or a microbatch.
            ModelError: If the loss takes another number of inputs, the numbers of groups and
                microbatches do not divide the rows, the state was made with another precision or
                other guards, or it holds parameters that cannot be trained.
        """
        return self._program(state, batch, inputs).jitted

    def arrange(self, state: Any, batch: PyTree) -> PyTree:
        """Returns the batch with its rows laid out for groups of unequal speed."""
        return batch

    def _run(self, state: State, batch: PyTree, inputs: Inputs) -> Any:
        batch = self.arrange(state, batch)
        program = self._program(state, batch, inputs)
        self.check(program, (state, batch, *inputs), state.definition.scope.mesh)
        return program(state, batch, *inputs)

    def _program(self, state: State, batch: PyTree, inputs: Inputs) -> PlacedProgram:
        key = structure(state.definition, batch, inputs)
        if key not in self._programs:
            self._programs[key] = self._compile(state, host_arrays(batch), inputs)
        return self._programs[key]

    def _jitted(
        self, step: Callable[..., Any], given: tuple[PyTree, ...], mesh: AnyMesh, **options: Any
    ) -> PlacedProgram:
        """Returns the program of a function with the compiler options of its devices.

        Raises:
            ConfigError: If the compiler refuses one of `compiler_options`.
        """
        compiler = options_on(mesh, self.compiler_options) if isinstance(mesh, Mesh) else {}
        plain = jax.jit(step, **options)
        if not compiler:
            return PlacedProgram(plain, given)
        return PlacedProgram(jax.jit(step, compiler_options=compiler, **options), given, plain)

    @abc.abstractmethod
    def _compile(self, state: Any, batch: PyTree, inputs: Inputs) -> PlacedProgram:
        """Returns the program for arguments of this structure."""


def check_state(state: object) -> None:
    """Raises `ModelError` for the state of a step that is not a `TrainState`."""
    if not isinstance(state, TrainState):
        raise ModelError(
            f"the state of a step is a {type(state).__name__}, not a TrainState.\n"
            "  Call step(state, batch) with the state from init_state or from the step before."
        )


def refuse_donated(state: State, inputs: Inputs) -> None:
    """Raises `ModelError` for a state that was already donated, on which XLA would crash, and for
    inputs that this step donates or that an earlier step donated."""
    if _is_gone(state.step):
        raise ModelError(
            "this state was already passed to a step, which donated its memory.\n"
            "  Continue with the state that the step returned: state, metrics = step(state, batch)."
        )
    if not inputs:
        return
    donated = {id(x) for x in jax.tree.leaves(state)}
    for x in jax.tree.leaves(inputs):
        if isinstance(x, jax.Array) and (id(x) in donated or _is_gone(x)):
            path = next(path for path, leaf in named_leaves(inputs).items() if leaf is x)
            raise ModelError(
                f"the input {path} is an array of the state, which the step donates.\n"
                "  Pass a copy: jax.tree.map(jax.numpy.copy, ...)."
                if id(x) in donated
                else f"the input {path} was already donated to a step as part of its state.\n"
                "  Pass the state that the step returned."
            )


def _is_gone(x: object) -> bool:
    return isinstance(x, jax.Array) and not _is_traced(x) and x.is_deleted()


def _is_traced(x: object) -> bool:
    return isinstance(x, jax.core.Tracer)  # type: ignore[attr-defined]


class Reported(dict[str, Any]):
    """The metrics of a step as a dict, whose pytree has two parts, so that a compiled step can give
    each part a sharding.

    Args:
        whole: Replicated values by name. JAX also makes trees of this class with one leaf in place
            of each dict, such as a sharding for all its values; then the dict is empty.
        outputs: Values sharded over their first dim, by name.
    """

    def __init__(self, whole: PyTree, outputs: PyTree):
        is_dict = isinstance(whole, Mapping) and isinstance(outputs, Mapping)
        super().__init__({**whole, **outputs} if is_dict else {})
        self._outputs = frozenset(outputs) if is_dict else frozenset()
        self._leaves = None if is_dict else (whole, outputs)

    @classmethod
    def of(cls, metrics: Mapping[str, Aggregate], *, divided: bool) -> "Reported":
        """Returns the aggregates unchanged, or their values if `divided` is true."""
        values = {name: x.value if divided else x for name, x in metrics.items()}
        return cls(*_split(values, {name for name, x in metrics.items() if is_output(x)}))

    def parts(self) -> tuple[PyTree, PyTree]:
        """Returns the replicated part and the sharded part."""
        return _split(self, self._outputs) if self._leaves is None else self._leaves


def _split(values: Mapping[str, Any], outputs: set[str] | frozenset[str]) -> tuple[PyTree, PyTree]:
    return (
        {name: x for name, x in values.items() if name not in outputs},
        {name: x for name, x in values.items() if name in outputs},
    )


jax.tree_util.register_pytree_node(
    Reported, lambda reported: (reported.parts(), None), lambda _, parts: Reported(*parts)
)


def reported_shardings(batch_placed: PyTree, scope: Scope) -> Reported:
    """Returns the shardings of a `Reported`. Outputs are sharded like the rows of the batch."""
    specs = [sharding.spec for sharding in jax.tree.leaves(batch_placed)]
    rows = next((PartitionSpec(spec[0]) for spec in specs if len(spec)), PartitionSpec())
    return Reported(NamedSharding(scope.mesh, PartitionSpec()), NamedSharding(scope.mesh, rows))
