"""Reading configs: what is accepted, and the full text of what is refused."""

import json
import math
import pathlib
import subprocess
import sys
import textwrap
from dataclasses import FrozenInstanceError, field
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib import config
from shardlib.config import Change, Key, Variants, configclass
from shardlib.errors import ConfigError, MeshError


@configclass
class Small:
    name: Literal["small"] = "small"
    width: int = 8
    """Width of
    the layers."""


@configclass
class Big:
    name: Literal["big"] = "big"
    width: int = 80
    depth: int
    """How many layers."""


def models():
    return {"small": Small, "big": Big}


@configclass
class Source:
    path: str
    weight: float = 1.0


@configclass
class Train:
    steps: int = 3
    """Optimizer steps."""
    lr: float = 1e-3
    clip: float | None = 1.0
    remat: Literal["none", "dots", "full"] = "none"
    async_save: bool = True
    tags: tuple[str, ...] = ()
    betas: tuple[float, float] = (0.9, 0.95)

    def __post_init__(self):
        if self.steps == 13:
            raise ValueError("13 steps bring bad luck.\n  Take 12.")
        if self.lr == 7:
            raise MeshError("a mesh cannot have the rate 7.")
        if self.lr < 0:
            raise ValueError("lr is negative.\n  Flip it.\nremat: not here.\nclip 3 is odd.")


@configclass
class Root:
    run_dir: str
    """Where the run is written."""
    model: Annotated[Any, Variants(models, default="small")] = field(default_factory=Small)
    """Which model."""
    train: Train = field(default_factory=lambda: Train(steps=5))
    eval: Train | None = None
    mesh: Literal["auto"] | str | dict[str, int | str] = "auto"
    sources: tuple[Source, ...] = ()


@configclass
class Strict:
    model: Annotated[Any, Variants(models)]
    text: str = "a"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, name="x.yaml"):
        pathlib.Path(name).write_text(textwrap.dedent(text), encoding="utf-8")
        return name

    return write


def faults(cls, path=None, overrides=()):
    with pytest.raises(ConfigError) as caught:
        config.load(cls, path, overrides)
    return str(caught.value)


def test_a_configclass_is_an_ordinary_frozen_dataclass():
    assert hash(Train(steps=4)) == hash(Train(steps=4))
    with pytest.raises(FrozenInstanceError):
        Train().steps = 5
    with pytest.raises(TypeError):
        Train(4)


def test_importing_config_imports_nothing_heavy():
    code = "import sys, shardlib.config; print({'yaml', 'jax', 'typer'} & {*sys.modules})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "set()\n"


def test_the_type_of_the_field_decides_what_a_scalar_means(write):
    path = write("""
        run_dir: no
        model:
          name: big
          depth: 0_2
        train:
          steps: 1_000
          lr: 1e-3
          clip: ~
          async_save: off
          tags: [010, 2020-01-01, yes, 1e5, "null", null]
        mesh: {data: 4x8, fsdp: -1}
        eval:
          lr: 3
    """)
    loaded = config.load(Root, path)
    assert loaded == Root(
        run_dir="no",
        model=Big(depth=2),
        train=Train(
            steps=1000,
            lr=0.001,
            clip=None,
            async_save=False,
            tags=("010", "2020-01-01", "yes", "1e5", "null", "null"),
        ),
        mesh={"data": "4x8", "fsdp": -1},
        eval=Train(lr=3.0),
    )
    assert type(loaded.eval.lr) is float
    assert isinstance(loaded.mesh, dict)
    assert type(loaded.mesh["fsdp"]) is int


