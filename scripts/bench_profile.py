"""Time of each part of a step, from a profile and the compiled program that it ran."""

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path

# `jax.named_scope`s of the model, and what they are called in a report.
SCOPES = {"indexer": "indexer", "sparse_mla": "attention", "mlp": "mlp", "logits": "logits"}
_COLLECTIVE = re.compile(r"all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute")
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
        part = "collectives" if _COLLECTIVE.match(match[2]) else scopes[-1] if scopes else "other"
        parts[match[1]] = part
    return parts


def breakdown(folder: Path, programs: list[str], devices: int) -> dict[str, float]:
    """Seconds of a device in each part, collectives apart, over everything that a profile recorded.

    Args:
      folder: What `jax.profiler.trace` wrote.
      programs: Compiled programs that ran, as text.
      devices: Devices that ran them.
    """
    parts: dict[str, str] = {}
    for program in programs:
        parts |= parts_of(program)
    seconds: dict[str, float] = defaultdict(float)
    for file in folder.rglob("*.trace.json.gz"):
        with gzip.open(file) as stream:
            events = json.load(stream)["traceEvents"]
        for event in events:
            part = parts.get(event.get("args", {}).get("hlo_op"))
            if event.get("ph") == "X" and part is not None:
                seconds[part] += event["dur"] * 1e-6
    return {part: value / devices for part, value in sorted(seconds.items())}
