"""Certificates for tests that use TLS."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


def create_certificate(directory: Path) -> tuple[Path, Path]:
    """Create a self-signed certificate for localhost, and return the paths of the certificate and its key."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-addext", "basicConstraints=critical,CA:FALSE", "-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return cert, key


@dataclass(frozen=True)
class Certificate:
    """The files of a certificate, and of the authority that has signed it."""

    ca: Path
    cert: Path
    key: Path

    def create_client_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        context.load_cert_chain(self.cert, self.key)
        return context


class Authority:
    """A certificate authority, whose certificates are for 127.0.0.1 by default."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._issued: dict[str, Certificate] = {}
        self._ca, self._key = directory / f"{name}.pem", directory / f"{name}.key"
        key_options = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1")
        _run_openssl(
            *("req", "-x509", *key_options, "-subj", f"/CN={name}", "-keyout", str(self._key), "-out", str(self._ca)),
            *("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"),
        )

    def get(self, name: str) -> Certificate:
        """Return the certificate that was issued under this name, or issue it."""
        if name not in self._issued:
            self._issued[name] = self.issue(name)
        return self._issued[name]

    def issue(self, name: str, address: str = "127.0.0.1") -> Certificate:
        """Create a certificate for a server and a client at an IP address."""
        cert, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        _run_openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"),
            *("-CA", str(self._ca), "-CAkey", str(self._key), "-subj", f"/CN={name}"),
            *("-addext", f"subjectAltName=IP:{address}", "-addext", "basicConstraints=critical,CA:FALSE"),
            *("-keyout", str(key), "-out", str(cert)),
        )
        return Certificate(self._ca, cert, key)


def _run_openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
