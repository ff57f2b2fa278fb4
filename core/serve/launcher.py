"""Keeps the dashboard and its tunnel alive until it is told to end.

One thread looks after both. What died is started again after pauses that double; what never came up in the first place
is given up after some tries, since then something has to be mended by a person.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from core.errors import ServeError
from core.serve.knock import is_ours, link_of, shows_page
from core.serve.server import Place, Server
from core.serve.status import Status, write_status
from core.serve.tunnels import Tunnel, TunnelKind

POLL_S = 0.2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
SETTLED_S = 300.0
"""What has lived so long begins with the first pause again when it dies."""
FIRST_TRIES = 4
"""Tries after which a tunnel that never opened is given up."""
ADDRESS_S = 45.0
"""How long a tunnel may take to name its address and connect."""
REACH_S = 90.0
"""How long a public address may take until it answers: its name has to spread."""
SPREAD_S = 3.0
"""How long a new name is given to spread before it is first asked for."""
LOOK_S = 20.0
"""Between two looks at the public address."""
MISSED_LOOKS = 3
"""Looks in a row that may fail, with the dashboard itself answering, before the tunnel counts as dead."""
BUSY_S = 60.0
"""A dashboard that lives and doesn't answer for so long is told of; it is not killed, since it may be training."""


class _Pauses:
    """Pauses that double, until something has lived for a while.

    Attributes:
        tries: how many there were since then.
    """

    def __init__(self) -> None:
        self.tries, self._began = 0, 0.0
        self._until: float | None = None

    def begin(self) -> None:
        """It is started now."""
        self._began, self._until = time.monotonic(), None

    def plan_s(self) -> float:
        """It died: the seconds until it may be started again."""
        if self._began and time.monotonic() - self._began > SETTLED_S:
            self.tries = 0
        pause_s: float = min(FIRST_PAUSE_S * 2**self.tries, LONGEST_PAUSE_S)
        self.tries, self._until = self.tries + 1, time.monotonic() + pause_s
        return pause_s

    @property
    def is_planned(self) -> bool:
        """Whether a pause has begun since the last start."""
        return self._until is not None

    @property
    def is_over(self) -> bool:
        """Whether it may be started."""
        return self._until is None or time.monotonic() >= self._until


