"""How the documentation is built: `make docs`. What can be derived is written to `_generated` first."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import generate  # noqa: E402  (it stands beside this file)

import lm_profiler  # noqa: E402

generate.write_all(HERE / "_generated")

project = "lm_profiler"
release = version = lm_profiler.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_generated"]
html_theme = "furo"
html_title = f"lm_profiler {release}"
html_static_path = html_css_files = ["style.css"]
html_show_copyright = False
html_copy_source = False  # of generated pages there is none
html_show_sourcelink = False
html_show_search_summary = (
    False  # a page that was opened as a file may not read the others
)

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True

# `make docs` asks for every name in a signature to have its place (`-n`). These are explained elsewhere: another
# project's list of names would have to be fetched.
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(lightning|pytorch_lightning|torch|collections|contextlib|pathlib|typing|types)\..*",
    ),
    ("py:class", r"Launch|Verb|Path"),  # the command line's, and a choice of words
    (
        "py:class",
        r"HookedRun|lm_profiler\.callbacks\.own_loop\.Batch",
    ),  # what profile() makes; any type
    (
        "py:.*",
        r"(lm_profiler\.(record|report)\..*|UsageError|CannotPlan)",
    ),  # told in words, not part of the API
]
