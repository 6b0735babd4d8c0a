"""Which tiles a block of the grid works on, and in what steps."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sparse_mla.tile_shape import BLOCK, TileShape


def blocks_of(count):
    """Steps that this many keys take."""
    return lax.div(count + BLOCK - 1, BLOCK)


def pair(step):
    """Slot of a step in a ring of 2 and the parity of its use."""
    return step & 1, (step >> 1) & 1


@dataclasses.dataclass(frozen=True)
class Walk:
    """The tiles of one block of the grid: every `grid`-th from `first` on, each its queries and then its keys.

    Attributes:
      shape: Static sizes.
      grid: Blocks of the grid.
      first: Index of this block.
      trips: How many tiles it has.
      counts: Ref of the numbers of keys of the lists.
    """

    shape: TileShape
    grid: int
    first: jax.Array
    trips: jax.Array
    counts: jax.Array

    @classmethod
    def of(cls, shape: TileShape, grid: int, first: jax.Array, counts: jax.Array) -> "Walk":
        """The tiles of block `first`."""
        return cls(shape, grid, first, (shape.tiles - 1 - first) // grid + 1, counts)

    def tile_of(self, n):
        """Tile of rows, part of its list, and list of the n-th tile."""
        tile = self.first + n * self.grid
        row_tile = lax.div(tile, self.shape.splits)
        return row_tile, lax.rem(tile, self.shape.splits), lax.div(row_tile, self.shape.tiles_per_list)

    def keys_of(self, n):
        """Where the n-th tile's part of its list starts, and how many keys it has; an empty part starts inside too."""
        _, part, listed = self.tile_of(jnp.minimum(n, self.trips - 1))
        whole = self.counts[listed]
        size = lax.div(blocks_of(whole) + self.shape.splits - 1, self.shape.splits) * BLOCK
        start = jnp.minimum(part * size, jnp.maximum(whole - 1, 0)) if self.shape.splits > 1 else jnp.int32(0)
        return start, jnp.clip(whole - part * size, 0, size)

    def ring(self, step):
        """Slot of a step in the ring of latent columns and the parity of its use."""
        turn = lax.div(step, self.shape.slots)
        return step - self.shape.slots * turn, turn & 1
