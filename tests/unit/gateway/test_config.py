"""Tests for reading the configuration file: every error names the invalid key."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_gateway.config import load
from sandbox_gateway.errors import Invalid


def load_config(tmp_path: Path, text: str) -> object:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return load(path)


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert load_config(tmp_path, "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[server]\nsokcet = 'x'", "server.sokcet: unknown key"),
        ("[network]\nsubnet = '10.0.0.0/30'", "network.subnet: the subnet must be /28 or larger"),
        ("[network]\nsubnet = 'here'", "network.subnet"),
        ("[limits]\nconcurrency = 0", "limits.concurrency"),
        ("[host]\nkind = 'vmware'", "host.kind"),
        ("not toml", "cannot be read"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(Invalid, match=expected.replace(".", r"\.")):
        load_config(tmp_path, text)


def test_a_missing_file_is_reported_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="--config"):
        load(tmp_path / "nowhere.toml")
