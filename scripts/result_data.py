"""Stored benchmark results, as pictures and tables need them."""

import dataclasses
import decimal
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# A key that each kind of report has: `bench_kernels.py`, `bench_sharding.py`, `bench_prefill.py`, `bench_memory.py`.
KINDS = {"kernels": "op", "paths": "path"}


@dataclasses.dataclass(frozen=True)
class Report:
    """One file of results.

    Attributes:
      file: The file.
      data: What it holds.
    """

    file: Path
    data: dict[str, Any]

    @property
    def kind(self) -> str | None:
        """Which benchmark wrote it: "kernels", "paths", "prefill" or "memory"; None for another file."""
        if "memory" in self.data:
            return "memory"
        if "cases" in self.data:
            return "prefill"
        rows = self.data.get("results") or [{}]
        return next((kind for kind, key in KINDS.items() if key in rows[0]), None)

    @property
    def digest(self) -> str:
        """The file's name and the beginning of its SHA-256, to see later whether a picture shows it."""
        return f"{self.file.name} {hashlib.sha256(self.file.read_bytes()).hexdigest()[:16]}"


def load(folder: Path) -> list[Report]:
    """All reports of a folder, by name."""
    reports = [Report(file, json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))]
    return [report for report in reports if report.kind is not None]


def of_kind(reports: Iterable[Report], kind: str) -> list[Report]:
    """Reports of one kind."""
    return [report for report in reports if report.kind == kind]


def kernel_rows(reports: Iterable[Report]) -> list[dict[str, Any]]:
    """Results of all kernels that are right, with the name of their file."""
    rows = []
    for report in of_kind(reports, "kernels"):
        rows += [row | {"file": report.file.name} for row in report.data["results"] if "ms" in row]
    return rows


def find_kernel(rows: Iterable[dict[str, Any]], op: str, case: str, peer: str | None = None) -> dict[str, Any]:
    """The result of a case.

    Args:
      rows: Results.
      op: The operation.
      case: Beginning of the case's name.
      peer: Beginning of the name of the peer that it ran beside; None takes the first, with any peer or none.

    Raises:
      LookupError: There is none.
    """
    for row in rows:
        beside = row.get("peer", {}).get("name", "")
        if row["op"] == op and row["case"].startswith(case) and (peer is None or beside.startswith(peer)):
            return row
    raise LookupError(f"no result of {op} {case!r}" + ("" if peer is None else f" beside {peer}"))


def rounded(value: float, digits: int = 2) -> str:
    """A stored number with so many digits behind the point, halves up, as a reader of the file would round it."""
    unit = decimal.Decimal(1).scaleb(-digits)
    return str(decimal.Decimal(repr(value)).quantize(unit, decimal.ROUND_HALF_UP))
