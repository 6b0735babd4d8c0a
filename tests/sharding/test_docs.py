"""The map of `docs/sharding.md` from what must hold to tests names tests that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"s": "sharding", "m": "multi_device", "k": "kernels", "n": "model", "l": "lowering"}


def test_every_test_of_the_map_exists():
    text = (ROOT / "docs" / "sharding.md").read_text()
    rows = [
        line.split(" | ")[-1].strip(" |")
        for line in text[text.index("| what must hold") :].splitlines()[2:]
        if "|" in line
    ]
    assert len(rows) > 30
    for row in rows:
        for entry in row.split("; "):
            file, _, names = entry.partition(": ")
            match = re.fullmatch(r"([smknl])/(\w+)", file)
            assert match, entry
            source = (ROOT / "tests" / FOLDERS[match[1]] / f"{match[2]}.py").read_text()
            for name in filter(None, names.split(", ")):
                assert re.search(rf"def test_\w*{name}", source), f"{name!r} is no test of {file}"
