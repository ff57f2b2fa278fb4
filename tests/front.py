"""nginx in front of a dashboard, with another host name and https, as a plain cloud machine has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.browser import free_port

HOST = "train.example"
needs_nginx = pytest.mark.skipif(
    shutil.which("nginx") is None and os.environ.get("CI") != "true", reason="nginx is not there"
)
_CONFIG = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; worker_processes 1;
events {{ worker_connections 256; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  map $http_upgrade $connection_upgrade {{ default upgrade; '' close; }}
  server {{
    listen 127.0.0.1:{port} ssl; server_name {host};
    ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem;
    client_max_body_size 0;
    location / {{
      proxy_pass {inner}; proxy_http_version 1.1; proxy_request_buffering off; proxy_buffering off;
      proxy_set_header Host $http_host;
      proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
      proxy_set_header X-Forwarded-Proto $scheme;
      proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection $connection_upgrade;
    }}
  }}
}}
"""


@contextmanager
def nginx(folder: Path, inner: str) -> Iterator[str]:
    """Run nginx before `inner`; yields its address, whose name only `chromium_page(HOST)` knows."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    subject = ["-subj", f"/CN={HOST}", "-addext", f"subjectAltName=DNS:{HOST}"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(command, check=True, capture_output=True)
    config = folder / "nginx.conf"
    config.write_text(_CONFIG.format(folder=folder, port=port, host=HOST, inner=inner))
    process = subprocess.Popen(["nginx", "-p", str(folder), "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while not (folder / "nginx.pid").exists():
            assert process.poll() is None and time.monotonic() < deadline, "nginx does not start"
            time.sleep(0.05)
        yield f"https://{HOST}:{port}"
    finally:
        process.terminate()
        process.wait(10)
