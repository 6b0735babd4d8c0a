"""Pictures and tables of stored results.

    python scripts/plot_results.py --results docs/results --pictures docs/pictures
    python scripts/plot_results.py --tables

The pictures need matplotlib (`pip install -e '.[plots]'`). One is drawn for what has results, as SVG with the names and
digests of the files that it shows. `--tables` writes the tables of README and docs (`result_tables.py`).
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from result_data import Report, kernel_rows, load, of_kind, rounded
from result_tables import filled, pages

ROOT = Path(__file__).resolve().parents[1]
OURS, PEER, LIMIT = "#1f6feb", "#b0b8c1", "#cf222e"
STYLE = {
    "svg.hashsalt": "dsa_jax",  # the same file for the same results
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
TOKENS = "tokens of context"


def _axes(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    return pyplot.subplots(figsize=(width, height), layout="constrained")


def _context_axis(ax: Any, contexts: list[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(contexts, [f"{n // 1024}K" if n < 1 << 20 else f"{n >> 20}M" for n in contexts])
    ax.set_xlabel(TOKENS)


def draw_kernels(reports: list[Report]) -> Any:
    """Time of each kernel over that of the peer in the same run."""
    # Without the kernel's options that were tried and are not the default.
    rows = [row for row in kernel_rows(reports) if "peer" in row and "scores_first" not in row["case"]]
    if not rows:
        return None
    fig, ax = _axes(9, 0.42 * len(rows) + 0.9)
    places = range(len(rows))
    ax.barh(places, [1.0] * len(rows), color=PEER, height=0.75, label="peer")
    ax.barh(places, [row["ms"] / row["peer"]["ms"] for row in rows], color=OURS, height=0.45, label="ours")
    for place, row in zip(places, rows, strict=True):
        peer = row["peer"]
        name = peer["name"].split()[0].partition("(")[0]
        name += "'s scores alone" if "without any selection" in peer["name"] else ""
        text = f"{rounded(row['ms'])} ms, {name} {rounded(peer['ms'])} ms"
        ax.text(1.18, place, text, va="center")
    ax.set_yticks(places, [f"{row['op']}: {_short(row['case'])}" for row in rows])
    ax.invert_yaxis()
    ax.set_xlim(0, 2.1)
    ax.grid(axis="y", visible=False)
    ax.set_xticks([0, 0.5, 1.0])
    ax.set_xlabel("time over the peer's; shorter is faster")
    fig.legend(loc="outside upper right", ncols=2, frameon=False)
    return fig


def _short(case: str) -> str:
    shorter = case.replace("float8_e4m3fn", "fp8").replace("bfloat16", "bf16")
    return (
        shorter.replace(" keys=131072", "").replace(" k=2048", "").replace("tile_128k ", "").replace(" rectangle", "")
    )


def draw_memory(report: Report) -> Any:
    """Memory of a device against context, a line for each DCP size."""
    rows, setup = report.data["memory"], report.data["setup"]
    fig, ax = _axes(6.4, 3.6)
    contexts = sorted({row["context"] for row in rows})
    for dcp in sorted({row["dcp"] for row in rows}):
        mine = sorted((row["context"], row["total_bytes"] / 1e9) for row in rows if row["dcp"] == dcp)
        ax.plot(*zip(*mine, strict=True), marker="o", markersize=3, label=f"DCP {dcp}")
    limit = setup["device_bytes"] / 1e9
    ax.axhline(limit, color=LIMIT, linestyle="--", linewidth=1)
    ax.annotate(
        f"one {report.data['environment']['device'].split()[-1]}", (contexts[0], limit), va="bottom", color=LIMIT
    )
    _context_axis(ax, contexts)
    ax.set_ylabel("GB of a device, planned")
    ax.set_ylim(bottom=0)
    ax.set_title(f"{setup['config']}, TP {setup['tp']}, {setup['kv_format']} records, chunks of {setup['chunk_size']}")
    ax.legend(frameon=False, ncols=2)
    return fig


def _path_rows(report: Report, scope: str) -> list[dict[str, Any]]:
    return [row for row in report.data["results"] if row.get("scope") == scope and "ms" in row]


def draw_paths(report: Report, scope: str) -> Any:
    """Time of each path against context, with what the cost model allows as a thin dashed line."""
    rows, setup = _path_rows(report, scope), report.data["setup"]
    if not rows:
        return None
    fig, ax = _axes(7.5, 4.4)
    for path in dict.fromkeys(row["path"] for row in rows):
        mine = sorted((row["history"], row["ms"], row.get("model_ms")) for row in rows if row["path"] == path)
        (line,) = ax.plot([m[0] for m in mine], [m[1] for m in mine], marker="o", markersize=3, label=path)
        if all(m[2] for m in mine):
            ax.plot([m[0] for m in mine], [m[2] for m in mine], "--", linewidth=0.8, color=line.get_color())
    _context_axis(ax, sorted({row["history"] for row in rows}))
    ax.set_yscale("log")
    ax.set_ylabel(f"ms of {scope}; dashed: the cost model")
    ax.set_title(f"TP {setup['tp']}, DCP {setup['dcp']}, {setup['chunk_size']} rows, {setup['layers']} layers")
    ax.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return fig


def draw_speedup(report: Report, scope: str) -> Any:
    """How much faster than the stock path each path is, at each context."""
    rows = [row for row in _path_rows(report, scope) if "stock_over_this" in row and row["path"] != "stock"]
    if not rows:
        return None
    paths, contexts = list(dict.fromkeys(row["path"] for row in rows)), sorted({row["history"] for row in rows})
    value = {(row["path"], row["history"]): row["stock_over_this"] for row in rows}
    fig, ax = _axes(7.5, 0.35 * len(paths) + 1.2)
    for i, context in enumerate(contexts):
        height = 0.8 / len(contexts)
        places = [j + i * height for j in range(len(paths))]
        ax.barh(places, [value.get((p, context), 0) for p in paths], height, label=f"{context:,} tokens")
    ax.axvline(1.0, color=LIMIT, linestyle="--", linewidth=1)
    ax.set_yticks([j + 0.4 - 0.4 / len(contexts) for j in range(len(paths))], paths)
    ax.invert_yaxis()
    ax.set_xlabel("time of the stock path over this path's")
    ax.legend(frameon=False, fontsize=7)
    return fig


def draw_prefill(report: Report) -> Any:
    """Time to the first token against context, with the prediction."""
    cases, data = [case for case in report.data["cases"] if "ttft_s" in case], report.data
    if not cases:
        return None
    fig, ax = _axes(6.4, 3.6)
    for requests in sorted({case["requests"] for case in cases}):
        mine = sorted((c["context"], c["ttft_s"]["median"], c) for c in cases if c["requests"] == requests)
        label = f"{requests} request{'s' if requests > 1 else ''}"
        (line,) = ax.plot([m[0] for m in mine], [m[1] for m in mine], marker="o", markersize=3, label=label)
        predicted = [requests * m[2]["predicted_ttft_s"] for m in mine]
        ax.plot([m[0] for m in mine], predicted, "--", linewidth=0.8, color=line.get_color())
    _context_axis(ax, sorted({case["context"] for case in cases}))
    ax.set_yscale("log")
    ax.set_ylabel("s to the first token; dashed: predicted")
    ax.set_title(f"{data['config']}, {data['layers']} layers, TP {data['tp']}, DCP {data['dcp']}, {data['device']}")
    ax.legend(frameon=False)
    return fig


def pictures(reports: list[Report]) -> dict[str, tuple[list[Report], Callable[[], Any]]]:
    """Every picture that has results, by name: the reports behind it, and what draws it."""
    found: dict[str, tuple[list[Report], Callable[[], Any]]] = {}
    kernels = [r for r in of_kind(reports, "kernels") if any("peer" in row for row in r.data["results"])]
    if kernels:
        found["kernels"] = (kernels, lambda: draw_kernels(kernels))
    for report in of_kind(reports, "memory"):
        found[report.file.stem] = ([report], lambda report=report: draw_memory(report))
    for report in of_kind(reports, "prefill"):
        found[report.file.stem] = ([report], lambda report=report: draw_prefill(report))
    for report, scope in itertools.product(of_kind(reports, "paths"), ("attention", "step")):
        name = f"{report.file.stem}_{scope}"
        found[name] = ([report], lambda report=report, scope=scope: draw_paths(report, scope))
        found[f"{name}_speedup"] = ([report], lambda report=report, scope=scope: draw_speedup(report, scope))
    return found


def save(folder: Path, found: dict[str, tuple[list[Report], Callable[[], Any]]]) -> list[Path]:
    """Draw pictures; the files written. Those that turn out empty are left out."""
    import matplotlib  # pyright: ignore[reportMissingImports]
    import matplotlib.pyplot  # pyright: ignore[reportMissingImports]

    written = []
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        matplotlib.use("svg")
        for name, (reports, draw) in found.items():
            figure = draw()
            if figure is None:
                continue
            file = folder / f"{name}.svg"
            source = "; ".join(report.digest for report in reports)
            figure.savefig(file, metadata={"Date": None, "Creator": "scripts/plot_results.py", "Source": source})
            # Matplotlib ends lines with spaces.
            file.write_text("".join(f"{line.rstrip()}\n" for line in file.read_text().splitlines()))
            matplotlib.pyplot.close(figure)
            written.append(file)
    return written


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results", metavar="DIR")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw into this folder")
    parser.add_argument("--tables", action="store_true", help="write the tables of README and docs")
    args = parser.parse_args(arguments)
    if not args.tables and args.pictures is None:
        parser.error("nothing to do: give --pictures DIR, --tables or both")
    return args


def main() -> int:
    """Do what the command line asks for."""
    args = parse()
    reports = load(args.results)
    if args.pictures is not None:
        for file in save(args.pictures, pictures(reports)):
            print(file)
    if args.tables:
        for page in pages(ROOT):
            text = page.read_text()
            new = filled(text, reports)
            if new != text:
                page.write_text(new)
                print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
