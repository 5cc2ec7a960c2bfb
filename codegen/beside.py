"""Which launches of a step may run beside each other, and so which buffers may share memory then.

A graph of a GPU runs launches on several streams (runtime/lanes.py); a buffer that took the place
of one that is still read elsewhere would make it wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tilewright.codegen.buffers import Lifetime


class Order:
    """What must come before what, by the values that launches share.

    `uses`: the values of each launch, in the order of launches; the first that names a value writes
    it. `kept`: states and outputs, which any launch may write.
    """

    def __init__(self, uses: Sequence[Collection[str]], kept: Collection[str]) -> None:
        self._users: dict[str, int] = {}  # launches that name a value, as bits
        self._before: list[int] = []
        for index, names in enumerate(uses):
            before = 0
            for name in names:
                users = self._users.get(name, 0)
                for other in _bits(users if name in kept else users & -users):
                    before |= self._before[other] | 1 << other
                self._users[name] = users | 1 << index
            self._before.append(before)

    def clash(self, a: Lifetime, b: Lifetime) -> bool:
        """Whether two buffers must not share memory: neither is done before the other begins."""
        return not (self._is_done(a, b.first) or self._is_done(b, a.first))

    def _is_done(self, buffer: Lifetime, launch: int) -> bool:
        return not self._users[buffer.name] & ~self._before[launch]


def _bits(number: int) -> list[int]:
    found = []
    while number:
        low = number & -number
        found.append(low.bit_length() - 1)
        number ^= low
    return found
