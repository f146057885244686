"""The site: Sphinx reads the Markdown pages of this repository as they are.

    pip install --group docs && .ci/docs

The source folder is the repository and not docs, so the links between README.md, docs and tools
work in the site as they do in a checkout. docs/README.md is the side bar, too; a page that it lacks
fails the build.
"""

import re
import tomllib
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

import jax_intranode

ROOT = Path(__file__).resolve().parent.parent
OVERVIEW = "Overview and installation <self>"


def contents() -> dict[str, list[str]]:
    """The side bar: captions, and the pages under each. They are those of docs/README.md."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "docs" / "README.md").read_text().splitlines():
        if line.startswith("## "):
            # The page of all pages stands first, after the README.
            found[line[3:]] = [] if found else [OVERVIEW, "docs/README"]
        elif link := re.match(r"- \[.*?\]\(([^)]+)\)", line):
            page = (ROOT / "docs" / link[1]).resolve().relative_to(ROOT)
            found[list(found)[-1]].append(str(page.with_suffix("")))
    return found


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
html_js_files = ["wide.js"]
# Links to the repository, where pyproject.toml names it.
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
html_theme_options = {
    **({"source_repository": URLS["Repository"]} if "Repository" in URLS else {}),
    **{"source_branch": "main", "source_directory": ""},
    "footer_icons": [
        {"name": name, "url": url, "html": name, "class": ""} for name, url in URLS.items()
    ],
}
# index.html leads from the root of the site to its first page, README.html.
html_extra_path = ["site/root"]


class Words(SearchEnglish):
    """Finds "timeout" in JAX_INTRANODE_TIMEOUT_S, and "gather" in all_gather_matmul."""

    def split(self, input: str) -> list[str]:
        words = super().split(input)
        return words + [part for word in words if "_" in word for part in word.split("_") if part]


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Appends the tables of contents to the first page. On GitHub they would be clutter.

    Links to examples lead to the page that shows them, and not to a download.
    """
    source[0] = re.sub(r"\]\((?:\.\./)?examples/(?:\w+/)?(\w+\.(?:py|cu))\)", r"](#\1)", source[0])
    source[0] = re.sub(r"\]\(\.\./examples\)", "](/docs/examples.rst)", source[0])
    if name == root_doc:
        for caption, pages in contents().items():
            lines = ["```{toctree}", ":hidden:", f":caption: {caption}", *pages, "```"]
            source[0] += "\n" + "\n".join(lines) + "\n"


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.add_search_language(Words)
