"""Wrong tokens: growing pauses, then a lock-out, for each client apart.

One for all clients together would also shut out the owner.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

FIRST_PAUSE_S = 0.5
"""After the first wrong token; each further one doubles it."""
LOCKED_AFTER = 10
"""Wrong tokens in a row after which a client is locked out."""
LOCKED_S = 15 * 60.0
FORGET_S = 24 * 3600.0
"""A client that has given no wrong token for so long begins anew."""
MAX_CLIENTS = 20_000


@dataclass
class _Record:
    wrong: int = 0
    last: float = 0.0
    until: float = 0.0


class Guesses:
    """Who may try a token now.

    Args:
        now: seconds, of a clock that never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def wait_s(self, client: str) -> float:
        """Seconds until this client may try a token; 0 where it may do so now."""
        record = self._records.get(network_of(client))
        return max(0.0, record.until - self._now()) if record else 0.0

    def note_wrong(self, client: str) -> None:
        """This client gave a wrong token."""
        now, network = self._now(), network_of(client)
        record = self._records.pop(network, None)
        if record is None or now - record.last > FORGET_S:
            record = _Record()
        record.wrong, record.last = record.wrong + 1, now
        record.until = now + (LOCKED_S if record.wrong >= LOCKED_AFTER else FIRST_PAUSE_S * 2 ** (record.wrong - 1))
        self._records[network] = record
        while len(self._records) > MAX_CLIENTS:
            self._records.popitem(last=False)

    def note_right(self, client: str) -> None:
        """This client gave the token."""
        self._records.pop(network_of(client), None)


def network_of(client: str) -> str:
    """What counts as one client: an IPv4 address, or the /64 network that a host of IPv6 mostly has for itself."""
    try:
        address = ipaddress.ip_address(client.strip().strip("[]").partition("%")[0])
    except ValueError:
        return client
    if address.version == 6 and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)