def test_overrides_are_applied_in_order_on_top_of_the_file(write):
    path = write("""
        run_dir: runs/a
        mesh: auto
        eval:
        sources:
        - path: a
        - path: b
    """)
    loaded = config.load(
        Root,
        path,
        [
            "run_dir=runs/*.txt",
            "train.steps=7",
            "train.steps=1e4",
            "train.clip=None",
            "train.tags=['x: y', a=b]",
            "mesh=fsdp=4,tensor=2",
            "eval.remat=full",
            "sources.1.weight=.5",
        ],
    )
    assert loaded == Root(
        run_dir="runs/*.txt",
        train=Train(steps=10_000, clip=None, tags=("x: y", "a=b")),
        mesh="fsdp=4,tensor=2",
        eval=Train(remat="full"),
        sources=(Source(path="a"), Source(path="b", weight=0.5)),
    )
    assert config.load(Root, path, ["mesh.fsdp=4", "mesh.data=2"]).mesh == {"fsdp": 4, "data": 2}
    assert config.load(Root, path, ["mesh={fsdp: 4}"]).mesh == {"fsdp": 4}
    assert config.load(Root, path, ["run_dir="]).run_dir == ""
    assert config.load(Root, path, ["run_dir=a: b # c"]).run_dir == "a: b # c"
    assert config.load(Root, path, ["eval=null"]).eval is None


def test_all_faults_are_reported_at_once_where_they_were_written(write):
    path = write("""\
        model: {name: big, depth: 3, wdth: 4}
        train:
          stepz: 3
          lr: fast
          lr: 2
          clip: [1]
          betas: [1, 2, 3]
          async_save: maybe
        mesh: 3
        sources:
        - weight: heavy
        - path: b
          speed: 3
    """)
    assert faults(
        Root,
        path,
        ["train.steps=abc", "foo=1", "train.remat=non", "steps=3", "junk", "eval.lr="],
    ) == textwrap.dedent("""\
        the configuration has 17 faults:
          x.yaml:5: train.lr: the key is given twice, first in line 4. Remove one.
          command line: junk: not an override. Write key.path=value, for example train.steps=100.
          x.yaml:1: model.wdth: unknown key of 'big'. Did you mean 'width'?
          x.yaml:3: train.stepz: unknown key. Did you mean 'steps'?
          x.yaml:4: train.lr: expected a number, got 'fast'.
          x.yaml:6: train.clip: expected a number or null, got a list of 1.
          x.yaml:7: train.betas: expected a list of 2: number, number, got a list of 3.
          x.yaml:8: train.async_save: expected true or false, got 'maybe'.
          command line: train.steps=abc: expected an integer, got 'abc'.
          command line: train.remat=non: 'non' is not one of 'none', 'dots', 'full'. Did you mean 'none'?
          x.yaml:11: sources.0.weight: expected a number, got 'heavy'.
          x.yaml:11: sources.0.path: missing required key (text).
          x.yaml:13: sources.1.speed: unknown key. The keys here are path, weight.
          command line: foo=1: unknown key. The keys here are run_dir, model, train, eval, mesh, sources.
          command line: steps=3: unknown key. Did you mean 'train.steps'?
          command line: eval.lr=: expected a number, got nothing.
          x.yaml: run_dir: missing required key (text).""")  # noqa: E501


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.steps=true"], "train.steps=true: expected an integer, got 'true'."),
        (["train.steps=a://" + "b" * 80 + "@c"], "train.steps=a://***@c: expected an integer, got "
         "'a://***@c'."),
        (["train.steps.x=1"], "train.steps.x=1: train.steps: expected an integer, "
         "got a mapping of 'x'."),
        (["train.steps=13"], "train.steps=13: train: 13 steps bring bad luck.\n    Take 12."),
        (["train.lr=7"], "train.lr=7: train: a mesh cannot have the rate 7."),
        (["train.tags=[a"], "train.tags=[a: not YAML: expected ',' or ']', but got "
         "'<stream end>'."),
        (["train.tags={a: 1, a: 2}"], "train.tags={a: 1, a: 2}: train.tags.a: the key is given "
         "twice, first in line 1. Remove one."),
        (["=1"], "=1: not an override. Write key.path=value, for example train.steps=100."),
        (["sources=[{path: a}]", "sources.1.path=b"], "sources.1.path=b: sources is a list of 1, "
         "so '1' must be an index below that."),
        (["model=big"], "model=big: expected a section with the key 'name', got 'big'. "
         "Write model.name=big."),
    ],
)  # fmt: skip
def test_one_fault_of_an_override(overrides, message):
    assert faults(Root, None, ["run_dir=a", *overrides]) == f"command line: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "x.yaml:2: not a YAML document: expected ',' or ']', but got '<stream end>'."),
        pytest.param(
            "a: 1\nb: \x01",
            "x.yaml:2: not a YAML document: the character #x0001 is not allowed.",
            id="a control character",
        ),
        ("a:\n\tb: 1", "x.yaml:2: not a YAML document: found character '\\t' that cannot start any "
         "token; indent with spaces."),
        ("a: *b", "x.yaml:1: not a YAML document: found undefined alias 'b'."),
        ("run_dir: !!python/name:os.system", "x.yaml:1: run_dir: the tag !!python/name:os.system "
         "is not allowed here."),
        ("run_dir: a\n? [a]\n: 1", "x.yaml:2: a key must be text."),
        ("run_dir: a\nmodel:\n  width: " + "9" * 5000, "x.yaml:3: model.width: expected an "
         "integer, got '" + "9" * 57 + "...'."),
        ("run_dir: a\ntrain:\n  clip: 3\n  lr: -1", "the configuration has 3 faults:\n"
         "  x.yaml:4: train.lr: lr is negative.\n      Flip it.\n"
         "  x.yaml:2: train: remat: not here.\n"
         "  x.yaml:3: train.clip: clip 3 is odd."),
        ("run_dir: a\ntrain:\n  <<: 3", "x.yaml:3: train: << merges mappings only."),
    ],
)  # fmt: skip
def test_one_fault_of_a_file(write, text, message):
    assert faults(Root, write(text + "\n")) == message


