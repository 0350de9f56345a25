"""Read and write each object's record, which is a file in the object's directory."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from sandbox_gateway.hosts.kvm_xfs.commit_protocol import PARTIAL_PREFIX, sync_directory
from sandbox_gateway.records import AnyRecord, NewerFormat, Record, parse_record
from sandbox_gateway.validation import explain

MANIFEST = "manifest.json"


def read_record(directory: Path, kind: type[AnyRecord]) -> AnyRecord:
    """Read the record in a directory.

    Raises NewerFormat if only a newer release can read the record, and ValueError, with the reason, if it is missing or
    damaged.
    """
    try:
        with open(f"{directory}/{MANIFEST}", "rb", buffering=0) as file:  # noqa: PTH123 - faster for thousands of files
            return parse_record(kind, _parse_json(file.readall()))
    except FileNotFoundError:
        raise ValueError("it has no manifest") from None
    except ValidationError as error:
        raise ValueError(f"its manifest cannot be read: {explain(error)[:500]}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"its manifest cannot be read: {error}") from None


def _parse_json(text: bytes) -> Any:
    """Parse JSON. Equal strings, such as the keys of many records, become the same object, which saves memory."""
    try:
        return from_json(text, cache_strings="all")
    except ValueError:
        return json.loads(text)  # This parser is slightly more lenient, and its messages are more detailed.


class RecordReader:
    """Reads each record only once per scan, although the scan uses it twice.

    Before changing anything, a scan checks for records written by a newer release. Later, it uses the records
    themselves.
    """

    def __init__(self) -> None:
        self._results: dict[tuple[str, type], Any] = {}
        """Records or exceptions, by directory and kind."""

    def find_newer_records(self, directories: Iterable[Path], kind: type[AnyRecord]) -> dict[str, str]:
        """Return the paths of the manifests that only a newer release can read, with the reasons.

        Keeps the results for all other directories, for use by ``read``.
        """
        reasons = {}
        for directory in directories:
            try:
                result: AnyRecord | Exception = read_record(directory, kind)
            except NewerFormat as error:
                reasons[f"{directory}/{MANIFEST}"] = str(error)
                continue
            except ValueError as error:
                # The record is damaged or was never committed, which `read` reports to the scan.
                result = error.with_traceback(None)
            self._results[str(directory), kind] = result
        return reasons

    def read(self, directory: Path, kind: type[AnyRecord]) -> AnyRecord:
        """Return the record in a directory, like ``read_record``.

        A result that ``find_newer_records`` kept is used only once. The next call reads the record again.
        """
        result = self._results.pop((str(directory), kind), None)
        if isinstance(result, Exception):
            raise result
        return result if isinstance(result, kind) else read_record(directory, kind)


def write_record(directory: Path, record: Record, *, durable: bool = True) -> None:
    """Write the record of a directory atomically: after a crash, either the old or the new record exists.

    If not ``durable``, this holds only for a crash of this process, not of the host.
    """
    text = json.dumps(record.model_dump(mode="json"), indent=1)
    temporary_file = directory / f"{PARTIAL_PREFIX}{MANIFEST}"
    with temporary_file.open("w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary_file.rename(directory / MANIFEST)
    if durable:
        sync_directory(directory)


def unlink_record(directory: Path) -> None:
    """Remove the record in ``directory``, so that its object no longer exists. The files may be removed later."""
    with contextlib.suppress(FileNotFoundError):
        (directory / MANIFEST).unlink()
        sync_directory(directory)


def has_record(directory: Path) -> bool:
    return (directory / MANIFEST).exists()
