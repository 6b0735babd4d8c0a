"""What `--profile DIR` does: the command's work once more, compiled by now, under jax's profiler."""

import argparse
import json
import sys
from collections import deque
from pathlib import Path

from dsa_jax.engine import EngineOptions
from dsa_jax.generate import GenerateOptions, make_engine, run
from dsa_jax.model import Model
from dsa_jax.prefill import Batch, prefill
from dsa_jax.profiling import as_text, profile
from dsa_jax.step import StepRunner

PARTS_FILE = "parts.json"


def _report(folder: Path, parts: dict[str, float]) -> None:
    (folder / PARTS_FILE).write_text(json.dumps(parts, indent=1) + "\n")
    print(f"profile in {folder}, seconds by part in {PARTS_FILE}\n{as_text(parts)}", file=sys.stderr)


def profile_generate(folder: Path, model: Model, prompts: list[list[int]], options: GenerateOptions) -> None:
    """Generate once more from the same prompts, into a cache of their own."""
    engine = make_engine(model, prompts, options)
    _report(folder, profile(folder, engine.runner, lambda: deque(run(engine), maxlen=0)))


def profile_prefill(
    folder: Path, runner: StepRunner, prompts: list[list[int]], options: EngineOptions, args: argparse.Namespace
) -> None:
    """Prefill the same prompts once more, into a cache of their own."""
    batch = Batch.from_prompts(prompts, runner.model, geometry=options.geometry(runner.model))
    cache = batch.init_cache(runner.model)
    wanted = {"logits": args.logits, "return_selected": args.out is not None}
    parts = profile(folder, runner, lambda: prefill(runner, batch, cache, chunk_size=args.chunk_size, **wanted))
    _report(folder, parts)