def levels(count, line):
    """A document of one line for each level, which may name the level before."""
    return "\n".join(["k0: &k0 []", *(line.format(n, n - 1) for n in range(1, count))])


TOO_DEEP = "x.yaml: values nest more than 64 deep, which no config does."
PART_OF_ITSELF = "x.yaml:2: an alias refers to a value that contains it."
TOO_MANY = "values, keys and aliases included, but a config has at most 10,000."
BOUNDS = {
    "deep": ("[" * 65 + "]" * 65, TOO_DEEP),
    "deeper than the stack": ("[" * 5000, TOO_DEEP),
    "deep by aliases": (levels(40, "k{0}: &k{0} [[*k{1}]]"), TOO_DEEP),
    "deeper than the stack by aliases": (levels(5000, "k{0}: &k{0} [[*k{1}]]"), TOO_DEEP),
    "part of itself": ("a:\n  &a [*a]", PART_OF_ITSELF),
    "deep in a key": ("? " + "[" * 300 + "]" * 300 + "\n: 1", TOO_DEEP),
    "a key that is part of itself": ("a:\n  &a\n  ? [*a]\n  : 1", PART_OF_ITSELF),
    # 5 keys + 1 + (k0) 1 + (k1) 11 + (k2) 111 + (k3) 1,111 + (k4) 11,111 lists.
    "many": (
        levels(5, "k{0}: &k{0} [" + ",".join(["*k{1}"] * 10) + "]"),
        f"x.yaml: 12,351 {TOO_MANY}",
    ),
    "a trillion": (
        levels(50, "k{0}: &k{0} [" + ",".join(["*k{1}"] * 10) + "]"),
        f"x.yaml: more than a trillion {TOO_MANY}",
    ),
    "merges of which nothing is left": (
        levels(30, "k{0}: &k{0}\n  <<: [" + ",".join(["*k{1}"] * 9) + "]").replace("[]", "{}"),
        f"x.yaml: more than a trillion {TOO_MANY}",
    ),
    "large": ("#" * (1 << 18), "x.yaml: 262,145 bytes, but a config has at most 262,144."),
}


@pytest.mark.parametrize("case", BOUNDS)
def test_a_file_that_holds_more_than_any_config(write, case):
    text, message = BOUNDS[case]
    assert faults(Root, write(text + "\n")) == message