@dataclass
class Launcher:
    """The dashboard and its tunnel.

    Args:
        kind: of the tunnel; None without one.
        tell: gets a line for a person.
        show: gets the status when the dashboard can be opened, each time at a new address.
        is_over: whether to end now.
    """

    place: Place
    kind: TunnelKind | None
    tell: Callable[[str], None]
    show: Callable[[Status], None]
    is_over: Callable[[], bool]
    _server: Server | None = None
    _tunnel: Tunnel | None = None
    _shown: str | None = None
    _is_open: bool = False
    _server_pauses: _Pauses = field(default_factory=_Pauses)
    _tunnel_pauses: _Pauses = field(default_factory=_Pauses)
    _missed: int = 0
    _next_look: float = 0.0
    _silent_since: float | None = None

    def run(self) -> None:
        """Start both, and keep them until the end is asked for; both are ended whatever happens.

        Raises:
            ServeError: one of them never came up.
        """
        self._write("starting")
        problem: ServeError | None = None
        try:
            while not self.is_over():
                if self._keep_server() and self._keep_tunnel():
                    self._look()
                time.sleep(POLL_S)
        except ServeError as error:
            problem = error
            raise
        finally:
            # each is ended though a second Ctrl-C breaks off the waiting for the one before
            with ExitStack() as last:
                last.callback(lambda: self._write("trouble" if problem else "ended", problem))
                if self._server is not None:
                    last.callback(self._server.stop)
                self._end_tunnel()

    # The server

    def _keep_server(self) -> bool:
        """Whether the dashboard is up."""
        if self._server is None:
            self._server = Server(self.place)
            self._server.wait(self.is_over)
        elif self._server.lives:
            return True
        elif not self._server_pauses.is_planned:
            pause_s = self._server_pauses.plan_s()
            self._told(self._server.why(), f"It is started again in {pause_s:.0f} s.")
        elif self._server_pauses.is_over:
            self._restart_server()
        return self._server.lives and not self.is_over()

    def _restart_server(self) -> None:
        self._server_pauses.begin()
        self._server = Server(self.place)
        try:
            self._server.wait(self.is_over)
        except ServeError:
            if self._server.is_final:
                raise
            self._server.stop()
            return
        self._silent_since = None
        if not self.is_over():
            self.tell("The dashboard is up again.")
            self._write("ready" if self._is_open else "starting")

    # The tunnel

    def _keep_tunnel(self) -> bool:
        """Whether the dashboard can be reached as it should."""
        if self.kind is None:
            if self._shown is None:
                self._is_open = True
                self._ready("")
            return True
        if self._tunnel is None:
            if not self._tunnel_pauses.is_over:
                return False
            self._tunnel_pauses.begin()
            log = self.place.home / "tunnel.log"
            self._tunnel = Tunnel(self.kind, self.place.local, self._tunnel_pauses.tries, log)
        elif not self._tunnel.lives:
            self._gone(self._tunnel.why())
            return False
        if not self._is_open:
            try:
                address = self._opened(self._tunnel)
            except ServeError as error:
                self._gone(error)
                return False
            if address:
                self._is_open, self._missed, self._next_look = True, 0, time.monotonic() + LOOK_S
                self._ready(address)
        return self._is_open

    def _opened(self, tunnel: Tunnel) -> str:
        """The public address, once our page answers there; "" where the end is asked for or the server dies meanwhile.

        Raises:
            ServeError: there is no address, or it doesn't answer.
        """
        deadline = time.monotonic() + ADDRESS_S
        while not tunnel.address:
            if not tunnel.lives or time.monotonic() > deadline:
                raise tunnel.why()
            if self._should_leave():
                return ""
            time.sleep(POLL_S)
        address, deadline = tunnel.address, time.monotonic() + REACH_S
        if address.startswith("https"):
            # a name that is asked for too early is remembered, for minutes, as one that isn't there
            time.sleep(SPREAD_S)
        while not (is_ours(address, self.place.instance) and shows_page(address, self.place.token)):
            if not tunnel.lives:
                raise tunnel.why()
            if self._should_leave():
                return ""
            if time.monotonic() > deadline:
                raise ServeError(
                    f"The address {address} does not lead to the dashboard after {REACH_S:.0f} s.",
                    fix="Try again, or take another --tunnel.",
                )
            time.sleep(1.0)
        return address

    def _should_leave(self) -> bool:
        return self.is_over() or self._server is None or not self._server.lives

    def _gone(self, why: ServeError) -> None:
        """The tunnel is no more; it gets another try, unless it never opened in all its tries."""
        tunnel = self._tunnel
        self._end_tunnel()
        pause_s = self._tunnel_pauses.plan_s()
        never_opened = self._shown is None
        if never_opened and ((tunnel and tunnel.is_final) or self._tunnel_pauses.tries >= FIRST_TRIES):
            raise why
        self._told(why, f"The tunnel is opened again in {pause_s:.0f} s.")

    def _end_tunnel(self) -> None:
        if self._tunnel is not None:
            self._tunnel.stop()
            self._tunnel, self._is_open = None, False

    # Looking after both

    def _look(self) -> None:
        """Look now and then whether the dashboard can be reached."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_S
        assert self._server is not None
        if not self._server.answers():
            self._silent_since = self._silent_since or time.monotonic()
            if time.monotonic() - self._silent_since > BUSY_S:
                self.tell("The dashboard does not answer; it may be busy. It is left alone.")
                self._silent_since = time.monotonic()
            return
        self._silent_since = None
        if self._tunnel is None or is_ours(self._tunnel.address, self.place.instance):
            self._missed = 0
            return
        self._missed += 1
        if self._missed >= MISSED_LOOKS:
            self._gone(ServeError(f"The address {self._tunnel.address} does not answer any more.", fix=""))

    def _ready(self, address: str) -> None:
        if self._shown is not None and address != self._shown:
            self.tell("The dashboard has a new address; open pages have to be opened there.")
        self._shown = address
        status = self._write("ready")
        self.show(status)

    def _told(self, why: ServeError, then: str) -> None:
        self.tell(f"{why} {then}".replace("  ", " "))
        self._write("trouble", why)

    def _write(self, state: str, why: ServeError | None = None) -> Status:
        address = (self._shown or "") if state == "ready" else ""
        is_up = state != "ended" and self._server is not None and self._server.lives
        status = Status(
            state,
            address=address,
            link=link_of(address, self.place.token) if address else "",
            local=link_of(self.place.local, self.place.token) if is_up else "",
            problem=why.problem if why else "",
            fix=why.fix if why else "",
        )
        write_status(self.place.home, status)
        return status


def new_home(home: Path) -> None:
    """Make the home folder where it is missing.

    Raises:
        ServeError: it can't be made or written.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        write_status(home, Status("starting"))
    except OSError as error:
        raise ServeError(
            f"The home folder '{home}' can't be used: {error.strerror or error}.", fix="Choose another --home."
        ) from error
