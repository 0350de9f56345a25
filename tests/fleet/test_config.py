"""The section [fleet] of the configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway import config
from sandbox_gateway.errors import Invalid

_VALID = {
    "name": '"h1"',
    "address": '"10.0.0.1:8701"',
    "etcd": '["https://10.0.0.1:2379"]',
    "tls_ca": '"/etc/fleet/ca.pem"',
    "tls_cert": '"/etc/fleet/h1.pem"',
    "tls_key": '"/etc/fleet/h1.key"',
    "secret_file": '"/etc/fleet/secret"',
}


def _load(tmp_path: Path, **values: str | None) -> config.Config:
    path = tmp_path / "config.toml"
    pairs = {**_VALID, **values}
    path.write_text("[fleet]\n" + "".join(f"{key} = {value}\n" for key, value in pairs.items() if value is not None))
    return config.load(path)


def test_a_valid_section(tmp_path: Path) -> None:
    settings = _load(tmp_path, etcd='["http://localhost:2379", "https://[fd00::1]:2379"]', labels='{"zone" = "a"}')
    assert settings.fleet is not None
    assert settings.fleet.etcd == ["http://localhost:2379", "https://[fd00::1]:2379"]
    assert settings.fleet.labels == {"zone": "a"}
    assert settings.secret_path == Path("/etc/fleet/secret")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": '"a b"'}, r"fleet\.name: .*'a b'"),
        ({"name": None}, r"fleet\.name: Field required"),
        ({"address": '"10.0.0.1"'}, r"fleet\.address: '10\.0\.0\.1' is not an address: use host:port"),
        ({"address": '"0.0.0.0:8701"'}, r"'0\.0\.0\.0:8701' does not name this host"),
        ({"address": '"[::]:8701"'}, r"does not name this host"),
        ({"listen": '"x:99999"'}, r"fleet\.listen: 'x:99999' is not an address"),
        ({"etcd": "[]"}, r"fleet\.etcd: .*at least 1"),
        ({"etcd": '["10.0.0.1:2379"]'}, r"'10\.0\.0\.1:2379' is not the address of a member of etcd"),
        ({"etcd": '["https://10.0.0.1"]'}, r"is not the address of a member of etcd: use https://host:port"),
        (
            {"etcd": '["https://user:secret@10.0.0.1:1"]'},
            r"^((?!user:secret).)*must not contain passwords((?!user:secret).)*$",
        ),
        ({"etcd": '["http://10.0.0.1:2379"]'}, r"is not encrypted: use https://"),
        ({"prefix": '"fleet"'}, r"fleet\.prefix: "),
        ({"labels": '{"zone" = "a b"}'}, r"fleet\.labels: zone = 'a b' is not a label"),
        ({"tls_key": '"h1.key"'}, r"fleet\.tls_key: 'h1\.key' is not an absolute path"),
        ({"registry": '"x"'}, r"fleet\.registry: unknown key"),
    ],
)
def test_an_invalid_value_is_refused_with_its_key(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        _load(tmp_path, **values)


def test_without_the_section_nothing_of_the_fleet_is_imported(tmp_path: Path) -> None:
    assert config.Config().secret_path == Path("/var/lib/sandbox-gateway/secret")
    code = (
        "import sys; from sandbox_gateway.server.serving import build_openapi_document; build_openapi_document(); "
        "print([name for name in sys.modules if 'fleet' in name or name in ('etcd3gw', 'requests')])"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert output.stdout.strip() == "[]"
