"""The building blocks of a config: frozen dataclasses, and sections whose class a key chooses."""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar

from shardlib.errors import ConfigError, did_you_mean
from shardlib.import_paths import imported, is_import_path

T = TypeVar("T")
Hint = Any
"""The type of a field as its annotation has it: a class, a union, a `Literal` and so on."""
_SCALARS = (Any, type(None), bool, int, float, str)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def configclass(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen, keyword-only dataclass that YAML and the command line can fill.

    In Python it is an ordinary dataclass that also checks the values of its `Literal` fields.
    Reading text (`shardlib.config.load`) is strict: unknown keys are faults, and the type of each
    field decides the meaning of a scalar. The string below a field is its description in `--help`
    and in the JSON schema. `__post_init__` raises `ValueError` for faults between fields. Each
    fault takes a line; its further lines are indented. A fault that begins with the name of a key,
    or of one in a section as in `a.b`, is reported at the line of that key. A static method
    `faults_of_fields(values)` returns the faults of single fields. It is also called if other
    fields are wrong, with the right ones. A method `check_paths()` raises a `ShardlibError` for
    paths that do not exist; a config with other faults reports these too.
    """
    own = getattr(cls, "__post_init__", None)

    def __post_init__(self: T, *init_only: object) -> None:
        if faults := faults_of_fields(type(self), vars(self)):
            raise ValueError("\n".join(faults))
        if own is not None:
            own(self, *init_only)

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


@dataclasses.dataclass(frozen=True)
class Variants:
    """Marks a section whose class is chosen by one of its own keys.

    ```python
    model: Annotated[Any, Variants(model_configs, default="transformer")]
    ```

    Args:
        load_types: Returns the configclasses by name. Called when a config is read or described,
            not at import, so that the classes may live in packages found by entry points. Each
            class has the field `key`, whose default is its own name.
        key: The key that chooses.
        default: The name used if the key is absent; None makes the key required.
        by_path: Returns the configclass of an import path, `module:name`, or raises a
            `ShardlibError`. Its field `key` is any text and holds the path. None allows no paths.
    """

    load_types: Callable[[], Mapping[str, type]]
    key: str = "name"
    default: str | None = None
    by_path: Callable[[str], type] | None = None

    def classes(self) -> dict[str, type]:
        """Returns the configclasses by name.

        Raises:
            TypeError: If the field `key` of a class does not default to the name of the class.
        """
        classes = dict(self.load_types())
        for name, cls in classes.items():
            field = fields_of(cls).get(self.key)
            if field is None or field.required or field.default() != name:
                raise TypeError(
                    f"{cls.__qualname__} is registered as {name!r}, so it needs the field "
                    f"{self.key}: Literal[{name!r}] = {name!r}."
                )
        return classes

    def takes(self, name: object) -> bool:
        """Whether a name is to be read as an import path."""
        return self.by_path is not None and is_import_path(name)

    def class_at(self, path: str) -> type:
        """Returns the configclass of an import path.

        Raises:
            ShardlibError: If the path is wrong, or the class is not a configclass that holds it.
        """
        assert self.by_path is not None
        cls = self.by_path(path)
        field = fields_of(cls).get(self.key) if is_section(cls) else None
        if field is None or str not in options(field.hint):
            raise ConfigError(
                f"{cls.__qualname__}, which {path} names, is not a configclass with the field "
                f"{self.key}: str.\n  Declare `{self.key}: str = {path!r}` in it."
            )
        return cls


@dataclasses.dataclass(frozen=True)
class ImportPath:
    """Marks text that is the import path of an object, `module:name`.

    ```python
    loss: Annotated[str, ImportPath("a loss function")] | None = None
    ```

    The object is imported when the config is made, so that a wrong path is a fault of its key.

    Args:
        expected: The kind of object, with its article.
        accepts: Whether an object is of that kind.
    """

    expected: str
    accepts: Callable[[Any], bool] = callable

    def load(self, path: str) -> Any:
        """Returns the object; raises `ConfigError` for a wrong path."""
        return imported(path, self.expected, self.accepts)


@dataclasses.dataclass(frozen=True)
class ConfigField:
    """One field of a configclass: its resolved type, its default and its description."""

    name: str
    hint: Hint
    factory: Callable[[], Any] | None
    doc: str

    @property
    def required(self) -> bool:
        return self.factory is None

    def default(self) -> Any:
        """Returns the default value of a field that is not required."""
        assert self.factory is not None, f"{self.name} is required"
        return self.factory()


@functools.cache
def fields_of(cls: type) -> Mapping[str, ConfigField]:
    """Returns the fields of a dataclass by name, in order.

    Raises:
        TypeError: If a config cannot hold the type of a field.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docs.update(_attribute_docs(base) if dataclasses.is_dataclass(base) else {})
    fields = [field for field in dataclasses.fields(cls) if field.init]
    for field in fields:
        if not _is_readable(hint := hints[field.name]):
            raise TypeError(
                f"{cls.__qualname__}.{field.name} is {hint}, which a config cannot hold.\n"
                "  Use a plain type, and check its value in __post_init__."
            )
    return {
        field.name: ConfigField(
            field.name, hints[field.name], _factory(field), docs.get(field.name, "")
        )
        for field in fields
    }


def _is_readable(hint: Hint) -> bool:
    if len(members := options(hint)) > 1:
        return all(map(_is_readable, members))
    (option,) = members
    if items := sequence_of(option) or mapping_of(option):
        return all(_is_readable(item) for item in items if item is not Ellipsis)
    is_ours = is_section(option) or variants_of(option) or import_path_of(option)
    return option in _SCALARS or bool(choices(option) or is_ours)


@functools.cache
def _choice_fields(cls: type) -> Mapping[str, list[Any]]:
    """Returns the fields with a `Literal` among the options of their type, with these options."""
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError:  # A class defined in a function may refer to local names.
        return {}
    return {
        name: members
        for name, members in ((name, options(hint)) for name, hint in hints.items())
        if any(choices(member) or import_path_of(member) for member in members)
    }


def faults_of_fields(cls: type, values: Mapping[str, Any]) -> list[str]:
    """Returns the faults of single fields; each begins with the name of its field.

    `values` holds the fields by name, without those that could not be read.
    """
    own = getattr(cls, "faults_of_fields", None)
    return _choice_faults(cls, values) + ([] if own is None else own(values))


def _choice_faults(cls: type, values: Mapping[str, Any]) -> list[str]:
    faults = []
    for name, members in _choice_fields(cls).items():
        if name not in values:
            continue
        value, known = values[name], [x for option in members for x in choices(option)]
        paths = [marker for option in members if (marker := import_path_of(option))]
        others = [o for o in members if not choices(o) and not import_path_of(o)]
        if any(type(value) is type(x) and value == x for x in known):
            continue
        if paths and isinstance(value, str) and (is_import_path(value) or not known):
            try:
                paths[0].load(value)
            except ConfigError as error:
                faults.append(f"{name}: {error}")
            continue
        if any(not isinstance(o, type) or isinstance(value, o) for o in others):
            continue
        if float in others and type(value) is int:
            continue
        near = did_you_mean(value, map(str, known)) if isinstance(value, str) else ""
        kinds = [o.__name__ for o in others if o is not type(None)]
        kinds += [f"module:name of {marker.expected}" for marker in paths if not known]
        expected = ", ".join([*map(repr, known), *kinds])
        faults.append(f"{name} is {value!r}, but must be one of {expected}.{near}")
    return faults


def _factory(field: dataclasses.Field[Any]) -> Callable[[], Any] | None:
    if field.default is not dataclasses.MISSING:
        default = field.default
        return lambda: default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory


def _attribute_docs(cls: type) -> dict[str, str]:
    """Returns the strings below the fields that a class itself declares, by field."""
    try:
        module = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # A class typed at a prompt has no source.
        return {}
    body = module.body[0].body if isinstance(module.body[0], ast.ClassDef) else []
    docs = {}
    for statement, below in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            docs[statement.target.id] = " ".join(inspect.cleandoc(below.value.value).split())
    return docs


def is_section(hint: Hint) -> TypeGuard[type]:
    """Whether a type is a nested configclass."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def variants_of(hint: Hint) -> Variants | None:
    """Returns the `Variants` of an annotated type, or None."""
    markers = getattr(hint, "__metadata__", ())
    return next((marker for marker in markers if isinstance(marker, Variants)), None)


def import_path_of(hint: Hint) -> ImportPath | None:
    """Returns the `ImportPath` of an annotated type, or None."""
    markers = getattr(hint, "__metadata__", ())
    return next((marker for marker in markers if isinstance(marker, ImportPath)), None)


def options(hint: Hint) -> list[Hint]:
    """Returns the members of a union, flattened; of any other type, the type itself."""
    if hint is None:
        return [type(None)]
    if isinstance(hint, getattr(typing, "TypeAliasType", ())):
        return options(hint.__value__)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [option for member in typing.get_args(hint) for option in options(member)]
    return [hint]


def choices(hint: Hint) -> tuple[Any, ...]:
    """Returns the values of a `Literal`, and nothing for any other type."""
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def sequence_of(hint: Hint) -> tuple[Hint, ...] | None:
    """Returns the types of the items of a list or tuple: one each, or one and `...` for any number.
    Other types give None."""
    origin, members = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin not in (tuple, list):
        return None
    is_fixed = origin is tuple and members and Ellipsis not in members
    return members if is_fixed else (*(members[:1] or (Any,)), ...)


def mapping_of(hint: Hint) -> tuple[Hint, Hint] | None:
    """Returns the types of the keys and values of a mapping, and None for any other type."""
    if (typing.get_origin(hint) or hint) not in (dict, collections.abc.Mapping):
        return None
    return typing.get_args(hint) or (str, Any)  # type: ignore[return-value]
