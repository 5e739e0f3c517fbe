"""Pages of the cache, their users, and the prefixes that they hold."""

import collections
import hashlib
import itertools
from collections.abc import Iterable, Sequence

import numpy as np


class PagePool:
    """Pages 1, 2, ... of a cache; page 0 belongs to rows without a sequence.

    A page is free, used by one or more sequences, or idle: no sequence uses it, but it holds a
    prefix that a new one may share. The longest idle page is given away when no page is free. Page
    0 counts too.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = collections.deque(range(1, num_pages))
        self._users = [0] * num_pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def num_available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages that sequences use."""
        return self.num_pages - 1 - self.num_available

    @property
    def num_idle(self) -> int:
        """Pages that hold a prefix and that no sequence uses."""
        return len(self._idle)

    def take(self, count: int) -> list[int] | None:
        """Returns new pages for a sequence; None, and takes none, if there are fewer."""
        if count > self.num_available:
            return None
        return [self._one() for _ in range(count)]

    def _one(self) -> int:
        if self._free:
            page = self._free.popleft()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
        self._users[page] = 1
        return page

    def num_shared(self, keys: Iterable[bytes]) -> int:
        """Returns the number of pages of the longest known prefix of `keys`."""
        return sum(1 for _ in itertools.takewhile(self._page_of.__contains__, keys))

    def has_room(self, count: int, keys: Sequence[bytes], released: Iterable[int]) -> bool:
        """Returns whether a sequence of `count` pages would fit, once others had `released` theirs.
        It shares the pages of the longest known prefix of `keys`."""
        fewer = collections.Counter(released)
        shared = [self._page_of[key] for key in keys[: self.num_shared(keys)]]
        in_use = sum(self._users[page] > fewer[page] for page in shared)
        freed = sum(self._users[page] == uses for page, uses in fewer.items())
        return self.num_available + freed >= count - in_use

    def shared(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the pages of the longest known prefix of `keys`, used by one more sequence."""
        pages = [self._page_of[key] for key in keys[: self.num_shared(keys)]]
        for page in pages:
            self._idle.pop(page, None)
            self._users[page] += 1
        return pages

    def publish(self, page: int, key: bytes) -> None:
        """Offers a page that is full. Of two pages with one key, the first is offered."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def release(self, pages: Sequence[int]) -> None:
        """Takes pages back from a sequence. The end of a prefix is given away before its start."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0 and page in self._key_of:
                self._idle[page] = None
            elif self._users[page] == 0:
                self._free.append(page)

    def forget(self) -> None:
        """Forgets all prefixes, as new weights make them wrong."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._key_of.clear()
        self._page_of.clear()


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the key of a full page: a digest of its tokens and of all before them. `parent` is
    the key of the page before; of the first page, what else decides its content."""
    return hashlib.blake2b(parent + np.asarray(tokens, np.int64).tobytes(), digest_size=16).digest()
