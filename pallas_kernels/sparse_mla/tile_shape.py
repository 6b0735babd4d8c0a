"""Sizes of the sparse MLA kernel, and what lies where in its shared memory."""

import dataclasses

TILE_ROWS = 64
BLOCK = 64  # keys of one step
LATENT = 512
ROPE = 64
WIDTH = LATENT + ROPE
HALF = LATENT // 2
IN_REGISTERS = LATENT - 64  # columns of Q held in registers; the rest is read from shared memory
SLOTS = 3  # blocks of latent columns in flight

# The control array of 32-bit words: mbarriers, then for 4 steps the membership bits of the keys (8 tokens x 64 keys)
# and the ids, then for 2 steps the factors of the rows: of a block of keys what the output shrinks by, of the step
# after the last the reciprocal sums. Together with the rings it must stay 1 KB below the 227 KB of a block.
BITS, IDS, FACTORS, CONTROL_WORDS = 32, 96, 352, 480
BITS_OF_STEP = 16
LISTS_AHEAD = 4

QUERY_FLAG = 1 << 30  # set on an id that is a row of the queries


class Barrier:
    """Index of the first mbarrier of each kind; LEFT to RIGHT_DONE have one for each slot of their ring.

    LEFT, RIGHT and ROPE say that columns of a step have arrived, P_READY that its weights lie in shared memory (or its
    queries in registers), GO that the scores of the step after are done, RIGHT_DONE that the right side has read it.
    """

    LEFT, RIGHT, ROPE, P_READY, GO, RIGHT_DONE, LAST_READY, LISTS_STARTED = 0, 3, 6, 8, 10, 12, 14, 15

    @staticmethod
    def arrivals() -> tuple[int, ...]:
        """Arrivals that complete a phase: each thread's copies, or one for each warp."""
        return (128,) * 8 + (4,) * 8


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
