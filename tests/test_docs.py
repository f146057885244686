"""The links and anchors of the Markdown pages resolve, and the pages follow their own rules."""

import re
from collections import Counter
from pathlib import Path

import pytest

from jax_intranode._src.selection import config

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tools/*.md")])

pytestmark = [
    pytest.mark.one_version,
    pytest.mark.skipif(not DOCS.exists(), reason="the pages are not here"),
]


def without_code(text: str) -> str:
    """The text without blocks and spans of code, in which a bracket is no link."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?<=\n\n)(?: {4}.*\n)+", "", text)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def links(page: Path) -> list[str]:
    """The targets of a page's links and images that lie in this repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve_and_named_files_exist(page: Path) -> None:
    """Of files, paths in code spans, but those after the word "new"."""
    for target in links(page):
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors(linked), f"{target}: no such heading"
    folders = "xla_ffi|jax_intranode|docs|examples|tests|tools|cmake"
    if (ROOT / ".ci").exists():  # the sdist lacks these
        folders += "|\\.ci"
    for name in re.findall(rf"(?<!new )`((?:_src|{folders})/[\w./]+)`", page.read_text()):
        path = ROOT / ("jax_intranode/" + name if name.startswith("_src") else name)
        assert path.exists(), f"{name}: no such file"


def test_named_tests_exist() -> None:
    sources = "".join(file.read_text() for file in ROOT.glob("tests/**/test_*.py"))
    names = re.findall(r"`(test_\w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(names) > 20
    assert [name for name in names if f"def {name}(" not in sources] == []


def test_the_index_has_every_page_once() -> None:
    """The first link of each item is its page. The site's side bar is made of them (conf.py)."""
    index = DOCS / "README.md"
    items = re.findall(r"^- \[.*?\]\(([^)]+)\)", index.read_text(), re.MULTILINE)
    listed = Counter((index.parent / item).resolve() for item in items)
    pages = {*PAGES, *ROOT.glob("docs/*.rst")} - {index, ROOT / "README.md"}
    assert listed == Counter(pages)


def test_the_page_of_examples_shows_each_once() -> None:
    page = DOCS / "examples.rst"
    shown = re.findall(r"^\.\. literalinclude:: \.\./(.*)$", page.read_text(), re.MULTILINE)
    files = (file for end in ("py", "cu") for file in ROOT.glob(f"examples/**/*.{end}"))
    assert Counter(shown) == Counter(str(file.relative_to(ROOT)) for file in files)
    # The site's links to examples lead to these labels (conf.py).
    labels = re.findall(r"^\.\. _(.*):$", page.read_text(), re.MULTILINE)
    assert labels == [Path(file).name for file in shown]


def test_the_environment_page_agrees_with_config() -> None:
    page = DOCS / "environment.md"
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", page.read_text(), re.MULTILINE)
    assert [(name, row.strip()) for name, row in rows] == [
        (v.name, f"{v.values} | {v.default} | {v.meaning}")
        for reader in ("package", "build", "launcher", "tests")
        for v in config.VARIABLES
        if v.reader == reader
    ], "run tools/environment_page.py"


def test_the_errors_page_has_texts_that_exist() -> None:
    ours = ("jax_intranode/**/*.py", "jax_intranode/include/**/*.h", "xla_ffi/**/*.[ch]*")
    files = [file for pattern in ours for file in ROOT.glob(pattern)]
    # Literals that stand side by side are one text.
    sources = "".join(re.sub(r'"\s*f?"', "", file.read_text()) for file in files)
    cells = re.findall(r"^\| (`.*?) \|", (DOCS / "errors.md").read_text(), re.MULTILINE)
    cells = [cell for cell in cells if " (from " not in cell]  # not those of JAX and CUDA
    texts = [text for cell in cells for text in re.findall("`(.*?)`", cell)]
    assert len(texts) > 30
    assert [text for text in texts if text not in sources and text != "jax.lax"] == []
