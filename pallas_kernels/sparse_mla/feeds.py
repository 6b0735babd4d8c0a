"""Three ways in which blocks of keys reach shared memory, and what the warpgroups wait for in each.

`RopeRing` is what was measured. `OneRope` frees the slot of the rope columns as soon as the scores of a block are made,
which costs two more barriers. `Records` leaves the gather to a fourth warpgroup (`record_reader.py`), which turns
fp8_ds_mla records into bf16. All have the same methods, which the roles in `mosaic_hopper.py` call.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.sparse_mla import device_ops as dev
from pallas_kernels.sparse_mla import gather
from pallas_kernels.sparse_mla.tile_shape import Barrier
from pallas_kernels.sparse_mla.walk import Walk, pair


@dataclasses.dataclass(frozen=True)
class RopeRing:
    """Copies by the warpgroups of the output; rope columns in a ring of 2, in which the weights take their place.

    Attributes:
      walk: The steps.
      kv: Ref of the cache.
      q: Ref of the queries.
      ring: Latent columns of some steps.
      ropes: Two tiles of 64 columns, for rope columns and weights.
      control: The control array.
    """

    walk: Walk
    kv: Any
    q: Any
    ring: Any
    ropes: Any
    control: Any

    @property
    def copies(self) -> gather.Copies:
        """The copies of a step."""
        return gather.row_copies(self.walk.shape)

    # The warpgroup of the scores.

    def rope(self, step):
        """Rope columns of a step."""
        return self.ropes.at[step & 1]

    def weights(self, step):
        """Index of the tile for the weights of a step."""
        return step & 1

    def wait_latent(self, step):
        """Until the latent columns of a step have arrived."""
        slot, parity = self.walk.ring(step)
        dev.wait(self.control, Barrier.LEFT + slot, parity)
        dev.wait(self.control, Barrier.RIGHT + slot, parity)

    def wait_rope(self, step):
        """Until its rope columns have, which are asked for when all have read the weights of two steps before."""
        slot, parity = pair(step)
        dev.wait(self.control, Barrier.ROPE + slot, parity)

    def wait_factors(self, step):
        """Until the place for the factors of a step is free: `wait_rope` was enough."""

    def wait_weights(self, step):
        """Until the tile for the weights of a step is free: `wait_rope` was enough."""

    def wait_last_factors(self, step):
        """The same as `wait_factors` for the step after the last of a tile, whose rope nobody has waited for."""
        self.wait_rope(step)

    # The warpgroups of the output.

    def start(self, left: bool):
        """Ask for the first steps."""

        def fill(step, _):
            self._copy_latent(step, left)
            return ()

        lax.fori_loop(0, self.walk.shape.slots, fill, ())
        if left:
            self._copy_rope(jnp.int32(0))
            self._copy_rope(jnp.int32(1))

    def weights_ready(self, step, left: bool, is_first):
        """Called when the weights of a step (its queries: `is_first` None) are there, and so its scores are made."""

    def scores_ready(self, step, left: bool, is_last):
        """Called when the scores of the step after are made too."""

    def refill(self, step, left: bool):
        """Ask for what the step has freed."""
        dev.warpgroup_sync()  # all warps have read the slot
        if left:
            slot, parity = pair(step)
            dev.wait(self.control, Barrier.RIGHT_DONE + slot, parity)
            self._copy_rope(step + 2)
        else:
            dev.arrive(self.control, Barrier.RIGHT_DONE + (step & 1))
        self._copy_latent(step + self.walk.shape.slots, left)

    def finish(self):
        """At the end, wait for the copies that nobody waits for."""
        gather.drain()

    def _copy_latent(self, step, left: bool):
        copy = self.copies.left if left else self.copies.right
        slot, _ = self.walk.ring(step)
        copy(self.kv, self.q, step, slot, self.ring, self.control)

    def _copy_rope(self, step):
        self.copies.rope(self.kv, self.q, step, step & 1, self.ropes, self.control)


@dataclasses.dataclass(frozen=True)
class OneRope(RopeRing):
    """One slot for the rope columns, free when the scores are made, and one for the weights."""

    def rope(self, step):
        """Rope columns of a step."""
        return self.ropes.at[0]

    def weights(self, step):
        """Index of the tile for the weights of a step."""
        return 1

    def wait_rope(self, step):
        """Until its rope columns have arrived."""
        dev.wait(self.control, jnp.int32(Barrier.ROPE), step & 1)

    def wait_factors(self, step):
        """Until all have read the factors of two steps before, whose place those of `step` take."""
        slot, parity = pair(step - 2)
        dev.wait(self.control, Barrier.READ + slot, parity)

    def wait_weights(self, step):
        """Until all have read the weights of the step before."""
        slot, parity = pair(step - 1)
        dev.wait(self.control, Barrier.READ + slot, parity)

    def wait_last_factors(self, step):
        """The same as `wait_factors`."""
        self.wait_factors(step)

    def start(self, left: bool):
        """Ask for the first steps."""

        def fill(step, _):
            self._copy_latent(step, left)
            return ()

        lax.fori_loop(0, self.walk.shape.slots, fill, ())
        if left:
            self._copy_rope(jnp.int32(0))

    def weights_ready(self, step, left: bool, is_first):
        """The slot is free for the next step: after the queries, and after the first block, whose next waits."""
        if left and is_first is None:
            self._copy_rope(step + 1)
        elif left:
            pl.when(is_first)(lambda: self._copy_rope(step + 1))

    def scores_ready(self, step, left: bool, is_last):
        """The scores of the next step are made, so the slot is free for the one after."""
        if left:
            pl.when(jnp.logical_not(is_last))(lambda: self._copy_rope(step + 2))

    def refill(self, step, left: bool):
        """Ask for what the step has freed."""
        dev.arrive(self.control, Barrier.READ + (step & 1))
        dev.warpgroup_sync()  # all warps have read the slot
        if left:  # The list is there. RIGHT_DONE would not do: the right side may be two steps on.
            slot, parity = pair(step - 1)
            dev.wait(self.control, Barrier.READ + slot, parity)
        self._copy_latent(step + self.walk.shape.slots, left)

    def _copy_rope(self, step):
        self.copies.rope(self.kv, self.q, step, jnp.int32(0), self.ropes, self.control)


@dataclasses.dataclass(frozen=True)
class Records(RopeRing):
    """Blocks that another warpgroup has written; rope columns and weights in a ring of 2, as in `RopeRing`."""

    def wait_latent(self, step):
        """Until the block is there."""
        slot, parity = pair(step)
        dev.wait(self.control, Barrier.BLOCK + slot, parity)

    def wait_rope(self, step):
        """Until its rope columns are: they come with the block."""

    def wait_last_factors(self, step):
        """Until all have read the factors of two steps before."""
        slot, parity = pair(step - 2)
        dev.wait(self.control, Barrier.READ + slot, parity)

    def start(self, left: bool):
        """The records' warpgroup starts by itself."""

    def refill(self, step, left: bool):
        """Tell the records' warpgroup that the slot is free, and that the list of a later step is there."""
        dev.warpgroup_sync()  # not for the order: without it ptxas keeps more alive and spills
        dev.arrive(self.control, Barrier.READ + (step & 1))

    def finish(self):
        """No copies of these warpgroups."""
