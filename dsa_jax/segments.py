"""Runs of layers that repeat a pattern, so that one traced body serves them all in a scan."""

import dataclasses
from typing import Any

import jax

from dsa_jax.config import ModelConfig
from dsa_jax.config_flash import NO_INDEXER
from dsa_jax.config_layers import FULL, SPARSE
from dsa_jax.layers.decoder import LayerKind, LayerPlace

MAX_PERIOD = 8


@dataclasses.dataclass(frozen=True)
class Segment:
    """Layers `first .. first + repeats * len(pattern) - 1`.

    Attributes:
      first: Index of the first layer.
      before: Its place in the cache: how many layers of each kind come before it.
      pattern: Kinds of the layers of one repeat.
      repeats: How often the pattern comes.
    """

    first: int
    before: LayerPlace
    pattern: tuple[LayerKind, ...]
    repeats: int

    def layer(self, position: int, repeat: int) -> int:
        """Index of the layer at `position` of the pattern in one repeat."""
        return self.first + repeat * len(self.pattern) + position

    def place(self, position: int, repeat: Any) -> LayerPlace:
        """Where the cache keeps the layer at `position` of the pattern in one repeat, an int or a traced one."""
        ahead, each = count_layers(self.pattern[:position]), count_layers(self.pattern)
        return jax.tree.map(lambda before, a, e: before + a + repeat * e, self.before, ahead, each)


def count_layers(kinds: tuple[LayerKind, ...]) -> LayerPlace:
    """How many of the layers have each part of the cache."""
    return LayerPlace(
        ckv=sum(not kind.linear for kind in kinds),
        index_keys=sum(kind.full for kind in kinds),
        state=sum(kind.linear for kind in kinds),
    )


def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Kind of each layer of the model."""
    return tuple(
        LayerKind(full=index == FULL, sparse_mlp=mlp == SPARSE, linear=index == NO_INDEXER)
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
    then stays inside one body. GLM-5.2 becomes 3 dense full layers, 3 shared ones, and 18 times (full, shared x 3);
    GLM-5.3-Flash 3 dense linear layers, 10 times (full, linear x 3), and a full and a linear one.
    """
    kinds = layer_kinds(config)
    segments = []
    first = 0
    while first < len(kinds):
        best_period, best_repeats, best_saved = 1, 1, 0
        for period in range(1, min(MAX_PERIOD, len(kinds) - first) + 1):
            if period > 1 and not kinds[first].full:
                break
            repeats = _repeats(kinds, first, period)
            saved = (repeats - 1) * period
            if saved > best_saved:
                best_period, best_repeats, best_saved = period, repeats, saved
        before = count_layers(kinds[:first])
        segment = Segment(first, before, kinds[first : first + best_period], best_repeats)
        segments.append(segment)
        first += best_period * best_repeats
    return tuple(segments)
