"""README and docs as the tests read them: code blocks, sections, tables, links."""

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

LANGUAGES = ("python", "bash", "text", "mermaid", "json")
# Why a block is not run here. Its files and flags are checked all the same.
MARKS = ("needs a GPU", "installs packages", "writes into the repository")
OUTPUT, FILE = "output", "file: "
COMMANDS = ("dsa-jax", "python", "pip", "make", "xprof", "pytest")

_FENCE = re.compile(r"(?:^<!-- ([^\n]*) -->\n+)?^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:^<!-- ([^\n]*) -->\n+)?((?:^    \S[^\n]*\n)(?:^    [^\n]*\n)*)", re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
      page: The page's path from the repository.
      line: Line of its beginning.
      language: What it says it is.
      mark: The comment in front of it, or "".
      code: Its text.
    """

    page: str
    line: int
    language: str
    mark: str
    code: str

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"{self.page}:{self.line}"


def blocks(name: str) -> list[Block]:
    """Blocks of a page; indented ones too, if they hold commands."""
    text = (ROOT / name).read_text()
    found = []
    for match in _FENCE.finditer(text):
        language = match[2].strip()
        if not language and _is_command(match[3]):
            language = "bash"
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(name, line, language or "text", match[1] or "", match[3]))
    # Keep the line numbers of what is left.
    rest = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in _INDENTED.finditer(rest):
        code = "".join(line[4:] + "\n" for line in match[2].splitlines())
        if _is_command(code):
            found.append(Block(name, rest.count("\n", 0, match.start(2)) + 1, "bash", match[1] or "", code))
    return sorted(found, key=lambda block: block.line)


def _is_command(code: str) -> bool:
    words = code.split()
    return bool(words) and words[0] in COMMANDS


def commands(block: Block) -> list[str]:
    """Commands of a bash block, one a line, continued and indented lines joined and comments dropped."""
    lines = re.sub(r"\\?\n\s+(?=\S)", " ", block.code).splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def sections(name: str) -> list[tuple[str, str]]:
    """Heading and text of each section of a page; code and comments are blanked, but for the marks of tables."""
    text = _FENCE.sub("", (ROOT / name).read_text())
    parts = re.split(r"^(#+ .*)$", text, flags=re.MULTILINE)
    return [("", parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]


def prose(text: str) -> str:
    """A section's text without comments."""
    return _COMMENT.sub("", text)


def anchors(name: str) -> set[str]:
    """What a link into a page may name, as GitHub makes it of the headings."""
    headings = [heading.lstrip("# ") for heading, _ in sections(name) if heading]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
