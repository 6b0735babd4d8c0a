"""Code blocks of README and docs run; those that cannot are marked, and name files, flags and targets that exist."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import tomllib

import pytest

from dsa_jax.cli import build_parser, main
from tests.docs.pages import COMMANDS, FILE, LANGUAGES, MARKS, NAMES, OUTPUT, ROOT, Block, blocks, commands
from tests.docs.test_examples import load_example

PYTHON = [name for name in NAMES if any(block.language == "python" for block in blocks(name))]
BASH = [name for name in NAMES if any(block.language == "bash" for block in blocks(name))]
RUN_HERE = ("scripts/examples/research_model.py",)
MAKEFILE = (ROOT / "Makefile").read_text()


def is_synopsis(command: str) -> bool:
    """Whether it shows which flags there are instead of a call."""
    text = re.sub(r"'[^']*'|\b[A-Z_]+=\S*|\s#.*", "", command)
    return re.search(r"[\[(]-|\||\b[A-Z_]{3,}\b", text) is not None


def flags_of(command: str) -> set[str]:
    """Long flags that a command names."""
    found = set()
    for negatable, flag in re.findall(r"(?<![\w-])--(\[no-\])?([a-z][\w-]*)", re.sub(r"'[^']*'", "", command)):
        found |= {f"--{flag}", f"--no-{flag}"} if negatable else {f"--{flag}"}
    return found


def subcommand_flags(name: str) -> set[str]:
    """Flags of a subcommand of dsa-jax."""
    (subparsers,) = (action for action in build_parser()._actions if hasattr(action, "choices") and action.choices)
    assert name in subparsers.choices, f"there is no command {name!r}"  # type: ignore[operator]
    return set(subparsers.choices[name]._option_string_actions)  # type: ignore[index]


def words_of(command: str) -> list[str]:
    """Words of a command, without variables of the environment in front."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    return words


def check_command(command: str, block: Block) -> None:
    """What a command names exists."""
    words = command.split() if is_synopsis(command) else words_of(command)
    if words[0] == "dsa-jax":
        unknown = flags_of(command) - subcommand_flags(words[1])
        assert not unknown, f"{block.place}: dsa-jax {words[1]} has no {sorted(unknown)}"
    elif words[0] == "python" and words[1] == "-m":
        assert words[2] == "pytest" and all((ROOT / word).exists() for word in words[3:] if "/" in word), command
    elif words[0] == "python":
        text = (ROOT / words[1]).read_text()
        unknown = {flag for flag in flags_of(command) if f'"{flag}"' not in text}
        assert not unknown, f"{block.place}: {words[1]} has no {sorted(unknown)}"
    elif words[0] == "make":
        assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in words[1:]), command
    elif words[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = [extra for group in re.findall(r"\.\[([\w,-]+)\]", command) for extra in group.split(",")]
        assert set(named) <= set(extras), f"{block.place}: no extra {sorted(set(named) - set(extras))}"
    else:
        assert words[0] in COMMANDS, f"{block.place}: nothing checks {words[0]!r}"


def recipe(target: str) -> list[str]:
    """Commands `dsa-jax` of a target of the Makefile."""
    match = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert match is not None
    text = re.sub(r"\\\n\s*", "", match[1]).replace("$(BIN)/", "").replace("$(DEMO)", "demo_checkpoint")
    return [line.strip() for line in text.splitlines() if "dsa-jax " in line]


def run_command(command: str) -> str:
    """Run `dsa-jax` or a script in this process, on its virtual devices; what it printed."""
    words, out = words_of(command), io.StringIO()
    with contextlib.redirect_stdout(out):
        if words[0] == "dsa-jax":
            assert main(words[1:]) == 0, command
        else:
            load_example(words[1].removeprefix("scripts/examples/").removesuffix(".py")).main()
    return out.getvalue()


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder in which `make demo` has made its checkpoint, and what its last command printed."""
    folder = tmp_path_factory.mktemp("demo")
    tiny, generate = recipe("demo")
    with contextlib.chdir(folder):
        assert run_command(tiny) == "demo_checkpoint\n"
        return folder, run_command(generate)


@pytest.fixture
def beside_demo(demo, tmp_path, monkeypatch):
    """A working directory of its own with the demo checkpoint."""
    shutil.copytree(demo[0] / "demo_checkpoint", tmp_path / "demo_checkpoint")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_say_what_they_are(name):
    """A language that is known, and a mark that is."""
    for block in blocks(name):
        assert block.language in LANGUAGES, f"{block.place}: {block.language!r} is none of {LANGUAGES}"
        known = (*MARKS, OUTPUT, "") if block.language == "text" else (*MARKS, "")
        # A comment about something else may stand in front.
        words = ("needs", "installs", "writes", "output")
        if block.mark.startswith(words):
            assert block.mark in known, f"{block.place}: {block.mark!r} is none of {known}"


def test_demo_generates(demo):
    """Two lines of tokens and one of times."""
    *tokens, times = demo[1].splitlines()
    assert [len(json.loads(line)) for line in tokens] == [32, 32] and "tokens/s" in times


@pytest.mark.parametrize("name", PYTHON)
def test_python_blocks(name, beside_demo):
    """The blocks of a page run one after another, and print what the page says they print."""
    every, namespace = blocks(name), {"__name__": "docs"}
    for block, following in zip(every, [*every[1:], None], strict=True):
        if block.language != "python" or block.mark in MARKS:
            continue
        if block.mark.startswith(FILE):
            assert block.code == (ROOT / block.mark.removeprefix(FILE)).read_text(), f"{block.place}: not the file"
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * block.line + block.code, str(ROOT / name), "exec"), namespace)
        if following is not None and following.mark == OUTPUT:
            assert printed.getvalue() == following.code, following.place


@pytest.mark.parametrize("name", BASH)
def test_bash_blocks(name, beside_demo):
    """Commands are checked; those of dsa-jax and of small scripts run, unless their block is marked."""
    ran = []
    for block in blocks(name):
        if block.language != "bash":
            continue
        for command in commands(block):
            check_command(command, block)
            words = command.split() if is_synopsis(command) else words_of(command)
            if block.mark in MARKS or is_synopsis(command):
                continue
            if words[0] == "make":
                # CI runs the target, or this module does.
                ci = (ROOT / ".ci" / "run").read_text()
                assert words[1] == "demo" or f"make {words[1]}\n" in ci, f"{block.place}: nothing runs {command!r}"
                continue
            assert words[0] == "dsa-jax" or words[1] in RUN_HERE, f"{block.place}: mark it, one of {MARKS}: {command}"
            if command not in ran:
                assert run_command(command).strip(), f"{block.place}: {command!r} printed nothing"
                ran.append(command)
    assert not os.path.exists(ROOT / "profile"), "a block wrote into the repository"
