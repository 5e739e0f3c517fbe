"""The site: `sphinx-build -W -b html docs docs/_build/html`, with the extra `docs`."""

import os
import sys
from pathlib import Path

# Modules are imported for their docstrings, and wait for no accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent))

import shardlib

project = "shardlib"
version = release = shardlib.__version__
html_title = f"shardlib {release}"
html_theme = "furo"
html_copy_source = False

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_site",
]
exclude_patterns = ["_build"]

# The anchors of headings are those of GitHub.
myst_heading_anchors = 4

# A name in backticks becomes a link if it is in the reference, and code otherwise.
default_role = "py:obj"
add_module_names = False
maximum_signature_line_length = 80
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
