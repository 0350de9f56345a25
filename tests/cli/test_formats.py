"""Test the parsing and formatting of sizes, durations, pairs and lists."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from sandbox_gateway.cli import formats
from sandbox_gateway.cli.failure import Failure


@pytest.mark.parametrize(
    ("text", "mib"), [("512", 512), ("512M", 512), ("4g", 4096), ("1.5GiB", 1536), ("1 TB", 1 << 20), ("0", 0)]
)
def test_sizes_are_parsed(text: str, mib: int) -> None:
    assert formats.parse_size(text) == mib


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("1d", 86400), ("never", -1)],
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert formats.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "-4", "4K", "x", "1e3", "4GM"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(Failure, match="is not a size"):
        formats.parse_size(text)


@pytest.mark.parametrize("text", ["", "-4", "soon", "1w", "1h30m"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(Failure, match="is not a duration"):
        formats.parse_duration(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200_000, "195 KiB"), (5 << 30, "5.0 GiB"), (3 << 41, "6.0 TiB")],
)
def test_sizes_are_formatted(count: int, text: str) -> None:
    assert formats.format_size(count) == text


def test_ages_and_remaining_times_are_formatted() -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    for length, text in ((5, "5 s"), (119, "119 s"), (600, "10 m"), (7200, "2 h"), (400_000, "4 d")):
        assert formats.format_age((now - timedelta(seconds=length)).isoformat(), now) == text
        assert formats.format_time_left((now + timedelta(seconds=length)).isoformat(), now) == f"ends in {text}"
    assert formats.format_time_left("9999-01-01T00:00:00Z", now) == "never ends"
    assert formats.format_time_left("2020-01-01T00:00:00Z", now) == "ending"


def test_pairs_and_lists_are_parsed() -> None:
    assert formats.parse_pairs(["a=1", "b=x=y", "c="], "x") == {"a": "1", "b": "x=y", "c": ""}
    assert formats.split_list(["a,b", " c ", ",d,"]) == ["a", "b", "c", "d"]
    for invalid_text in ("a", "=1"):
        with pytest.raises(Failure):
            formats.parse_pairs([invalid_text], "x")
