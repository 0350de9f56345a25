"""The gateway supports only HTTP/1.1; E2B's client offers HTTP/2 over TLS and accepts HTTP/1.1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.certificates import create_certificate
from tests.support.memory_gateway import ADMIN_KEY, MemoryGateway

_CLIENT_SCRIPT = """
import json, sys
import e2b
options = json.loads(sys.argv[1])
box = e2b.Sandbox.create(template="base", **options)
print(box.is_running(), box.kill(), box.is_running())
"""


def test_the_e2b_client_accepts_http_1_1(tmp_path: Path) -> None:
    certificate, key = create_certificate(tmp_path)
    gateway = MemoryGateway(tmp_path, server={"tls_cert": str(certificate), "tls_key": str(key)})
    try:
        gateway.build_template("base", packages=["python3"])
        url = f"https://localhost:{gateway.port}"
        options = {"api_key": ADMIN_KEY, "api_url": url, "sandbox_url": url, "http_version": "2"}
        result = subprocess.run(
            [sys.executable, "-c", _CLIENT_SCRIPT, json.dumps(options)],
            env=os.environ | {"SSL_CERT_FILE": str(certificate)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.stdout.split() == ["True", "True", "False"], result.stderr
    finally:
        gateway.end()
