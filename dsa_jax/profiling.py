"""Where the time of steps goes: a trace of jax's profiler, and its time by part of the model.

Parts are the `jax.named_scope`s of the model. The trace names compiled instructions and the compiled program says which
scope each belongs to. Collectives are a part of their own, wherever they stand.
"""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from dsa_jax.step import StepRunner

# `jax.named_scope`s of the model, and what they are called in a report. The innermost counts.
SCOPES = {
    "embedding": "embedding",
    "layout": "layout",  # where keys are and what each row sees; once a step
    "residual": "residual",  # norms in front of attention, sums into the residual stream
    "projections": "projections",  # around the sparse attention
    "history": "history",  # cached records and index keys, read into the buffers that are scored and attended to
    "indexer": "indexer",
    "sparse_mla": "attention",
    "linear_attention": "linear attention",
    "mlp": "mlp",
    "logits": "logits",
    "cache_write": "cache write",
}
COLLECTIVES, OTHER = "collectives", "other"
_COLLECTIVE = re.compile(r"all-gather|all-reduce|reduce-scatter|ragged-all-to-all|all-to-all|collective-permute")
_CONTAINERS = ("while", "conditional", "call")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(\S+) = (?:\([^=]*?\)|\S+) ([\w-]+)\(")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


def parts_of(program: str) -> dict[str, str]:
    """Part of the model that each instruction of a compiled program belongs to; none for those that hold others."""
    parts = {}
    for line in program.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None or match[2] in _CONTAINERS:
            continue
        name = _OP_NAME.search(line)
        scopes = [SCOPES[scope] for scope in name[1].split("/") if scope in SCOPES] if name else []
        parts[match[1]] = COLLECTIVES if _COLLECTIVE.match(match[2]) else scopes[-1] if scopes else OTHER
    return parts


def breakdown(traces: Iterable[Path], programs: Iterable[str], devices: int) -> dict[str, float]:
    """Seconds of a device in each part over everything that was recorded, the longest first.

    Args:
      traces: Files `*.trace.json.gz` that jax's profiler wrote.
      programs: Compiled programs that ran, as text.
      devices: Devices that ran them.
    """
    parts: dict[str, str] = {}
    for program in programs:
        parts |= parts_of(program)
    seconds: dict[str, float] = defaultdict(float)
    for file in traces:
        with gzip.open(file) as stream:
            events = json.load(stream)["traceEvents"]
        for event in events:
            part = parts.get(event.get("args", {}).get("hlo_op"))
            if event.get("ph") == "X" and part is not None:
                seconds[part] += event["dur"] * 1e-6
    return {part: value / devices for part, value in sorted(seconds.items(), key=lambda item: -item[1])}


def profile(folder: Path, runner: StepRunner, run: Callable[[], Any]) -> dict[str, float]:
    """Call `run` under jax's profiler.

    Args:
      folder: Where the trace goes; xprof and TensorBoard open it (`xprof --logdir FOLDER`). What it holds stays.
      runner: Runs the steps of `run`. With programs that have run before, the trace holds no compilation.
      run: What to profile.

    Returns:
      Seconds of a device in each part of the model, the longest first; time outside of the steps is in none.
    """
    before = set(folder.rglob("*.trace.json.gz"))
    with jax.profiler.trace(folder):
        run()
    traces = set(folder.rglob("*.trace.json.gz")) - before
    programs = [program.as_text() or "" for program in runner.programs]
    return breakdown(traces, programs, len(runner.model.mesh.local_devices))


def as_text(parts: dict[str, float]) -> str:
    """The breakdown for a reader."""
    total = sum(parts.values())
    lines = [f"{part:<18}{value * 1e3:12.3f} ms {value / total:7.1%}" for part, value in parts.items()]
    return "\n".join([f"{'a device, in all':<18}{total * 1e3:12.3f} ms", *lines])
