"""Runs of layers that repeat a pattern, so that one traced body serves them all in a scan."""

import dataclasses

from dsa_jax.config import ModelConfig
from dsa_jax.layers.decoder import LayerKind

MAX_PERIOD = 8


@dataclasses.dataclass(frozen=True)
class Segment:
    """Layers `first .. first + repeats * len(pattern) - 1`.

    Attributes:
      first: Index of the first layer.
      first_index: How many full layers come before it.
      pattern: Kinds of the layers of one repeat.
      repeats: How often the pattern comes.
    """

    first: int
    first_index: int
    pattern: tuple[LayerKind, ...]
    repeats: int

    def layer(self, position: int, repeat: int) -> int:
        """Index of the layer at `position` of the pattern in one repeat."""
        return self.first + repeat * len(self.pattern) + position

    @property
    def full_per_repeat(self) -> int:
        """Full layers in the pattern."""
        return sum(kind.full for kind in self.pattern)

    def index_position(self, position: int) -> int:
        """How many full layers of the pattern come before `position`."""
        return sum(kind.full for kind in self.pattern[:position])


def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Kind of each layer of the model."""
    return tuple(
        LayerKind(full=index == "full", sparse_mlp=mlp == "sparse")
        for index, mlp in zip(config.indexer_types, config.mlp_types, strict=True)
    )


def _repeats(kinds: tuple[LayerKind, ...], first: int, period: int) -> int:
    count = 1
    while kinds[first + count * period : first + (count + 1) * period] == kinds[first : first + period]:
        count += 1
    return count


def plan_segments(config: ModelConfig) -> tuple[Segment, ...]:
    """Cut the layers into segments, greedily by how many traced layers a repeat saves.

    A pattern of several layers starts with a full layer: what a full layer computes for the shared layers behind it
    then stays inside one body. GLM-5.2 becomes 3 dense full layers, 3 shared ones, and 18 times (full, shared x 3).
    """
    kinds = layer_kinds(config)
    segments = []
    first = first_index = 0
    while first < len(kinds):
        best_period, best_repeats, best_saved = 1, 1, 0
        for period in range(1, min(MAX_PERIOD, len(kinds) - first) + 1):
            if period > 1 and not kinds[first].full:
                break
            repeats = _repeats(kinds, first, period)
            saved = (repeats - 1) * period
            if saved > best_saved:
                best_period, best_repeats, best_saved = period, repeats, saved
        segment = Segment(first, first_index, kinds[first : first + best_period], best_repeats)
        segments.append(segment)
        first += best_period * best_repeats
        first_index += segment.full_per_repeat * best_repeats
    return tuple(segments)
