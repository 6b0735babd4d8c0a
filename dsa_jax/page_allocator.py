"""Host-side bookkeeping of the pages of a paged cache. Pure Python: no device array is touched here."""

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free; the allocator is as it was before the call."""

    def __init__(self, needed: int, free: int, total: int, who: str = ""):
        super().__init__(f"{who}out of pages: {needed} needed, {free} of {total} free")
        self.needed = needed
        self.free = free
        self.total = total


@dataclasses.dataclass(frozen=True)
class PrefixMatch:
    """Pages that already hold the start of a prompt. The caller of `lookup_prefix` has one reference to each.

    Attributes:
      pages: Pages in the order of the prompt.
      num_tokens: How many tokens of the prompt they hold.
    """

    pages: tuple[int, ...]
    num_tokens: int


class PageAllocator:
    """Hands out pages, counts who refers to them, and remembers what full pages hold.

    A page id names the same page in every layer and on every rank of a decode-context group, which splits the tokens
    of a page: with `page_size` tokens a page and rank, a page holds `page_size * dcp` tokens. One allocator serves all.

    A page is either referred to (reference count above 0) or free. A free page whose content was published stays known
    and comes back from `lookup_prefix` until `alloc` needs it, the longest unused first (as vLLM's block pool). Calls
    are deterministic, so that processes that make the same calls hold the same tables. Not thread-safe.
    """

    def __init__(self, num_pages: int, tokens_per_page: int):
        """Start with all pages free.

        Args:
          num_pages: Pages of the cache, positive.
          tokens_per_page: Tokens that one page holds over all ranks, positive.

        Raises:
          ValueError: A count is not positive.
        """
        if num_pages <= 0 or tokens_per_page <= 0:
            raise ValueError(f"{num_pages=} and {tokens_per_page=} must be positive")
        self.num_pages = num_pages
        self.tokens_per_page = tokens_per_page
        self._refs = [0] * num_pages
        self._blank = collections.deque(range(num_pages))
        self._known: collections.OrderedDict[int, None] = collections.OrderedDict()  # free, published, oldest first
        self._digest_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out."""
        return len(self._blank) + len(self._known)

    def ref_count(self, page: int) -> int:
        """How many references a page has; 0 means free."""
        self._check_id(page)
        return self._refs[page]

    def pages_for(self, num_tokens: int) -> int:
        """How many pages `num_tokens` tokens fill or start."""
        return -(-num_tokens // self.tokens_per_page)

    def alloc(self, count: int) -> list[int]:
        """Take free pages, each with one reference. What they hold is unspecified.

        Blank pages go first, then published ones, which are forgotten.

        Raises:
          OutOfPagesError: Fewer than `count` are free; nothing is taken.
          ValueError: `count` is negative.
        """
        if count < 0:
            raise ValueError(f"{count=} must not be negative")
        if count > self.num_free:
            raise OutOfPagesError(count, self.num_free, self.num_pages)
        taken = []
        for _ in range(count):
            if self._blank:
                page = self._blank.popleft()
            else:
                page, _ = self._known.popitem(last=False)
                self._forget(page)
            self._refs[page] = 1
            taken.append(page)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page, for one more request that reads it.

        Raises:
          ValueError: A page is free or out of range; no count has changed.
        """
        pages = list(pages)
        for page in pages:
            self._check_in_use(page)
        for page in pages:
            self._refs[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page; a page without any is free again.

        The pages of a request are best given in their order: its last ones are then reused before its first, whose
        content more prompts share.

        Raises:
          ValueError: A page is out of range or has fewer references than are dropped; no count has changed.
        """
        for page, drops in collections.Counter(pages).items():
            self._check_in_use(page)
            if drops > self._refs[page]:
                raise ValueError(f"page {page} has {self._refs[page]} references, cannot drop {drops}")
        for page in reversed(pages):
            self._refs[page] -= 1
            if self._refs[page] > 0:
                continue
            if page in self._digest_of:
                self._known[page] = None
            else:
                self._blank.append(page)

    def copy_on_write(self, page: int) -> tuple[int, bool]:
        """Make a page safe to write for a caller that holds one reference to it.

        Returns:
          The page to write, and whether the caller must first copy the content of `page` into it. A page that nobody
          else refers to is returned itself, and forgotten if it was published, since its content changes. Otherwise
          the caller's reference moves to a new page.

        Raises:
          OutOfPagesError: A new page is needed and none is free; the caller still holds `page`.
          ValueError: The page is free or out of range.
        """
        self._check_in_use(page)
        if self._refs[page] == 1:
            self._forget(page)
            return page, False
        (copy,) = self.alloc(1)
        self._refs[page] -= 1
        return copy, True

    def publish_prefix(self, tokens: Sequence[int] | np.ndarray, pages: Sequence[int]) -> None:
        """Make the full pages of a request known by the tokens that they and all pages before them hold.

        Call it once the pages are written; a partly filled last page is passed over. Where equal content is already
        known from another page, that one stays the known one.

        Args:
          tokens: Token ids from the start of the request, as far as its pages are written.
          pages: Its pages, in order.

        Raises:
          ValueError: There are fewer pages than full blocks of tokens, a page is free, or it is known by other content.
        """
        digests = self._digests(tokens)
        if len(digests) > len(pages):
            raise ValueError(f"{len(tokens)} tokens fill {len(digests)} pages, got {len(pages)}")
        for page, digest in zip(pages, digests, strict=False):
            self._check_in_use(page)
            if self._digest_of.get(page, digest) != digest:
                raise ValueError(f"page {page} was published with other content; copy_on_write it before writing")
        for page, digest in zip(pages, digests, strict=False):
            if digest not in self._page_of:
                self._page_of[digest] = page
                self._digest_of[page] = digest

    def lookup_prefix(self, tokens: Sequence[int] | np.ndarray) -> PrefixMatch:
        """Find known pages that hold the start of a prompt, and take a reference to each.

        The last token of the prompt is never covered: its hidden state is what the next token is computed from, so at
        least one token is left to run.

        Args:
          tokens: Token ids of the prompt.
        """
        pages = []
        for digest in self._digests(tokens[: max(len(tokens) - 1, 0)]):
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        for page in pages:
            if self._refs[page] == 0:
                del self._known[page]
            self._refs[page] += 1
        return PrefixMatch(tuple(pages), len(pages) * self.tokens_per_page)

    def _digests(self, tokens: Sequence[int] | np.ndarray) -> list[bytes]:
        """One digest for each full page of tokens, over these tokens and the digest of the page before."""
        ids = np.asarray(tokens, np.int64)
        digests, parent = [], b""
        for end in range(self.tokens_per_page, len(ids) + 1, self.tokens_per_page):
            # 128 bits: two prompts never meet by chance, so equal digests are taken for equal tokens.
            parent = hashlib.blake2b(parent + ids[end - self.tokens_per_page : end].tobytes(), digest_size=16).digest()
            digests.append(parent)
        return digests

    def _forget(self, page: int) -> None:
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]

    def _check_id(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is not in [0, {self.num_pages})")

    def _check_in_use(self, page: int) -> None:
        self._check_id(page)
        if self._refs[page] == 0:
            raise ValueError(f"page {page} is free")
