"""Sizes of the sparse MLA kernel, and what lies where in its shared memory."""

import dataclasses

TILE_ROWS = 64
BLOCK = 64  # keys of one step
LATENT = 512
ROPE = 64
WIDTH = LATENT + ROPE
HALF = LATENT // 2
CHUNK = 64  # columns of a tile of shared memory, 128 bytes of bf16

# The control array of 32-bit words: mbarriers, then for 4 steps the membership bits of the keys (8 tokens x 64 keys)
# and the ids, then for 2 steps the factors of the rows: of a block of keys what the output shrinks by, of the step
# after the last the reciprocal sums. Together with the rings it must stay 1 KB below the 227 KB of a block.
BITS, IDS, FACTORS, CONTROL_WORDS = 40, 104, 360, 488
BITS_OF_STEP = 16
LISTS_AHEAD = 4

SCALE_BYTES = 16  # of an fp8_ds_mla record: a float32 for each 128 latent columns

QUERY_FLAG = 1 << 30  # set on an id that is a row of the queries


class Barrier:
    """Index of the first mbarrier of each kind; those of steps have one for each slot of their ring.

    LEFT, RIGHT and ROPE say that columns of a step have arrived, P_READY that its weights lie in shared memory (or its
    queries in registers), GO that the scores of the step after are done, RIGHT_DONE that the right side has read the
    step, READ that both sides have, and in both cases that the list of 4 steps later is there, LAST_READY that the
    reciprocal sums of a tile are (two, as a tile without keys may end before the one before it has been stored).
    Records arrive as whole blocks, under the name BLOCK, in place of LEFT.
    """

    LEFT, RIGHT, ROPE, P_READY, GO, RIGHT_DONE, LAST_READY, LISTS_STARTED, READ = 0, 3, 6, 8, 10, 12, 14, 16, 17
    BLOCK = LEFT

    @staticmethod
    def arrivals() -> tuple[int, ...]:
        """Arrivals that complete a phase: each thread's copies, or one for each warp."""
        return (128,) * 8 + (4,) * 9 + (8,) * 2


@dataclasses.dataclass(frozen=True)
class TileShape:
    """Static sizes of one call.

    Attributes:
      queries: Rows of the flattened queries, tokens times heads.
      heads: Heads of a token.
      group: Neighbouring tokens that share a list.
      lists: Number of lists.
      length: Entries of a list.
      keys: Rows of the cache.
      splits: Parts each list is cut into; each gives a partial output.
      masked: Whether the lists carry membership masks.
      width: Columns of a cache row, 576 or 512.
      packed: Whether the rows of the cache are `fp8_ds_mla` records.
    """

    queries: int
    heads: int
    group: int
    lists: int
    length: int
    keys: int
    splits: int
    masked: bool
    width: int
    packed: bool = False

    @property
    def rope(self) -> bool:
        """Whether rows have columns behind the latent."""
        return self.width > LATENT

    @property
    def slots(self) -> int:
        """Blocks of latent columns in shared memory; records need room for one more block of raw bytes."""
        return 2 if self.packed else 3

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the cache."""
        return LATENT + SCALE_BYTES + 2 * (self.width - LATENT) if self.packed else 2 * self.width

    @property
    def tiles_per_list(self) -> int:
        """Tiles of 64 rows that read one list."""
        return max(1, self.heads // TILE_ROWS)

    @property
    def rows(self) -> int:
        """Rows of queries in a tile; the rest of the 64 is padding."""
        return self.heads * self.group // self.tiles_per_list

    @property
    def tiles(self) -> int:
        """All tiles, parts counted."""
        return self.lists * self.tiles_per_list * self.splits