def test_an_override_or_a_file_without_end():
    assert "command line: train.tags: values nest more than 64 deep" in faults(
        Root, None, ["run_dir=a", f"train.tags={'[' * 5000}{']' * 5000}"]
    )
    assert faults(Root, "/dev/zero").startswith("/dev/zero: more than 262,144 bytes, but a config")


def test_a_missing_or_unreadable_file_is_named(write):
    assert config.load(Train, write("# nothing")) == Train()
    pathlib.Path("vit.yaml").touch()
    assert faults(Root, "vlt.yaml") == "vlt.yaml: no such config file. Did you mean 'vit.yaml'?"
    # Two names are not alike because both end in .yaml.
    assert faults(Root, "nope.yaml").startswith("nope.yaml: no such config file.\n  Give a YAML")
    assert faults(Root, ".") == ".: the config file cannot be read: Is a directory."
    pathlib.Path("latin.yaml").write_bytes(b"run_dir: \xe9")
    assert faults(Root, "latin.yaml").endswith("cannot be read: it is not UTF-8 text.")


def test_anchors_and_merge_keys_expand(write):
    path = write("""
        run_dir: a
        train: &base {steps: 7, remat: dots}
        eval:
          <<: *base
          steps: 8
    """)
    loaded = config.load(Root, path)
    assert loaded.eval == Train(steps=8, remat="dots")
    # An override of one place does not reach the other.
    changed = config.load(Root, path, ["train.remat=full"])
    assert (changed.train.remat, changed.eval.remat) == ("full", "dots")


def test_variants_without_a_default_require_their_key(write):
    fault = "model: missing required key (a section with the key 'name')."
    assert faults(Strict, write("text: b")) == f"x.yaml: {fault}"
    assert config.load(Strict, None, ["model.name=small"]).model == Small()


def test_variants_must_carry_their_names():
    @configclass
    class Nameless:
        width: int = 3

    with pytest.raises(TypeError, match=r"Nameless .*needs the field name: Literal\['nameless'\]"):
        Variants(lambda: {"nameless": Nameless}).classes()


@configclass
class Exotic:
    depth: Literal[1, 2, True, None, "auto"] = 1
    either: int | float | bool | str | None = None
    free: Any = None


def test_unions_and_literals_of_several_types():
    loaded = config.load(Exotic, None, ["depth=2", "either=1e3"])
    assert loaded == Exotic(depth=2, either=1000.0)
    assert config.load(Exotic, None, ["depth=null"]).depth is None
    assert config.load(Exotic, None, ["depth=true"]).depth is True
    assert config.load(Exotic, None, ["free={a: [1, no, 1.5, null]}"]).free == {
        "a": [1, "no", 1.5, None]
    }
    assert faults(Exotic, None, ["depth=3"]) == (
        "command line: depth=3: '3' is not one of 1, 2, true, null, 'auto'."
    )


@pytest.mark.parametrize("hint", [pathlib.Path, list[set[int]], Annotated[int, "> 0"]])
def test_a_type_that_a_config_cannot_hold_is_refused(hint):
    wrong = configclass(type("Wrong", (), {"__annotations__": {"key": hint}, "key": None}))
    with pytest.raises(TypeError, match=r"Wrong.key is .* which a config cannot hold"):
        config.load(wrong)


def test_from_dict_takes_typed_data_strictly():
    root = Root(run_dir="a", model=Big(depth=2), sources=(Source(path="b"),))
    assert config.from_dict(Root, config.to_dict(root), "checkpoint") == root
    fault = r"(?s)steps: expected an integer, got true.*lr: expected a number, got '1'.*old: unkn"
    with pytest.raises(ConfigError, match=fault):
        config.from_dict(Train, {"steps": True, "lr": "1", "old": 1}, "checkpoint")


