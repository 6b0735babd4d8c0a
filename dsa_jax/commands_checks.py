"""What the commands check before they load a weight: devices, prompts, switches, files to write."""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import jax

from dsa_jax.batch import check_prompts
from dsa_jax.config import ModelConfig
from dsa_jax.tokenizer import Tokenizer
from sharding.policy import PrefillPolicy

_log = logging.getLogger(__name__)

# Flag -> the switch without which it does nothing.
NEEDS = {
    "prefetch": "ckv_gather",
    "ckv_gather_min_tokens": "ckv_gather",
    "ckv_gather_max_tokens": "ckv_gather",
    "query_split_min_rows": "query_split",
    "query_split_min_context": "query_split",
}


class BackendError(RuntimeError):
    """jax has no device to run on."""


class _Kept(logging.Handler):
    """Keeps the messages of a logger, each as one line."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what `record` says, and the error that it tells of without its traceback."""
        error = record.exc_info[1] if record.exc_info else None
        self.lines.append(" ".join(f"{record.getMessage()} {error or ''}".split()))


def available_devices() -> list[Any]:
    """The devices that jax finds; the first call starts its backends.

    Raises:
      BackendError: There are none, as with `JAX_PLATFORMS=cuda` and no GPU.
    """
    # Plugins that fail log their traceback here, and then the error that follows may say nothing.
    logger, kept = logging.getLogger("jax._src.xla_bridge"), _Kept()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(kept)
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        reasons = [" ".join(str(error).split()), *kept.lines, f"JAX_PLATFORMS is {jax.config.jax_platforms!r}"]
        raise BackendError(f"jax finds no device: {'; '.join(filter(None, reasons))}") from error
    finally:
        logger.removeHandler(kept)
        logger.propagate = propagate
    for line in kept.lines:
        _log.warning("%s", line)
    return devices


def read_prompts(args: argparse.Namespace, config: ModelConfig) -> tuple[list[list[int]], Tokenizer | None]:
    """The prompts' ids, and the tokenizer when they were text.

    Raises:
      ValueError: They cannot be read, or are out of the model's range.
    """
    prompts, tokenizer = _prompts(args)
    check_prompts(prompts, config.vocab_size, config.max_position_embeddings)
    return prompts, tokenizer


def _prompts(args: argparse.Namespace) -> tuple[list[list[int]], Tokenizer | None]:
    if args.prompt is not None:
        tokenizer = Tokenizer.from_folder(args.checkpoint)
        return [tokenizer.encode(args.prompt)], tokenizer
    prompts = _parse_ids(args.prompt_ids)
    if not isinstance(prompts, list) or not all(isinstance(prompt, list) for prompt in prompts):
        raise ValueError("--prompt-ids must be a list of prompts, each a list of token ids, such as [[1, 2, 3]]")
    return prompts, None


def _parse_ids(text: str) -> Any:
    where = "--prompt-ids"
    if text.startswith("@"):
        where = f"--prompt-ids: {text[1:]}"
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{where} cannot be read: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is not UTF-8: {error}") from None
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply: maximum recursion depth exceeded") from None
    except ValueError as error:  # json's own, and Python's for a number of thousands of digits
        raise ValueError(f"{where} is not JSON: {error}") from None


def check_switches(args: argparse.Namespace, policy: PrefillPolicy) -> None:
    """Raise ValueError where a flag does nothing because another one switches off what it is about."""
    for name, switch in NEEDS.items():
        value = getattr(args, name)
        given = value is not None and value is not False
        if given and getattr(policy, switch) is False:
            off = "--policy stock" if getattr(args, switch) is None else f"--no-{_flag(switch)}"
            raise ValueError(f"--{_flag(name)} does nothing with {off}: it needs --{_flag(switch)}")


def _flag(name: str) -> str:
    return name.replace("_", "-")


def note_sampling(args: argparse.Namespace) -> None:
    """Say on stderr which flags greedy decoding does not look at."""
    flags = {"--top-p": args.top_p != 1, "--top-k": args.top_k != 0, "--seed": args.seed != 0}
    idle = [flag for flag, given in flags.items() if given]
    if args.temperature == 0 and idle:
        _log.warning("%s: without effect at --temperature 0, which is greedy", ", ".join(idle))


def check_npz(path: Path) -> None:
    """Raise ValueError unless a .npz file can be written at `path`; what is there stays."""
    if path.suffix != ".npz":
        raise ValueError(f"--out must name a .npz file, got {path}")
    if path.is_dir():
        raise ValueError(f"--out: {path} is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"--out: there is no folder {path.parent}")
    there = path.exists()
    try:
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise ValueError(f"--out: {path} cannot be written: {error.strerror or error}") from None
