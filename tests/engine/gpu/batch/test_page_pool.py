"""The pages of a KV cache: every page has the right users, and known beginnings are found."""

from __future__ import annotations

import random

import pytest

from windfall.engine.gpu.batch.page_pool import PagePool
from windfall.kernels.pages import PAGE_TOKENS


def text(*pages: int, more: int = 0) -> list[int]:
    """A text of full pages, each filled with one token, and some further tokens."""
    return [token for page in pages for token in [page] * PAGE_TOKENS] + [99] * more


def test_pages_are_given_and_taken_back() -> None:
    pool = PagePool(5)
    one, two = pool.take(3), pool.take(1)
    assert sorted(one + two) == [1, 2, 3, 4] and pool.available == 0
    assert pool.take(1) == []
    pool.release(one)
    assert pool.available == 3 and set(pool.take(3)) == set(one)


def test_a_known_beginning_is_found_until_its_memory_is_needed() -> None:
    pool = PagePool(6)
    mine = pool.take(3)
    pool.remember(text(1, 2, more=5), mine)
    assert pool.find(text(1, 2, 3)) == mine[:2] and pool.find(text(2, 1)) == []
    pool.release(mine)
    pool.release(mine[:2])
    assert pool.available == 5
    taken = pool.take(4)  # one known page must go: the last of the text
    assert mine[1] in taken and mine[0] not in taken
    assert pool.find(text(1, 2)) == mine[:1]


def test_the_same_tokens_after_another_beginning_are_another_page() -> None:
    pool = PagePool(9)
    one, two = pool.take(2), pool.take(2)
    pool.remember(text(1, 7), one)
    pool.remember(text(2, 7), two)
    assert pool.find(text(1, 7)) == one and pool.find(text(2, 7)) == two


def test_a_text_that_is_computed_twice_is_remembered_once() -> None:
    pool = PagePool(9)
    one, two = pool.take(2), pool.take(2)
    pool.remember(text(1, 2), one)
    pool.remember(text(1, 3), two)
    assert pool.find(text(1, 2)) == one and pool.find(text(1, 3)) == one[:1]
    pool.clear()
    assert pool.find(text(1, 2)) == []


def test_pages_in_use_when_all_are_forgotten_are_not_remembered() -> None:
    pool = PagePool(9)
    mine = pool.take(1)
    pool.clear()
    mine += pool.take(1)
    pool.remember(text(1, 2), mine)
    assert pool.find(text(1, 2)) == []
    pool.release(mine)
    assert pool.free == pool.pages
    mine = pool.take(8)
    pool.remember(text(1, 2), mine)
    assert pool.find(text(1, 2)) == mine[:2]


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_leave_nothing_behind(seed: int) -> None:
    chance, pool = random.Random(seed), PagePool(12)
    running: list[list[int]] = []
    content: dict[int, list[int]] = {}  # page → the text up to its end
    for _ in range(600):
        if running and chance.random() < 0.5:
            pool.release(running.pop(chance.randrange(len(running))))
            continue
        wanted = text(*(chance.randrange(3) for _ in range(chance.randrange(4))), more=1)
        known = pool.find(wanted)
        assert all(content[page] == wanted[: (n + 1) * PAGE_TOKENS] for n, page in enumerate(known))
        fresh = pool.take(-(-len(wanted) // PAGE_TOKENS) - len(known))
        if not fresh:
            pool.release(known)
            continue
        running.append(known + fresh)
        content |= {page: wanted[: (n + 1) * PAGE_TOKENS] for n, page in enumerate(running[-1]) if page in fresh}
        pool.remember(wanted, running[-1], len(known))
        assert all(running[-1]) and len(set(running[-1])) == len(running[-1])
    for pages in running:
        pool.release(pages)
    assert pool.available == 11
