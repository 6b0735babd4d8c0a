"""Tables of README and docs that are made of stored results.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; `plot_results.py --tables` writes what is
between them.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from result_data import Report, find_kernel, kernel_rows, of_kind, rounded

_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def _markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ms(row: dict[str, Any]) -> str:
    return f"{rounded(row['ms'])} ms"


def kernels(reports: list[Report]) -> str:
    """Kernels beside their peers."""
    rows = kernel_rows(reports)
    fp8, bf16, shape = "float8_e4m3fn heads=", "bfloat16 heads=", "rows=4096 keys=131072"

    def line(work: str, op: str, case: str, peer: str, by: str | None = None) -> list[str]:
        row = find_kernel(rows, op, case, by)
        beside = row.get("peer")
        if beside is None:
            return [work, _ms(row), peer, ""]
        return [work, _ms(row), f"{peer} {_ms(beside)}", rounded(row["time_over_peer"])]

    scores, random_ids, shared = "lightning_indexer", "random ids", "shared ids"
    lines = [
        line("index scores, fp8, 64 heads", scores, f"{fp8}64 {shape} rectangle", "DeepGEMM"),
        line("index scores, fp8, 32 heads", scores, f"{fp8}32 {shape} rectangle", "DeepGEMM"),
        line("index scores, bf16, 64 heads", scores, f"{bf16}64 {shape} rectangle", "-"),
        line("exact top-k, 1024 rows", "topk", "tile_128k rows=1024", "torch.topk", "torch"),
        line("scores and top-k together, fp8, 32 heads", "index_topk", f"{fp8}32 {shape}", "DeepGEMM's scores alone"),
        line("sparse MLA, 64 heads, random ids", "sparse_mla", f"heads=64 {shape} k=2048 {random_ids}", "FlashMLA"),
        line("sparse MLA, 128 heads, random ids", "sparse_mla", f"heads=128 {shape} k=2048 {random_ids}", "FlashMLA"),
    ]
    padded = find_kernel(rows, "sparse_mla", f"heads=64 {shape} k=2048 {random_ids}")["peer"]
    for heads in (16, 8):
        for kind in (random_ids, shared):
            row = find_kernel(rows, "sparse_mla", f"heads={heads} {shape} k=2048 {kind}")
            peer = f"FlashMLA, padded to 64 heads {_ms(padded)}" if kind == random_ids else "-"
            ratio = rounded(row["ms"] / padded["ms"]) if kind == random_ids else ""
            lines.append([f"sparse MLA, {heads} heads, {kind}", _ms(row), peer, ratio])
    return _markdown(["work", "ours", "peer in the same run", "ours / peer"], lines)


def memory(reports: list[Report]) -> str:
    """Memory of a device by context and DCP size, as planned."""
    (report,) = of_kind(reports, "memory")
    rows = report.data["memory"]
    contexts = [n for n in sorted({row["context"] for row in rows}) if n >= 1 << 15]
    total = {(row["dcp"], row["context"]): row["total_bytes"] for row in rows}
    limit = report.data["setup"]["device_bytes"]

    def cell(dcp: int, context: int) -> str:
        value = f"{rounded(total[dcp, context] / 1e9, 1)} GB"
        return value if total[dcp, context] <= limit else f"**{value}**"

    lines = [[f"DCP {dcp}", *(cell(dcp, n) for n in contexts)] for dcp in sorted({row["dcp"] for row in rows})]
    return _markdown(["", *(f"{n:,} tokens" for n in contexts)], lines)


TABLES: dict[str, Callable[[list[Report]], str]] = {"kernels": kernels, "memory": memory}


def filled(text: str, reports: list[Report]) -> str:
    """`text` with every table between its markers as the results say.

    Raises:
      LookupError: A table has no such name, or a result that it needs is not there.
    """

    def table(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise LookupError(f"there is no table {match[2]!r}; one of {sorted(TABLES)}")
        return f"{match[1]}\n{TABLES[match[2]](reports)}\n\n{match[3]}"

    return _TABLE.sub(table, text)


def pages(root: Path) -> list[Path]:
    """README and every page of the docs."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]
