"""The site: Sphinx reads the Markdown pages of this repository as they are.

    pip install '.[docs]' && .ci/docs

The source folder is the repository and not docs, so the links between README.md, docs and tools
work in the site as they do in a checkout. A page that `CONTENTS` lacks fails the build.
"""

from sphinx.application import Sphinx

import jax_intranode

# The side bar: captions, and the pages under each.
CONTENTS = {
    "Start here": ["Overview and installation <self>", "docs/when", "docs/performance"],
    "User guide": [
        "docs/usage",
        "docs/processes",
        "docs/unedited",
        "docs/collective_matmuls",
        "docs/gradients",
        "docs/decoding",
        "docs/explain",
        "docs/commands",
        "docs/profilers",
        "docs/own_kernels",
        "docs/nodes",
    ],
    "When something is wrong": ["docs/errors", "docs/failures", "docs/limits"],
    "Reference": [
        "docs/functions",
        "docs/api",
        "docs/environment",
        "docs/compatibility",
        "docs/security",
        "docs/contract",
        "docs/bench",
        "CHANGELOG",
    ],
    "For contributors": [
        "docs/README",
        "docs/how_it_works",
        "CONTRIBUTING",
        "docs/porting",
        "tools/README",
        "docs/measurements/README",
        "docs/measurements/experiments",
        "docs/measurements/earlier",
    ],
}

project = "jax_intranode"
author = "the jax_intranode contributors"
version = release = jax_intranode.__version__

root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/*.rst", "docs/measurements/*.md", "tools/*.md"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 4  # the anchors that GitHub makes
highlight_language = "none"  # blocks that name no language are output or commands
# In docstrings a word between single backquotes is a name of Python.
default_role = "py:obj"
autodoc_typehints = "none"  # the texts have them

html_theme = "furo"
html_title = f"jax_intranode {version}"
html_show_copyright = False
html_copy_source = False
html_static_path = ["site/static"]
html_css_files = ["wide.css"]
# index.html leads from the root of the site to its first page, README.html.
html_extra_path = ["site/root"]


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Appends the tables of contents to the first page. On GitHub they would be clutter."""
    if name == root_doc:
        for caption, pages in CONTENTS.items():
            lines = ["```{toctree}", ":hidden:", f":caption: {caption}", *pages, "```"]
            source[0] += "\n" + "\n".join(lines) + "\n"


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
