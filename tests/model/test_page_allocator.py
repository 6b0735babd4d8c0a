"""Pages are neither lost nor handed out twice, and a known prefix holds what it says."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsa_jax.page_allocator import OutOfPagesError, PageAllocator


def test_pages_are_distinct_until_they_run_out():
    allocator = PageAllocator(4, 8)
    first = allocator.alloc(3)
    assert len(set(first)) == 3
    assert allocator.num_free == 1
    with pytest.raises(OutOfPagesError, match="2 needed, 1 of 4 free") as error:
        allocator.alloc(2)
    assert (error.value.needed, error.value.free, error.value.total) == (2, 1, 4)
    assert allocator.num_free == 1
    allocator.free(first)
    assert sorted(allocator.alloc(4)) == [0, 1, 2, 3]


def test_pages_for_counts_partly_filled_pages():
    allocator = PageAllocator(4, 8)
    assert [allocator.pages_for(n) for n in (0, 1, 8, 9)] == [0, 1, 1, 2]


def test_a_shared_page_is_free_when_its_last_reader_lets_go():
    allocator = PageAllocator(2, 8)
    pages = allocator.alloc(1)
    allocator.share(pages)
    allocator.free(pages)
    assert allocator.ref_count(pages[0]) == 1
    assert allocator.num_free == 1
    allocator.free(pages)
    assert allocator.num_free == 2


def test_copy_on_write_moves_a_reader_of_a_shared_page():
    allocator = PageAllocator(3, 8)
    (page,) = allocator.alloc(1)
    assert allocator.copy_on_write(page) == (page, False)
    allocator.share([page])
    copy, must_copy = allocator.copy_on_write(page)
    assert must_copy
    assert copy != page
    assert allocator.ref_count(page) == allocator.ref_count(copy) == 1


def test_copy_on_write_without_a_free_page_keeps_the_old_one():
    allocator = PageAllocator(1, 8)
    (page,) = allocator.alloc(1)
    allocator.share([page])
    with pytest.raises(OutOfPagesError, match="1 needed, 0 of 1 free"):
        allocator.copy_on_write(page)
    assert allocator.ref_count(page) == 2


def test_a_written_page_is_no_longer_known():
    allocator = PageAllocator(3, 2)
    pages = allocator.alloc(1)
    allocator.publish_prefix([1, 2], pages)
    assert allocator.copy_on_write(pages[0]) == (pages[0], False)
    assert allocator.lookup_prefix([1, 2, 3]).num_tokens == 0


def test_prefixes_are_found_by_whole_pages_and_leave_a_token_to_run():
    allocator = PageAllocator(8, 4)
    prompt = list(range(10))
    pages = allocator.alloc(3)
    allocator.publish_prefix(prompt, pages)
    for length, whole in ((3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (10, 2)):
        match = allocator.lookup_prefix(np.asarray(prompt[:length]))
        assert match.pages == tuple(pages[:whole])
        assert match.num_tokens == 4 * whole
        allocator.free(match.pages)
    other = allocator.lookup_prefix([9, *prompt[1:]])
    assert other.pages == ()
    assert allocator.lookup_prefix([]).num_tokens == 0


def test_a_page_is_known_together_with_all_that_precedes_it():
    allocator = PageAllocator(4, 2)
    first, second = allocator.alloc(2), allocator.alloc(2)
    allocator.publish_prefix([1, 2, 5, 6], first)
    allocator.publish_prefix([3, 4, 5, 6], second)
    assert allocator.lookup_prefix([1, 2, 5, 6, 7]).pages == tuple(first)
    assert allocator.lookup_prefix([3, 4, 5, 6, 7]).pages == tuple(second)


def test_a_freed_prefix_is_found_until_its_pages_are_needed():
    allocator = PageAllocator(4, 2)
    pages = allocator.alloc(3)
    allocator.publish_prefix([1, 2, 3, 4, 5, 6], pages)
    allocator.free(pages)
    assert allocator.num_free == 4
    match = allocator.lookup_prefix([1, 2, 3, 4, 5, 6, 7])
    assert match.pages == tuple(pages)
    assert allocator.num_free == 1
    allocator.free(match.pages)
    taken = allocator.alloc(2)
    assert pages[0] not in taken, "the blank page goes first, then the end of the prefix"
    assert allocator.lookup_prefix([1, 2, 3, 4, 5, 6, 7]).pages == tuple(pages[:2])


def test_the_longest_unused_prefix_goes_first():
    allocator = PageAllocator(3, 1)
    pages = {token: allocator.alloc(1) for token in (1, 2, 3)}
    for token, page in pages.items():
        allocator.publish_prefix([token], page)
    for token in (2, 3, 1):
        allocator.free(pages[token])
    allocator.free(allocator.lookup_prefix([2, 0]).pages)
    assert allocator.alloc(2) == [*pages[3], *pages[1]]
    assert allocator.lookup_prefix([2, 0]).pages == tuple(pages[2])


def test_equal_content_keeps_the_page_that_is_known():
    allocator = PageAllocator(4, 2)
    first, second = allocator.alloc(1), allocator.alloc(1)
    allocator.publish_prefix([1, 2], first)
    allocator.publish_prefix([1, 2], second)
    assert allocator.lookup_prefix([1, 2, 3]).pages == tuple(first)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: a.free([0, 0]), "page 0 has 1 references, cannot drop 2"),
        (lambda a: a.free([1]), "page 1 is free"),
        (lambda a: a.share([0, 3]), r"page 3 is not in \[0, 3\)"),
        (lambda a: a.share([-1]), r"page -1 is not in"),
        (lambda a: a.copy_on_write(2), "page 2 is free"),
        (lambda a: a.alloc(-1), "count=-1"),
        (lambda a: a.publish_prefix([1, 2, 3, 4], [0]), "4 tokens fill 2 pages, got 1"),
        (lambda a: a.publish_prefix([1, 2], [2]), "page 2 is free"),
        (lambda a: (a.publish_prefix([1, 2], [0]), a.publish_prefix([3, 4], [0])), "published with other content"),
        (lambda a: PageAllocator(0, 4), "num_pages=0"),
    ],
)
def test_misuse_is_named_and_changes_nothing(call, message):
    allocator = PageAllocator(3, 2)
    assert allocator.alloc(1) == [0]
    with pytest.raises(ValueError, match=message):
        call(allocator)
    assert [allocator.ref_count(p) for p in range(3)] == [1, 0, 0]
    assert allocator.num_free == 2


class Allocations(RuleBasedStateMachine):
    """Random requests over a small cache, beside a plain record of who holds and who wrote what."""

    PAGES, TOKENS = 7, 2

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(self.PAGES, self.TOKENS)
        self.held: list[list[int]] = []
        self.content: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end, as written

    def refs(self):
        counts = [0] * self.PAGES
        for pages in self.held:
            for page in pages:
                counts[page] += 1
        return counts

    def pick(self, data):
        return data.draw(st.integers(0, len(self.held) - 1), label="request")

    # Two token values make shared prefixes common.
    @rule(prompt=st.lists(st.integers(0, 1), max_size=9))
    def start_request(self, prompt):
        before, free = self.refs(), self.allocator.num_free
        match = self.allocator.lookup_prefix(prompt)
        assert match.num_tokens == self.TOKENS * len(match.pages)
        assert match.num_tokens < max(len(prompt), 1)
        for i, page in enumerate(match.pages):
            assert self.content[page] == tuple(prompt[: self.TOKENS * (i + 1)])
        try:
            new = self.allocator.alloc(self.allocator.pages_for(len(prompt)) - len(match.pages))
        except OutOfPagesError as error:
            assert error.needed > error.free
            self.allocator.free(match.pages)
            assert [self.allocator.ref_count(p) for p in range(self.PAGES)] == before
            assert self.allocator.num_free == free
            return
        assert all(before[page] == 0 for page in new)
        pages = [*match.pages, *new]
        for i, page in enumerate(pages):
            if page in new:
                self.content[page] = tuple(prompt[: self.TOKENS * (i + 1)])
        self.allocator.publish_prefix(prompt, pages)
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish_request(self, data):
        self.allocator.free(self.held.pop(self.pick(data)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork_request(self, data):
        pages = self.held[self.pick(data)]
        self.allocator.share(pages)
        self.held.append(list(pages))

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def write_to_last_page(self, data):
        pages = self.held[self.pick(data)]
        if not pages:
            return
        shared = self.refs()[pages[-1]] > 1
        try:
            page, must_copy = self.allocator.copy_on_write(pages[-1])
        except OutOfPagesError as error:
            assert shared
            assert error.free == 0
            return
        assert must_copy == shared
        assert (page != pages[-1]) == shared
        pages[-1] = page
        self.content[page] = (2,)  # no prompt holds it

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_too_often(self, data):
        pages = self.held[self.pick(data)]
        for page in pages[:1]:
            with pytest.raises(ValueError, match="cannot drop"):
                self.allocator.free([page] * (self.refs()[page] + 1))

    @invariant()
    def counts_agree(self):
        counts = self.refs()
        assert [self.allocator.ref_count(p) for p in range(self.PAGES)] == counts
        assert self.allocator.num_free == counts.count(0)

    def teardown(self):
        for pages in self.held:
            self.allocator.free(pages)
        assert sorted(self.allocator.alloc(self.PAGES)) == list(range(self.PAGES))


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=200, stateful_step_count=30, deadline=None, derandomize=True)
