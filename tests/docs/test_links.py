"""Links between README, docs and files lead somewhere."""

import re

import pytest

from tests.docs.pages import NAMES, ROOT, anchors, sections

LINK = re.compile(r"\]\(([^)\s]+)\)")
# Paths in backticks, such as `tests/parity` or `docs/results/topk.json`.
NAMED = re.compile(r"`((?:docs|dsa_jax|pallas_kernels|scripts|sharding|tests)/[\w./-]*)`")


@pytest.mark.parametrize("name", NAMES)
def test_links_resolve(name):
    """Files exist, and so do the headings that a link names; files named in backticks exist too."""
    text, folder = "\n".join(body for _, body in sections(name)), (ROOT / name).parent
    broken = []
    for target in LINK.findall(text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (folder / path).resolve() if path else ROOT / name
        if not file.exists() or (anchor and anchor not in anchors(str(file.relative_to(ROOT)))):
            broken.append(target)
    broken += [path for path in NAMED.findall(text) if not (ROOT / path).exists()]
    assert not broken, f"{name}: {broken}"


def test_every_page_is_in_the_index():
    """No page that nobody finds."""
    linked = set(LINK.findall((ROOT / "docs" / "index.md").read_text()))
    assert {name.removeprefix("docs/") for name in NAMES} - linked <= {"README.md", "index.md"}
