"""The stream of samples is one and the same, whoever reads it, in whatever batches."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shardlib.data import ArrangedSource, ImageData, MapSource, StreamPosition, TextData, open_data
from shardlib.registry import DataSpec
from shardlib.train.reduce.uneven import arranged_rows

LENGTH = 240
"""Samples of the uninterrupted stream: several passes of all data here."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Part of a run: so many steps of one batch size, read in ranges by so many processes."""

    steps: int
    per_process: int
    processes: int
    skipped: int = 0
    """Samples that a rewind jumps over before it."""

    @property
    def global_batch(self):
        return self.per_process * self.processes


stages = st.lists(
    st.builds(
        Stage,
        steps=st.integers(0, 4),
        per_process=st.integers(1, 3),
        processes=st.sampled_from((1, 2, 3, 4)),
    ),
    min_size=1,
    max_size=5,
)


def write_text(folder, name, documents):
    (folder / name).mkdir(parents=True)
    for number in range(documents):
        words = " ".join(f"{name}{number}.{k}" for k in range(3 + 7 * number % 11))
        (folder / name / f"{number}.txt").write_text(words)
    return str(folder / name)


def write_images(folder):
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for number in range(11):
            pixels = (np.arange(300).reshape(10, 10, 3) * (number + 2) % 251).astype(np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return str(folder)


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    paths = tuple(write_text(folder, name, size) for name, size in (("a", 9), ("b", 5), ("c", 12)))
    text = {"tokenizer": "bytes", "sequence_length": 24, "eval_fraction": 0.2}
    return {
        "text": TextData(path=paths[0], **text),
        "mixture": TextData(path=paths, **text),
        "weighted": TextData(path=paths, weights=(0.6, 0.1, 0.3), **text),
        "images": ImageData(
            path=write_images(folder / "images"), image_size=8, augment="resized_crop", flip=True
        ),
    }


@pytest.fixture(scope="module")
def streams(configs):
    """The first samples of each stream, read in one piece."""

    def whole(config):
        return open_data(config, global_batch=LENGTH, seed=3, split="train").read(0, 0, LENGTH)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDLIB_CACHE", str(next(iter(configs.values())).path) + ".cache")
        yield {name: whole(config) for name, config in configs.items()}


@pytest.fixture(autouse=True)
def cache(streams):
    """One cache for the module: Hypothesis reads the same text many times."""


def joined(batches):
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def read_stage(config, stage, position):
    """What all processes together read of a stage, each its own rows with a source of its own."""
    if not stage.steps:
        return []
    size, batches = stage.per_process, []
    for process in range(stage.processes):
        source = open_data(config, global_batch=stage.global_batch, seed=3, split="train")
        source = source.at(position)
        batches.append(
            [
                source.read(position.step + step, process * size, (process + 1) * size)
                for step in range(stage.steps)
            ]
        )
    return [joined(parts) for parts in zip(*batches, strict=True)]


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("name", ["text", "mixture", "weighted", "images"])
@settings(max_examples=12, deadline=None)
@given(stages=stages)
def test_hand_overs_leave_the_stream_as_it_is(configs, streams, name, stages):
    position, batches = StreamPosition(), []
    for stage in stages:
        batches += read_stage(configs[name], stage, position)
        step = position.step + stage.steps
        position = StreamPosition(step, position.samples_at(step, stage.global_batch))
    assert position.step == sum(stage.steps for stage in stages)
    assert position.samples_seen == sum(stage.steps * stage.global_batch for stage in stages)
    if batches:
        assert_equal(
            joined(batches),
            {key: values[: position.samples_seen] for key, values in streams[name].items()},
        )


@pytest.mark.parametrize("name", ["text", "mixture", "weighted", "images"])
@settings(max_examples=12, deadline=None)
@given(step=st.integers(0, 10**6), seen=st.integers(0, LENGTH - 12), batch=st.integers(1, 6))
def test_a_rewind_goes_on_past_what_it_skips(configs, streams, name, step, seen, batch):
    source = open_data(configs[name], global_batch=batch, seed=3, split="train")
    moved = source.at(StreamPosition(step, seen))
    found = joined([moved.read(step + k, 0, batch) for k in range(2)])
    expected = {key: values[seen : seen + 2 * batch] for key, values in streams[name].items()}
    assert_equal(found, expected)
    assert moved.fingerprint == source.fingerprint
    # The source that was moved is what it was.
    first = {key: values[:batch] for key, values in streams[name].items()}
    assert_equal(source.read(0, 0, batch), first)


@pytest.mark.parametrize("counts", [(1, 3), (2, 1)])
def test_rows_arranged_for_unequal_groups(configs, streams, counts):
    batch = 4 * sum(counts)
    source = open_data(configs["weighted"], global_batch=batch, seed=3, split="train")
    arranged = ArrangedSource(source.at(StreamPosition(5, 17)), arranged_rows(counts, 4))
    # Rows that fill the turns of a smaller group up stand for no new sample.
    _, places = np.unique(arranged.rows, return_index=True)
    found = arranged.read(5, 0, arranged.global_batch)
    expected = {key: values[17 : 17 + batch] for key, values in streams["weighted"].items()}
    assert_equal({key: values[places] for key, values in found.items()}, expected)


class Numbers:
    def __getitem__(self, index):
        return {"x": np.array(index, np.int32)}


def numbers(**options):
    return MapSource(Numbers, spec=DataSpec(), padding={"x": np.array(-1, np.int32)}, **options)


def test_a_pass_with_an_end():
    source = numbers(global_batch=4, num_examples=11).at(StreamPosition(2, 3))
    assert source.num_steps == 4
    found = [source.read(step, 0, 4)["x"].tolist() for step in (2, 3)]
    assert found == [[3, 4, 5, 6], [7, 8, 9, 10]]
    assert source.at(StreamPosition(2, 8)).read(2, 0, 4)["x"].tolist() == [8, 9, 10, -1]
    assert source.at(StreamPosition(2, 11)).num_steps == 2
    assert source.at(StreamPosition(2, 30)).num_steps == 2


def test_positions_that_cannot_be():
    message = "neither part of a position may be negative: StreamPosition(step=3, samples_seen=-1)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        StreamPosition(3, -1)
    source = numbers(global_batch=4).at(StreamPosition(3, 20))
    with pytest.raises(ValueError, match=r"^step 2 lies before step 3, where the stream begins$"):
        source.read(2, 0, 4)
    assert StreamPosition(3, 20).samples_at(5, 4) == 28