def test_keys_lists_sections_and_variants_with_the_defaults_in_force():
    keys = config.keys(Root)
    assert keys[:5] == [
        Key("run_dir", "text", "", "Where the run is written."),
        Key("model.name", "'small' | 'big'", "small", "Which model."),
        Key("model.width", "integer", "8", "Width of the layers.", "name=small"),
        Key("model.width", "integer", "80", "", "name=big"),
        Key("model.depth", "integer", "", "How many layers.", "name=big"),
    ]
    assert [key.required for key in keys[:2]] == [True, False]
    by_path = {key.path: key for key in keys}
    assert (by_path["train.steps"].default_text, by_path["eval.steps"].default_text) == ("5", "3")
    assert by_path["mesh"].type_text == "'auto' | text | mapping of text to (integer | text)"
    assert by_path["sources[].path"].required


def test_the_json_schema_accepts_what_load_accepts():
    schema = config.json_schema(Root)
    json.dumps(schema)
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)

    def valid(**data):
        return validator.is_valid({"run_dir": "a", **data})

    assert valid(model={"width": 3}, train={"clip": None}, mesh={"fsdp": -1})
    assert valid(model={"name": "big", "depth": 3}, mesh="fsdp=8", sources=[{"path": "a"}])
    assert not valid(model={"depth": 3})
    assert not valid(train={"stepz": 3})
    assert not valid(train={"betas": [1]})
    assert not validator.is_valid({})
    assert schema["properties"]["train"]["properties"]["steps"]["description"] == "Optimizer steps."


def test_diff_names_what_differs():
    old = Root(run_dir="a", model=Small(), train=Train(tags=("a",)))
    new = Root(run_dir="a", model=Big(depth=2), train=Train(tags=("a", "b"), clip=math.nan))
    assert config.diff(new, new) == []
    model, width, depth, clip, tags = config.diff(old, new)
    assert (model.path, model.new, width.new) == ("model.name", "big", 80)
    assert depth == Change("model.depth", config.ABSENT, 2)
    assert (clip.path, tags.path, tags.new) == ("train.clip", "train.tags", ["a", "b"])


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.sampled_from(
        ["1e-3", "no", "On", "none", ".inf", "1_0", "~", "", "0x1f", "2020-01-01", "="]
    ),
)
trains = st.builds(
    Train,
    steps=st.integers().filter(lambda n: n != 13),
    lr=st.floats(allow_nan=False).filter(lambda x: x >= 0 and x != 7),
    clip=st.none() | st.floats(allow_nan=False),
    remat=st.sampled_from(["none", "dots", "full"]),
    tags=st.lists(st.text() | scalars.map(str)).map(tuple),
    betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
roots = st.builds(
    Root,
    run_dir=scalars.map(str),
    model=st.builds(Small, width=st.integers()) | st.builds(Big, depth=st.integers()),
    train=trains,
    eval=st.none() | trains,
    mesh=st.text() | st.dictionaries(st.text(), st.integers() | scalars.map(str)),
    sources=st.lists(st.builds(Source, path=st.text(), weight=st.floats(0, 1))).map(tuple),
)
exotics = st.builds(
    Exotic,
    depth=st.sampled_from([1, 2, True, None, "auto"]),
    either=scalars,
    free=st.recursive(scalars, lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=5),
)


@settings(deadline=None)
@given(instance=roots | exotics)
def test_yaml_reads_back_to_an_equal_config(tmp_path_factory, instance):
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(config.to_yaml(instance), encoding="utf-8", newline="")
    loaded = config.load(type(instance), path)
    assert loaded == instance
    assert repr(loaded) == repr(instance)  # 1, 1.0 and True are equal but not the same


def test_in_python_too_a_literal_takes_its_values_only():
    @configclass
    class Chosen:
        kind: Literal["ring", "gather"] = "ring"
        count: int | Literal["auto"] = 1

    assert Chosen(kind="gather", count="auto").count == "auto"
    with pytest.raises(ValueError, match=r"(?s)'gahter', .*Did you mean 'gather'.*'auto', int"):
        Chosen(kind="gahter", count="atuo")
