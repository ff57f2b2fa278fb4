"""A stand-in for a tunnel program, since there is no internet here: it prints what the real one prints, with an address
on this machine that forwards to the dashboard.

How it behaves stands in the JSON file that TUNNEL_DOUBLE names, and is read at its start: `mode` is ok, slow, silent,
limited, offline, no-authtoken, unreachable or another's; `seconds` is how long slow takes. It writes its process id and
its arguments into the file's folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path

CLOUDFLARED = {
    "limited": "2026-05-29T09:25:34Z ERR Error unmarshaling QuickTunnel response: error code: 1015 "
    'error="invalid character" status_code="429 Too Many Requests"\n'
    "failed to unmarshal quick Tunnel: invalid character",
    "offline": 'failed to request quick Tunnel: Post "https://api.trycloudflare.com/tunnel": dial tcp: lookup '
    "api.trycloudflare.com: no such host",
}
NGROK = {"no-authtoken": 'lvl=eror msg="failed to auth" err="authentication failed\\r\\n\\r\\nERR_NGROK_4018"'}


async def _forward(target: int, is_open: asyncio.Event) -> int:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(65_536):
                writer.write(piece)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not is_open.is_set():
            writer.close()
            return
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    return int(server.sockets[0].getsockname()[1])


async def _run(name: str, local: str, orders: dict[str, str]) -> int:
    mode, is_open = orders.get("mode", "ok"), asyncio.Event()
    said = (CLOUDFLARED if name == "cloudflared" else NGROK).get(mode)
    if said:
        print(said, flush=True)
        return 1
    if mode == "silent":
        await asyncio.sleep(600)
    port = await _forward(int(local.rsplit(":", 1)[1]), is_open)
    address = "http://127.0.0.1:9" if mode == "unreachable" else orders.get("address", f"http://127.0.0.1:{port}")
    if mode == "slow":
        await asyncio.sleep(float(orders["seconds"]))
    if name == "cloudflared":
        print("2026-05-29T09:25:34Z INF Requesting new quick Tunnel on trycloudflare.com...", flush=True)
        print(f"2026-05-29T09:25:36Z INF |  {address}                                   |", flush=True)
        print("2026-05-29T09:25:37Z INF Registered tunnel connection connIndex=0 protocol=quic", flush=True)
    else:
        print(
            f't=now lvl=info msg="started tunnel" obj=tunnels name=command_line addr={local} url={address}', flush=True
        )
    if mode == "slow":
        # a new name takes a while until it is known everywhere
        await asyncio.sleep(float(orders["seconds"]))
    is_open.set()
    await asyncio.sleep(3600)
    return 0


def main() -> int:
    name, arguments = sys.argv[1], sys.argv[2:]
    orders_file = Path(os.environ["TUNNEL_DOUBLE"])
    with (orders_file.parent / "starts.jsonl").open("a") as starts:
        starts.write(json.dumps({"pid": os.getpid(), "arguments": arguments, "at": time.time()}) + "\n")
    local = next(one for one in arguments if one.startswith("http://"))
    return asyncio.run(_run(name, local, json.loads(orders_file.read_text())))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
