"""Times the kernels against their ceilings and against other people's kernels in the same run.

    python scripts/bench_kernels.py --op lightning_indexer --peers SITE_DIR --json docs/results/lightning_indexer.json

Every case is checked for its error before it is timed; a case that is wrong has no time. Cases of an operation are in
`bench_ops_<operation>.py`, which exports `cases(options) -> Iterable[Case]`. Peers are Python packages unpacked in
SITE_DIR with `pip install --target`; they need PyTorch.
"""

import argparse
import datetime
import importlib
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from bench_case import Case

OPS = ("lightning_indexer", "topk", "index_topk", "sparse_mla", "scaled_matmul")
GROUPS, CALLS, WARM_UP = 7, 8, 2
REST_SECONDS, RESTED_CALLS = 0.5, 3


def _group(run: Callable[[], Any], wait: Callable[[Any], Any], calls: int = CALLS) -> float:
    """Seconds a call, over a group of calls that are queued one after another."""
    started = time.perf_counter()
    out = None
    for _ in range(calls):
        out = run()
    wait(out)
    return (time.perf_counter() - started) / calls


def _rested(run: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """Seconds a call after a pause, when a card that is held at its power limit has its full clock."""
    time.sleep(REST_SECONDS)
    return _group(run, wait, RESTED_CALLS)


def _rates(case: Case, seconds: list[float]) -> dict[str, Any]:
    median = statistics.median(seconds)
    rates: dict[str, Any] = {
        "ms": round(median * 1e3, 4),
        "ms_min": round(min(seconds) * 1e3, 4),
        "ms_max": round(max(seconds) * 1e3, 4),
    }
    if case.flops:
        rates["tflops"] = round(case.flops / median / 1e12, 1)
    if case.bytes:
        rates["gb_per_s"] = round(case.bytes / median / 1e9, 1)
    return rates


def measure(case: Case) -> dict[str, Any]:
    """Check a case, then time it and its peer in alternating groups."""
    result: dict[str, Any] = {"case": case.name, **case.extra}
    out = jax.block_until_ready(case.run())
    result["error"], result["tolerance"] = float(case.error(out)), case.tolerance
    del out
    if not result["error"] <= case.tolerance:
        result["failed"] = "the error is above the tolerance"
        return result
    peer = case.peer() if case.peer else None
    for _ in range(WARM_UP):
        _group(case.run, jax.block_until_ready)
        if peer:
            _group(peer.run, lambda _: peer.wait())
    ours, theirs = [], []
    for _ in range(GROUPS):
        ours.append(_group(case.run, jax.block_until_ready))
        if peer:
            theirs.append(_group(peer.run, lambda _: peer.wait()))
    result |= _rates(case, ours) | {"ms_rested": round(_rested(case.run, jax.block_until_ready) * 1e3, 4)}
    if peer:
        rested = {"ms_rested": round(_rested(peer.run, lambda _: peer.wait()) * 1e3, 4)}
        result["peer"] = {"name": peer.name, **_rates(case, theirs), **rested}
        result["time_over_peer"] = round(statistics.median(ours) / statistics.median(theirs), 4)
    return result


def _output(*command: str) -> str | None:
    """Output of a command, or None where it is not there or fails."""
    try:
        folder = Path(__file__).resolve().parent
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def environment() -> dict[str, Any]:
    """What the numbers belong to."""
    versions = {"jax": jax.__version__, "python": sys.version.split()[0]}
    if "torch" in sys.modules:
        versions["torch"] = sys.modules["torch"].__version__
    return {
        "device": jax.devices()[0].device_kind,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "versions": versions,
        "commit": _output("git", "rev-parse", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "method": f"median of {GROUPS} groups of {CALLS} queued calls on the host's clock, outputs allocated anew, "
        f"groups of a case and of its peer alternate; rested: {RESTED_CALLS} calls after {REST_SECONDS} s of idling",
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=OPS, action="append", required=True)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--keys", type=int, default=131072)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--peers", type=Path, metavar="SITE_DIR", help="folder with the peers' packages")
    parser.add_argument("--variants", action="store_true", help="also schedules that are not the default")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no case after this time")
    parser.add_argument("--only", action="append", metavar="TEXT", help="only cases whose name contains this")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the chosen operations; 1 when a case failed."""
    options = parse()
    if options.peers:
        sys.path.append(str(options.peers))
    results, started = [], time.perf_counter()
    for op in options.op:
        for case in importlib.import_module(f"bench_ops_{op}").cases(options):
            if options.budget and time.perf_counter() - started > options.budget:
                print(json.dumps({"op": op, "stopped_before": case.name}), flush=True)
                break
            if options.only and not any(text in case.name for text in options.only):
                continue
            try:
                result = {"op": op, **measure(case)}
            except Exception as failure:  # one case must not cost the others their numbers
                result = {"op": op, "case": case.name, "failed": repr(failure)[:500]}
            results.append(result)
            print(json.dumps(result), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")
    return int(any("failed" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
