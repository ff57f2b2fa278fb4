"""A viewer of the live page without a browser: it speaks Streamlit's own protocol, and polls the charts' route."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import urlopen

import psutil
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.sync.client import connect

WAIT_S = 60.0


class Viewer(AbstractContextManager["Viewer"]):
    """Has the live page open, and refreshes it as fast as the server answers where a browser does so once a second.

    Args:
        url: of a dashboard.
        run_id: the run to look at.
    """

    def __init__(self, url: str, run_id: str) -> None:
        self._socket = connect(
            url.replace("http", "ws", 1) + "/_stcore/stream",
            subprotocols=["streamlit"],  # type: ignore[list-item]
            origin=url,  # type: ignore[arg-type]
            max_size=None,
        )
        self._route = f"{url}/api/runs/{run_id}/series?after="
        self._cursor = ""
        self.fragments: dict[str, None] = {}
        page = BackMsg()
        page.rerun_script.page_name = "live"
        page.rerun_script.query_string = f"run={run_id}"
        self.page_bytes = self._run(page)

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def poll(self) -> tuple[dict[str, Any], int]:
        """What is new in the charts since the last poll, and how many bytes it took."""
        body = urlopen(self._route + quote(self._cursor), timeout=WAIT_S).read()
        told: dict[str, Any] = json.loads(body)
        self._cursor = told["cursor"]
        return told, len(body)

    def refresh(self) -> int:
        """Have all that refreshes by itself drawn anew, and return how many bytes came."""
        count = 0
        for fragment in self.fragments:
            again = BackMsg()
            again.rerun_script.page_name = "live"
            again.rerun_script.fragment_id = fragment
            again.rerun_script.is_auto_rerun = True
            count += self._run(again)
        return count

    def _run(self, message: BackMsg) -> int:
        self._socket.send(message.SerializeToString())
        count = 0
        while True:
            raw = self._socket.recv(WAIT_S)
            assert isinstance(raw, bytes)
            count += len(raw)
            told = ForwardMsg.FromString(raw)
            if told.WhichOneof("type") == "auto_rerun":
                self.fragments[told.auto_rerun.fragment_id] = None
            if told.WhichOneof("type") == "script_finished":
                return count


def server_of(url: str) -> psutil.Process:
    """The dashboard's process, a child of this one."""
    port = f"--server.port={urlsplit(url).port}"
    return next(child for child in psutil.Process().children() if port in child.cmdline())
