"""Run every benchmark that the GPUs of this machine allow, and keep what came of each.

    python scripts/bench_all.py --out bench_results --peers SITE_DIR

Kernels on one GPU, beside other people's where SITE_DIR has them (`bench_kernels.py`); the sharded paths over all GPUs
(`bench_sharding.py`); prefill of the first layers of a model (`bench_prefill.py`); memory as planned
(`bench_memory.py`). Each is a process of its own with a time limit; one that fails costs the others nothing.

DIR gets the JSON of each benchmark and `summary.json`: GPUs, driver, versions, commit, commands, and how each ended.
Pictures are drawn from them if matplotlib is installed, later ones by `plot_results.py --results DIR`. The exit code is
1 when a benchmark failed. `--dry-run` prints the commands.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OPS = ("lightning_indexer", "topk", "index_topk", "sparse_mla")
PARTS = ("kernels", "paths", "prefill", "memory")
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy", "torch")
TAIL = 4000  # characters of a benchmark's output that the summary keeps


@dataclasses.dataclass(frozen=True)
class Part:
    """One benchmark.

    Attributes:
      name: Its name, that of its JSON file too.
      command: Program and arguments.
    """

    name: str
    command: tuple[str, ...]


def plan_parts(args: argparse.Namespace, gpus: int, out: Path) -> list[Part]:
    """Benchmarks that `gpus` GPUs allow, in the order in which they run."""
    size = max(n for n in (1, 2, 4, 8) if n <= max(gpus, 1))  # heads divide by it
    dcp_sizes = [n for n in (1, 2, 4, 8) if n <= size]
    parts = []

    def add(kind: str, name: str, script: str, *flags: object) -> None:
        if kind in args.parts:
            written = ("--json", str(out / f"{name}.json"))
            parts.append(Part(name, (sys.executable, f"scripts/{script}", *map(str, flags), *written)))

    peers = ("--peers", args.peers.resolve()) if args.peers else ()
    for op in OPS:
        add("kernels", op, "bench_kernels.py", "--op", op, *peers)
    for dcp in dcp_sizes if size > 1 else ():
        sizes = ("--tp", size, "--dcp", dcp, "--history", *args.history)
        add("paths", f"paths_tp{size}_dcp{dcp}", "bench_sharding.py", *sizes)
    for dcp in sorted({1, size}):
        sizes = ("--config", args.config, "--layers", args.layers, "--tp", size, "--dcp", dcp)
        add("prefill", f"prefill_tp{size}_dcp{dcp}", "bench_prefill.py", *sizes, "--context", *args.context)
    add("memory", f"memory_{Path(args.config).stem}", "bench_memory.py", "--config", args.config)
    return parts


def run_part(part: Part, limit_s: float) -> dict[str, Any]:
    """Run a benchmark; how it ended, and the end of what it printed.

    Args:
      part: The benchmark.
      limit_s: Seconds after which it is stopped with everything it started.
    """
    print(f"\n== {part.name}\n{shlex.join(part.command)}", flush=True)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)}
    started = time.perf_counter()
    process = subprocess.Popen(
        part.command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        status = "ok" if process.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        status = f"stopped after {limit_s:g} s"
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    seconds = round(time.perf_counter() - started, 1)
    print(f"{output[-TAIL:]}\n{part.name}: {status}, {seconds} s", flush=True)
    return {
        "name": part.name,
        "command": shlex.join(part.command),
        "status": status,
        "returncode": process.returncode,
        "seconds": seconds,
        "output_end": output[-TAIL:],
    }


def _output(*command: str) -> str | None:
    """Output of a command, or None where it is not there or fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def gpu_names() -> list[str]:
    """Names of the GPUs that `nvidia-smi` lists; this process leaves them to the benchmarks."""
    return (_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").splitlines()


def environment(gpus: Sequence[str], commit: str | None) -> dict[str, Any]:
    """What the numbers belong to.

    Args:
      gpus: Names of the GPUs.
      commit: The commit, where the files are a copy without their repository.
    """
    versions = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return {
        "gpus": list(gpus),
        "driver": driver,
        "versions": versions,
        "commit": commit or _output("git", "rev-parse", "HEAD"),
        "changed_files": (_output("git", "status", "--porcelain") or "").splitlines(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def add_environment(file: Path, found: dict[str, Any], part: Part) -> None:
    """Put the environment into a result that has none, or is without the commit."""
    if not file.is_file():
        return
    report = json.loads(file.read_text())
    own = report.get("environment", {})
    if "command" not in own:
        own = found | {"command": shlex.join((Path(part.command[1]).name, *part.command[2:]))}
    report["environment"] = own | {"commit": own.get("commit") or found["commit"]}
    file.write_text(json.dumps(report, indent=1) + "\n")


def draw(out: Path) -> str:
    """Draw what there is; says what became of it."""
    command = (sys.executable, "scripts/plot_results.py", "--results", str(out), "--pictures", str(out / "pictures"))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return "ok" if done.returncode == 0 else (done.stdout + done.stderr).strip()[-TAIL:]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder for the results")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to run")
    parser.add_argument("--gpus", type=int, help="GPUs to use (default: all that nvidia-smi lists, up to 8)")
    parser.add_argument("--peers", type=Path, metavar="SITE_DIR", help="folder with the peers' packages")
    parser.add_argument("--config", default="glm52-fp8", help="model of prefill and memory")
    parser.add_argument("--layers", type=int, default=4, help="its first layers that are prefilled")
    parser.add_argument("--history", type=int, nargs="+", default=[8192, 65536, 131072, 524288])
    parser.add_argument("--context", type=int, nargs="+", default=[8192, 32768, 131072, 524288])
    parser.add_argument("--time-limit", type=float, default=1800, metavar="SECONDS", help="of each benchmark")
    parser.add_argument("--commit", help="the commit, where the files are a copy without their repository")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    return parser.parse_args(arguments)


def main() -> int:
    """Run what the command line asks for; 1 when a benchmark failed."""
    args = parse()
    names = gpu_names()
    out = args.out.resolve()
    if not names and args.gpus is None and set(args.parts) != {"memory"}:
        print("bench_all: error: nvidia-smi lists no GPU; --parts memory needs none", file=sys.stderr)
        return 2
    parts = plan_parts(args, len(names) if args.gpus is None else args.gpus, out)
    if args.dry_run:
        print("\n".join(shlex.join(part.command) for part in parts))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    found = environment(names, args.commit)
    summary: dict[str, Any] = {"environment": found, "parts": []}
    for part in parts:
        summary["parts"].append(run_part(part, args.time_limit))
        add_environment(out / f"{part.name}.json", found, part)
        # After each one: a machine may be taken away before the last.
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    summary["pictures"] = draw(out)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print()
    for part in summary["parts"]:
        print(f"{part['name']:<24}{part['status']:<24}{part['seconds']:>8} s")
    return int(any(part["status"] != "ok" for part in summary["parts"]))


if __name__ == "__main__":
    sys.exit(main())
