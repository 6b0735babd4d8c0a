"""Running commands of the command line in this process."""

from dsa_jax.cli import main
from tests.support import ORACLE

GLM5 = ORACLE / "glm5" / "single"
FLOAT32 = ["--dtype", "float32", "--tp", "1", "--page-size", "16"]
IDS = ["--prompt-ids", "[[1, 2, 3]]"]


def run(capsys, *args) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    try:
        code = main([str(arg) for arg in args])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def lines_of(err: str) -> list[str]:
    """Lines of stderr that are no progress bar."""
    return [line for line in err.replace("\r", "\n").splitlines() if "B/s]" not in line and line.strip()]


def refused(capsys, *args) -> str:
    """The one line on stderr of a command that must exit with 2."""
    code, out, err = run(capsys, *args)
    assert code == 2 and out == "", (code, out, err)
    (line,) = lines_of(err)
    assert "Traceback" not in line
    return line
