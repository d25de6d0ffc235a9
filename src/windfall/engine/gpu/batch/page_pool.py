"""The pages of a KV cache: which are free, which are shared, and which hold the beginning of a known text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from windfall.kernels.pages import PAGE_TOKENS, UNUSED_PAGE

Prefix = tuple[int, tuple[int, ...]]  # the page before it, or -1, and the tokens of a full page


class PagePool:
    """Gives pages to requests and takes them back.

    A full page whose tokens are known is kept after its last request has ended, until the memory is needed: a later
    request whose prompt begins with the same tokens uses it again. A page is found by its tokens and by the page before
    it, so that all tokens before it are the same, too.
    """

    def __init__(self, pages: int):
        """The page UNUSED_PAGE is never given away."""
        assert pages > 1
        self.pages = pages - 1
        self._free = [page for page in range(pages - 1, -1, -1) if page != UNUSED_PAGE]
        self._users = [0] * pages
        self._prefixes: dict[Prefix, int] = {}
        self._prefix_of: dict[int, Prefix] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # known pages without users, the oldest first
        self._outdated: set[int] = set()  # pages that were in use at the last `clear`, and still are

    @property
    def available(self) -> int:
        """Pages that can be given to a request."""
        return len(self._free) + len(self._unused)

    @property
    def free(self) -> int:
        """Available pages that hold no known text."""
        return len(self._free)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The known pages that hold the beginning of this text; the caller becomes a user of each."""
        found: list[int] = []
        for start in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
            before = found[-1] if found else -1
            page = self._prefixes.get((before, tuple(tokens[start : start + PAGE_TOKENS])))
            if page is None:
                break
            self._use(page)
            found.append(page)
        return found

    def take(self, count: int) -> list[int]:
        """New pages, if there are as many; otherwise none."""
        if count > self.available:
            return []
        taken = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._forget_oldest()
            self._use(page)
            taken.append(page)
        return taken

    def remember(self, tokens: Sequence[int], pages: Sequence[int], start: int = 0) -> None:
        """The pages from number `start` on now hold these tokens of a text, which begins with pages[0]."""
        for number in range(start, len(tokens) // PAGE_TOKENS):
            before = pages[number - 1] if number else -1
            if number and before not in self._prefix_of:
                return  # another page holds the same tokens and is the one that is found
            prefix = before, tuple(tokens[number * PAGE_TOKENS : (number + 1) * PAGE_TOKENS])
            page = pages[number]
            if page in self._outdated:
                return
            if page not in self._prefix_of and prefix not in self._prefixes:
                self._prefixes[prefix], self._prefix_of[page] = page, prefix

    def release(self, pages: Sequence[int]) -> None:
        """A request no longer uses these pages."""
        for page in reversed(pages):  # later pages are forgotten before those that lead to them
            self._users[page] -= 1
            assert self._users[page] >= 0
            if self._users[page]:
                continue
            self._outdated.discard(page)
            if page in self._prefix_of:
                self._unused[page] = None
            else:
                self._free.append(page)

    def clear(self) -> None:
        """Forget all known pages, for instance because the model's weights have changed.

        Those that are in use are not remembered later, either.
        """
        self._free.extend(self._unused)
        self._unused.clear()
        self._prefixes.clear()
        self._prefix_of.clear()
        self._outdated = {page for page, users in enumerate(self._users) if users}

    def _use(self, page: int) -> None:
        self._users[page] += 1
        self._unused.pop(page, None)

    def _forget_oldest(self) -> int:
        page, _ = self._unused.popitem(last=False)
        del self._prefixes[self._prefix_of.pop(page)]
        return page
