"""The README's account of the command line against the parser, and of the formats against the tests that bound them."""

import argparse
import re
from pathlib import Path

import pytest

from dsa_jax.cli import build_parser
from pallas_kernels.ckv_records import ckv_format, index_key_format
from tests.kernels import test_ckv_records

README = Path(__file__).parents[2] / "README.md"
SECTION = README.read_text(encoding="utf-8").split("\n## Command line\n")[1].split("\n## ")[0]


def commands() -> dict[str, argparse.ArgumentParser]:
    """Parser of each command."""
    (action,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(action.choices)


def flags(parser: argparse.ArgumentParser) -> set[str]:
    """Flags of one parser as the README writes them."""
    found = set()
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith("--") and name != "--help"]
        both = isinstance(action, argparse.BooleanOptionalAction)
        found |= {f"--[no-]{name[2:]}" for name in names if both and not name.startswith("--no-")}
        found |= set() if both else set(names)
    return found


def named(text: str) -> set[str]:
    """Flags that a text names."""
    return set(re.findall(r"(?<![\w-])--(?:\[no-\])?[a-z][a-z0-9-]*", text))


def test_every_flag_is_named_and_every_named_flag_exists():
    """In both directions, `--debug` of the program itself among them."""
    every = set().union(*map(flags, commands().values())) | flags(build_parser())
    assert named(SECTION) == every


@pytest.mark.parametrize("command", commands())
def test_the_synopsis_of_each_command(command):
    """Its own flags are in its lines, those of all models are left to the table; so are its arguments."""
    parser, synopsis = commands()[command], SECTION.split("```")[1]
    (lines,) = [part for part in re.split(r"\n(?=dsa-jax )", synopsis.strip()) if part.split()[1] == command]
    shared = flags(commands()["generate"]) & flags(commands()["plan"])
    missing = flags(parser) - named(lines)
    assert missing <= (shared if "[model flags]" in lines else set()), missing
    assert named(lines) <= flags(parser)
    for action in parser._actions:
        if not action.option_strings:
            assert action.metavar in lines
        elif named(lines) & set(action.option_strings):
            assert all(choice in lines for choice in action.choices or ())


def test_the_choices_of_shared_flags():
    """Each value that a flag takes is named."""
    for action in commands()["generate"]._actions:
        for choice in action.choices or ():
            assert re.search(rf"\b{choice}\b", SECTION), f"{action.option_strings} {choice}"


def test_the_table_of_formats():
    """Bytes as the formats have them, errors as the tests bound them."""
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \((\d+)\) \| ([\d.]+)(?: %)? \|$", SECTION, re.MULTILINE)
    (bounds,) = [m.args[1] for m in test_ckv_records.test_attention_error_of_each_format.pytestmark]
    assert {row[0] for row in rows} == {name for name, _, _ in bounds}
    for name, with_rope, without, percent in rows:
        sizes = [ckv_format(name, kv_lora_rank=512, qk_rope_head_dim=rope).bytes_per_token for rope in (64, 0)]
        assert sizes == [int(with_rope), int(without)]
        assert {bound for other, _, bound in bounds if other == name} == {round(float(percent) / 100, 6)}
    keys = re.search(r"`--index-format` is `(\w+)`, `(\w+)` or `(\w+)`: (\d+), (\d+) or (\d+) bytes", SECTION)
    assert keys is not None
    for name, size in zip(keys.groups()[:3], keys.groups()[3:], strict=True):
        assert index_key_format(name, index_head_dim=128).bytes_per_token == int(size)
