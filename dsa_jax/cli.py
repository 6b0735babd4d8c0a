"""The command line `dsa-jax`: results on stdout, progress on stderr, exit code 2 and one line for a user's mistake."""

import argparse
import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from dsa_jax import commands, commands_plan
from dsa_jax.api import WEIGHTS
from dsa_jax.commands_checks import BackendError
from dsa_jax.generate import NonFiniteError
from dsa_jax.gpu_target import TARGETS
from dsa_jax.page_allocator import OutOfPagesError
from dsa_jax.prefill import NonFiniteWarning
from dsa_jax.tiny import FAMILIES
from pallas_kernels.scaled_matmul.api import IMPLEMENTATIONS

_LONGEST_MESSAGE = 1000
DTYPES = ("bfloat16", "float32")
KV_FORMATS = ("auto", "float32", "bf16", "fp8_ds_mla", "nvfp4_ds_mla")
INDEX_FORMATS = ("auto", "float32", "bf16", "fp8")
SWITCHES = {
    "query_split": "split the indexer's rows over the ranks that hold the same keys",
    "ckv_gather": "gather the history of a DCP group instead of its queries",
    "prefetch": "gather the next layer's history ahead",
    "token_split": "attend all heads of a share of the rows",
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str):
        """Print `message` and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value


_positive.__name__ = "int"  # argparse names the type in its errors


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


_natural.__name__ = "int"


def _add_model_flags(
    parser: argparse.ArgumentParser, checkpoint: str = "Hugging Face folder or native checkpoint"
) -> None:
    """Flags of every command that runs or plans the model."""
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help=checkpoint)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of weights and activations")
    parser.add_argument(
        "--tp", type=_positive, help="tensor-parallel size (default: most devices that divide the heads)"
    )
    parser.add_argument(
        "--dcp", type=_positive, default=1, help="ranks that share the cache of a request; divides --tp"
    )
    parser.add_argument("--data", type=_positive, default=1, help="groups that serve requests of their own")
    parser.add_argument("--chunk-size", type=_positive, default=2048, help="most rows of a prefill step")
    _add_weights_flag(parser, "auto")
    parser.add_argument(
        "--fp8-matmul",
        choices=IMPLEMENTATIONS,
        help="multiply FP8 weights without dequantising them, activations in e4m3 too (default: dequantise)",
    )
    parser.add_argument(
        "--latent-norm-eps",
        type=float,
        help="eps of the two latent norms (default: 1e-6; GLM-5.3-Flash: its rms_norm_eps)",
    )
    cache = parser.add_argument_group("cache")
    cache.add_argument("--page-size", type=_positive, default=64, help="tokens of a page on each rank")
    cache.add_argument("--kv-format", choices=KV_FORMATS, default="auto", help="format of the cached KV")
    cache.add_argument("--index-format", choices=INDEX_FORMATS, default="auto", help="format of the index keys")
    cache.add_argument("--interleave", type=_positive, default=1, help="tokens of a run that one DCP rank holds")
    cache.add_argument("--index-replicas", type=_positive, default=1, help="how often a DCP group holds the index keys")
    path = parser.add_argument_group("sharded path")
    path.add_argument("--policy", choices=("auto", "stock"), default="auto", help="choose by cost, or switch all off")
    for switch, meaning in SWITCHES.items():
        flag = "--" + switch.replace("_", "-")
        path.add_argument(flag, dest=switch, action=argparse.BooleanOptionalAction, default=None, help=meaning)
    path.add_argument("--expert-exchange", action="store_true", help="send rows to the ranks of their experts")
    path.add_argument("--ckv-gather-min-tokens", type=_natural, help="gather when a step has more new tokens")
    path.add_argument("--ckv-gather-max-tokens", type=_natural, help="gather when a step has no more tokens in all")
    path.add_argument("--query-split-min-rows", type=_natural, help="split when a rank gets as many rows")
    path.add_argument("--query-split-min-context", type=_natural, help="split when a step has as many tokens in all")


def _add_weights_flag(parser: argparse.ArgumentParser, default: str) -> None:
    meaning = (
        "keep block FP8 weights as they are, or dequantise them; auto keeps them unless --dtype is float32."
        " NVFP4 weights are dequantised, or with fp8 rounded to block FP8"
    )
    parser.add_argument("--weights", choices=WEIGHTS, default=default, help=meaning)


def _add_profile_flag(parser: argparse.ArgumentParser) -> None:
    meaning = "run once more under jax's profiler; the trace goes to this folder, the time by part to stderr"
    parser.add_argument("--profile", type=Path, metavar="DIR", help=meaning)


def _add_prompt_flags(parser: argparse.ArgumentParser, *, text: bool) -> None:
    prompt = parser.add_mutually_exclusive_group(required=True)
    if text:
        prompt.add_argument("--prompt", help="text; needs tokenizer.json in the folder")
    prompt.add_argument("--prompt-ids", help="JSON list of prompts, each a list of token ids, or @FILE that holds it")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(prog="dsa-jax", description="DeepSeek Sparse Attention prefill in JAX")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    generate = subparsers.add_parser("generate", help="generate from prompts")
    _add_model_flags(generate)
    _add_prompt_flags(generate, text=True)
    generate.add_argument("--max-new-tokens", type=_positive, default=128, help="most new tokens a prompt")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    generate.add_argument("--top-p", type=float, default=1.0, help="nucleus mass; 1 keeps all")
    generate.add_argument("--top-k", type=int, default=0, help="best tokens kept; 0 keeps all")
    generate.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    generate.add_argument("--ignore-eos", action="store_true", help="go on past end-of-sequence tokens")
    generate.add_argument("--max-pages", type=_positive, help="cache pages a data group; prompts wait for free ones")
    generate.add_argument("--json", action="store_true", help="print one JSON object")
    _add_profile_flag(generate)
    generate.set_defaults(run=commands.run_generate)

    prefill = subparsers.add_parser("prefill", help="prefill prompts, keep logits and selections")
    _add_model_flags(prefill)
    _add_prompt_flags(prefill, text=True)
    prefill.add_argument("--logits", choices=("all", "last", "none"), default="last", help="rows to keep")
    prefill.add_argument("--out", type=Path, help="write logits and selections to this .npz file")
    prefill.add_argument("--json", action="store_true", help="print one JSON object")
    _add_profile_flag(prefill)
    prefill.set_defaults(run=commands.run_prefill)

    tiny = subparsers.add_parser("tiny", help="write a tiny random checkpoint")
    tiny.add_argument("directory", metavar="DIR", type=Path, help="folder to write")
    tiny.add_argument("--family", choices=FAMILIES, required=True, help="which model to imitate")
    tiny.add_argument("--seed", type=int, default=0, help="seed of the weights")
    tiny.set_defaults(run=commands.run_tiny)

    convert = subparsers.add_parser("convert", help="convert to a native Orbax checkpoint")
    convert.add_argument("source", metavar="HF_DIR", type=Path, help="Hugging Face folder")
    convert.add_argument("target", metavar="OUT_DIR", type=Path, help="folder to write")
    convert.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the weights")
    _add_weights_flag(convert, "dequantized")
    convert.set_defaults(run=commands.run_convert)

    plan = subparsers.add_parser("plan", help="bytes of a device, the path, and predicted times; needs no GPU")
    _add_model_flags(plan, "config.json, or the folder that holds it")
    plan.add_argument("--context", type=_positive, help="tokens of the prompt (default: the model's maximum)")
    plan.add_argument("--device", choices=tuple(TARGETS), default="h200", help="GPU to plan for")
    plan.add_argument("--compile", action="store_true", help="compile the step for that GPU, which need not be here")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.set_defaults(run=commands_plan.run_plan)

    inspect = subparsers.add_parser("inspect", help="describe a checkpoint and look for weights that are not finite")
    inspect.add_argument("checkpoint", metavar="CKPT", type=Path, help="Hugging Face folder or native checkpoint")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(run=commands.run_inspect)
    return parser


@contextlib.contextmanager
def _messages_on_stderr() -> Iterator[None]:
    """Show what the package has to say while a command runs, such as which weights it skipped."""
    logger, handler = logging.getLogger("dsa_jax"), logging.StreamHandler(sys.stderr)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # A library may give the root logger a handler, which would say all of it again.
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@contextlib.contextmanager
def _one_line_warnings(command: str) -> Iterator[None]:
    """Show each warning as one line, without the place in the code that says nothing to a user."""

    def show(message, category, filename, lineno, file=None, line=None):
        print(f"dsa-jax {command}: warning: {_one_line(message)}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=NonFiniteWarning)
        warnings.showwarning = show
        yield


def _one_line(message: object) -> str:
    """What a message says, on one line of bounded length."""
    text = " ".join(str(message).split())
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."


def _mute_libraries() -> None:
    """Leave stderr of this process to the one line that says what is wrong.

    Reading a damaged checkpoint, Orbax drops tasks of its event loop, whose errors come up again wherever they are
    collected: in loggers, warnings and threads.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    default = sys.excepthook

    def show(kind, error, traceback):
        if not (kind is RuntimeError and str(error) == "Event loop is closed"):
            default(kind, error, traceback)

    sys.excepthook = show


# What a command may fail with through no fault of this program, and without --debug is one line.
_MISTAKES = (
    ValueError,
    OSError,
    BackendError,
    NonFiniteError,
    OutOfPagesError,
    OverflowError,
    RecursionError,
    MemoryError,
)


def _out_of_memory(error: Exception) -> str | None:
    """One line for an error of the device's allocator, None for any other of the runtime: those are bugs."""
    if not str(error).startswith("RESOURCE_EXHAUSTED"):
        return None
    return f"{error} (fewer --max-pages, a smaller --chunk-size or more devices take less)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Without arguments it takes those of the process, and its stderr."""
    args = build_parser().parse_args(argv)
    if argv is None and not args.debug:
        _mute_libraries()
    try:
        with _messages_on_stderr(), _one_line_warnings(args.command):
            args.run(args)
    except BrokenPipeError:
        return 1
    except (*_MISTAKES, jax.errors.JaxRuntimeError) as error:
        message = _out_of_memory(error) if isinstance(error, jax.errors.JaxRuntimeError) else str(error)
        if args.debug or message is None:
            raise
        print(f"dsa-jax {args.command}: error: {_one_line(message)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
