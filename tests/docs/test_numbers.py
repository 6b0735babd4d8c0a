"""Measured numbers in README and docs come from docs/results."""

import importlib
import itertools
import json
import re
import sys

import pytest

from tests.docs.pages import NAMES, ROOT, prose, sections

RESULTS = ROOT / "docs" / "results"
# What a section says whose numbers were noted while something was developed.
NO_RESULT = "No stored result"
# A number with a unit of time or rate, or of memory in a table.
NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(?: |-)?(ms|us|TFLOP/s|GB/s|MB/s|TB/s|tokens/s|GB|s)(?![\w/])")
RATES = ("ms", "us", "TFLOP/s", "GB/s", "MB/s", "TB/s", "tokens/s")
# Keys of the results in each unit, and what a value is divided by.
UNITS = {
    "ms": (re.compile(r"^ms|_ms$|^ms_"), 1.0),
    "us": (re.compile(r"^ms|_ms$|^ms_"), 1e-3),
    "s": (re.compile(r"_s$|median|p99"), 1.0),
    "TFLOP/s": (re.compile(r"^tflops"), 1.0),
    "GB/s": (re.compile(r"^gb_per_s"), 1.0),
    "TB/s": (re.compile(r"^gb_per_s"), 1e3),
    "MB/s": (re.compile(r"^gb_per_s"), 1e-3),
    "tokens/s": (re.compile(r"tokens_per_s|median|p99"), 1.0),
    "GB": (re.compile(r"_bytes$"), 1e9),
}


@pytest.fixture(scope="module")
def result_tables():
    """The module that makes the tables, from scripts/."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module("result_data"), importlib.import_module("result_tables")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def leaves(data, key: str = ""):
    """Every number of a result with its key."""
    if isinstance(data, dict):
        for name, value in data.items():
            yield from leaves(value, name)
    elif isinstance(data, list):
        for value in data:
            yield from leaves(value, key)
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield key, float(data)


STORED = [leaf for file in sorted(RESULTS.glob("*.json")) for leaf in leaves(json.loads(file.read_text()))]


def is_stored(text: str, unit: str) -> bool:
    """Whether a result, rounded to the digits of `text`, is that number."""
    keys, scale = UNITS[unit]
    half = 0.5 * 10.0 ** -len(text.partition(".")[2])
    return any(keys.search(key) and abs(value / scale - float(text)) <= half * 1.0001 for key, value in STORED)


def measured_cells(text: str) -> list[str]:
    """Cells of a section's tables, without columns of what was wanted or predicted."""
    cells, head = [], []
    for line in text.splitlines():
        if not line.startswith("|"):
            head = []
            continue
        row = [cell.strip() for cell in line.strip("|").split("|")]
        head = head or row
        cells += [
            c for name, c in itertools.zip_longest(head, row, fillvalue="") if name not in ("wanted", "predicted")
        ]
    return cells


def unsourced(name: str) -> list[str]:
    """Numbers of a page in no result, outside of sections that say so: everywhere in README, else in tables."""
    found = []
    for heading, body in sections(name):
        text = prose(body)
        if NO_RESULT in text:
            assert name != "README.md", f"{heading}: README has measured numbers alone"
            continue
        numbers = [number for cell in measured_cells(text) for number in NUMBER.findall(cell)]
        if name == "README.md":
            numbers += [(number, unit) for number, unit in NUMBER.findall(text) if unit in RATES]
        found += [f"{heading}: {number} {unit}" for number, unit in numbers if not is_stored(number, unit)]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_numbers_have_a_source(name):
    """Each is in a stored result; `No stored result` is the sentence for a section of notes."""
    assert not unsourced(name), "store the result in docs/results, or say in the section: No stored result"


def test_a_number_without_a_source_is_found(monkeypatch):
    """The check can fail: on a table, and on README's prose."""
    assert is_stored("7.58", "ms") and is_stored("7.6", "ms") and is_stored("1160", "TFLOP/s")
    assert not is_stored("7.57", "ms") and not is_stored("7.58", "GB/s")
    pages = {
        "docs/page.md": [
            ("# A", "Takes 0.777 ms.\n\n| a | 7.58 ms, 0.777 ms |\n"),
            ("## B", "No stored result.\n| 3 us |"),
        ],
        "README.md": [("# C", "It takes 0.777 ms, or 7.58 ms.")],
    }
    monkeypatch.setattr(sys.modules[__name__], "sections", pages.get)
    assert unsourced("docs/page.md") == ["# A: 0.777 ms"] and unsourced("README.md") == ["# C: 0.777 ms"]


def test_tables_are_those_of_the_results(result_tables):
    """What `plot_results.py --tables` would write is there already."""
    data, tables = result_tables
    reports, marked = data.load(RESULTS), 0
    for name in NAMES:
        text = (ROOT / name).read_text()
        marked += text.count("<!-- table: ")
        assert tables.filled(text, reports) == text, f"{name}: run python scripts/plot_results.py --tables"
    assert marked >= 2
    with pytest.raises(LookupError, match="there is no table 'other'"):
        tables.filled("<!-- table: other -->\n<!-- end of table -->", reports)


def test_pictures_show_the_results(result_tables):
    """Each picture names the files behind it by their digests, and every page's pictures are there."""
    data, _ = result_tables
    digests = {report.digest for report in data.load(RESULTS)}
    pictures = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    for picture in pictures:
        source = re.search(r"<dc:source>(.*?)</dc:source>", picture.read_text())
        assert source is not None, picture
        stale = set(source[1].split("; ")) - digests
        assert not stale, (
            f"{picture.name} shows {sorted(stale)}: run python scripts/plot_results.py --pictures docs/pictures"
        )
    text = (ROOT / "docs" / "pictures" / "kernels.svg").read_text()
    assert "7.58 ms, DeepGEMM 8.93 ms" in text
    shown = {match for name in NAMES for match in re.findall(r"pictures/([\w.]+)\)", (ROOT / name).read_text())}
    assert shown == {picture.name for picture in pictures}


def test_results_say_where_they_come_from():
    """Device, versions, date and command of every stored result; its commit, where the machine had the repository."""
    for file in RESULTS.glob("*.json"):
        environment = json.loads(file.read_text())["environment"]
        for key in ("device", "versions", "date", "command", "commit"):
            assert environment[key], f"{file.name}: {key}"
