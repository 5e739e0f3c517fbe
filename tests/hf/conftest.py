"""Folders in the format of Hugging Face."""

import json
import shutil

import pytest


@pytest.fixture
def edited(tmp_path):
    """Returns a copy of a folder with another config.json."""

    def edit(folder, changes, remove=()):
        copy = shutil.copytree(folder, tmp_path / "edited")
        config = json.loads((copy / "config.json").read_text()) | changes
        config = {name: value for name, value in config.items() if name not in remove}
        (copy / "config.json").write_text(json.dumps(config))
        return copy

    return edit
