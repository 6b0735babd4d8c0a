"""The paths that `bench_sharding.py` compares, and the bytes that a program moves between ranks."""

import dataclasses
import math
import re
from collections.abc import Mapping

from sharding.policy import PrefillPolicy


@dataclasses.dataclass(frozen=True)
class Path:
    """One way through the sharded layers.

    Attributes:
      name: What it does otherwise than the stock path.
      policy: Its switches, all of them set by hand but for "auto".
      windows: Whether the history is gathered window by window, as far as it reaches, instead of a whole buffer.
    """

    name: str
    policy: PrefillPolicy
    windows: bool = False

    @property
    def exact(self) -> bool:
        """Whether its selections must be those of the stock path."""
        return self.policy.merge != "union"


STOCK = Path("stock", PrefillPolicy.stock())


def paths(*, qsplit: int, dcp: int) -> list[Path]:
    """All paths that differ on a mesh; the stock path is the first."""
    found = [STOCK]

    def add(name: str, *, windows: bool = False, **switches) -> None:
        found.append(Path(name, PrefillPolicy.stock(**switches), windows))

    balanced = {"query_split": True, "partition": "balanced"}
    if dcp > 1:
        add("owner merge", merge="owner")
        add("union", merge="union")
    if qsplit > 1:
        add("query split, contiguous", query_split=True, partition="contiguous")
        add("query split, balanced", **balanced)
    copies = [n for n in (2, 4) if n < dcp and dcp % n == 0] + [dcp] * (dcp > 1)
    for n in copies:
        add(f"index keys x {n}, query split", index_replicas=n, **balanced)
    if dcp > 1:
        # Where no two ranks hold the same index keys, copies of them make the split possible.
        split = {**balanced, "index_replicas": 1 if qsplit > 1 else dcp}
        add("CKV gather", ckv_gather=True)
        add("CKV gather in windows", ckv_gather=True, windows=True)
        add("CKV gather a layer ahead", ckv_gather=True, prefetch=True)
        add("CKV gather, query split", ckv_gather=True, **split)
        add("CKV gather a layer ahead, query split", ckv_gather=True, prefetch=True, **split)
        add("CKV gather, token split", ckv_gather=True, token_split=True)
        add("CKV gather, query and token split", ckv_gather=True, token_split=True, merge="owner", **split)
    if qsplit > 1:
        add("token split", token_split=True)
        add("query and token split", token_split=True, **balanced)
    found.append(Path("auto", PrefillPolicy()))
    return found


_COLLECTIVE = re.compile(r"= \(?(\w+\[[^=]*?) (all-gather|all-to-all|reduce-scatter|all-reduce)(?:-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
# Lists of ranks, as [groups, ranks], or since jax 0.12 by names of mesh axes.
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]|mesh\[([^\]]*)\] ?\{([^}]*)\})")
_BITS = {"pred": 8, "f64": 64, "s64": 64, "f32": 32, "s32": 32, "u32": 32, "bf16": 16, "f16": 16}


def _group_size(line: str) -> int:
    """Ranks of each group of a collective; a program that XLA writes in another way must not count as 0."""
    groups = _GROUPS.search(line)
    if groups is None:
        raise ValueError(f"no replica groups in {line!r}")
    listed, counted, mesh, axes = groups.groups()
    if listed is not None:
        return len(listed.split(","))
    if counted is not None:
        return int(counted)
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", axes))


def received_bytes(hlo: str, repeats: Mapping[str, int] | None = None) -> dict[str, int]:
    """Bytes that one rank receives in each kind of collective of a program as it is lowered.

    A sum counts as a reduce_scatter and an all_gather. A collective counts once, wherever it stands.

    Args:
      hlo: The program in HLO's text form, before XLA's passes.
      repeats: How often a collective with a result of that type, such as "u8[2,8,656]", runs; once if not named.
    """
    found: dict[str, int] = {}
    for line in hlo.splitlines():
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        arrays = _ARRAY.findall(match[1])
        size = sum(
            math.prod(map(int, filter(None, dims.split(",")))) * _BITS.get(kind, 8) // 8 for kind, dims in arrays
        )
        ranks = _group_size(line)
        received = {
            "all-gather": size * (ranks - 1) // ranks,
            "all-to-all": size * (ranks - 1) // ranks,
            "reduce-scatter": size * (ranks - 1),
            "all-reduce": 2 * size * (ranks - 1) // ranks,
        }[match[2]]
        times = (repeats or {}).get("{}[{}]".format(*arrays[0]), 1)
        found[match[2]] = found.get(match[2], 0) + received * times
    return found
