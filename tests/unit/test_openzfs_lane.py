"""`./dev test openzfs`: sources of the image, the guest's command line and progress, and the results."""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.openzfs import __main__ as lane
from tests.openzfs import guest, image, steps
from tests.openzfs.steps import Outcome, Step
from tests.support.session import REPOSITORY

_STEPS = [Step("first", ("true",), 60), Step("second", ("true",), 60)]


def test_sources_include_contrib_and_backports() -> None:
    sources = (
        "Types: deb\nURIs: http://mirror/debian\nSuites: bookworm bookworm-updates\nComponents: main\n"
        "\n"
        "Types: deb\nURIs: http://mirror/security\nSuites: bookworm-security\nComponents: main\n"
    )
    assert image.make_zfs_sources(sources) == (
        "Types: deb\nURIs: http://mirror/debian\nSuites: bookworm bookworm-updates bookworm-backports\n"
        "Components: main contrib\n"
        "\n"
        "Types: deb\nURIs: http://mirror/security\nSuites: bookworm-security\nComponents: main contrib\n"
    )


def _make_reader(lines: Sequence[str], *, should_hang: bool = False) -> Callable[[float], str | None]:
    remaining_lines = list(lines)

    def read_line(deadline: float) -> str | None:
        assert deadline > time.monotonic()
        if not remaining_lines and should_hang:
            raise TimeoutError
        return remaining_lines.pop(0) if remaining_lines else None

    return read_line


_LINES = [
    "booting",
    "openzfs-guest: start first",
    "some output",
    "openzfs-guest: end first 0 12",
    "openzfs-guest: start second",
]


@pytest.mark.parametrize("should_hang", [False, True], ids=["panics", "hangs"])
def test_a_guest_that_exits_early_leaves_its_last_step_without_a_status(should_hang: bool) -> None:
    log: list[str] = []
    assert lane.follow_output(_make_reader(_LINES, should_hang=should_hang), _STEPS, log.append) == {"first": (0, 12.0)}
    assert log == [f"{line}\n" for line in _LINES]
    assert not Outcome(_STEPS[1], None, 0.0, {}).is_success


def test_the_console_stops_a_silent_guest(tmp_path: Path) -> None:
    program = "import time; print('one\\r'); print('two', flush=True); time.sleep(600)"
    start_time = time.monotonic()
    with lane.Console([sys.executable, "-c", program], tmp_path) as console:
        assert [console.read_line(start_time + 60), console.read_line(start_time + 60)] == ["one", "two"]
        with pytest.raises(TimeoutError):
            console.read_line(time.monotonic() + 0.01)


def test_the_names_of_disks_contain_no_separators(tmp_path: Path) -> None:
    # Linux separates the arguments with spaces, and the names of a disk's files with commas.
    directory = tmp_path / "a, b" / "run-1" / "0"
    directory.mkdir(parents=True)
    image_directory = tmp_path / "a, b" / "cache" / "openzfs-1"
    guest_image = image.Image(image_directory / "disk", image_directory / "kernel", {})
    command = lane.make_guest_command(guest_image, directory)
    kernel_arguments = command[command.index(str(guest_image.kernel)) + 1 :]
    assert "ubd0=changes,../../cache/openzfs-1/disk" in kernel_arguments
    assert not any(" " in argument for argument in kernel_arguments)


def test_the_results_of_a_guest_stay_in_their_directory(tmp_path: Path) -> None:
    disk, directory = tmp_path / "disk", tmp_path / "results"
    directory.mkdir()
    with tarfile.open(disk, "w") as archive:
        for name in ("./a.xml", "../b.json", "/c.json"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    lane.extract_results(disk, directory)
    assert sorted(path.name for path in directory.iterdir()) == ["a.xml", "b.json", "c.json"]
    disk.write_bytes(bytes(1 << 20))
    lane.extract_results(disk, directory)


def test_results_are_counted(tmp_path: Path) -> None:
    junit_file, conformance_file = tmp_path / "a.xml", tmp_path / "b.json"
    junit_file.write_text(
        "<testsuites><testsuite><testcase/><testcase><skipped/></testcase><testcase><error/></testcase>"
        "<testcase><failure/></testcase><testcase/></testsuite></testsuites>"
    )
    conformance_file.write_text(json.dumps({"tests": {"t1": {"outcome": "passed"}, "t2": {"outcome": "failed"}}}))
    assert steps.count_results(junit_file) == {"passed": 2, "failed": 1, "errors": 1, "skipped": 1}
    assert steps.count_results(conformance_file) == {"passed": 1, "failed": 1}
    assert steps.count_results(tmp_path / "missing.xml") == {}


@pytest.mark.parametrize(
    ("status", "counts", "is_success"),
    [(0, {"passed": 3}, True), (0, {"passed": 0}, False), (0, {}, False), (1, {"passed": 3}, False)],
)
def test_a_step_without_passed_tests_fails(status: int, counts: dict[str, int], is_success: bool) -> None:
    assert Outcome(steps.STEPS[0], status, 1.0, counts).is_success is is_success


def test_the_guests_program_refuses_to_run_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest, "_set_up_system", lambda: pytest.fail("it started"))
    monkeypatch.setattr(guest, "_turn_off", lambda: pytest.fail("it turned the machine off"))
    with pytest.raises(SystemExit, match="only runs as the first process"):
        guest.main()


def test_unknown_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert lane.main(["nonesuch"]) == 2
    assert "unknown step 'nonesuch': use pyzfs, lzc, jail_zfs, engine, or -- COMMAND…" in capsys.readouterr().err


def test_each_step_is_documented() -> None:
    names = [step.name for step in steps.STEPS]
    page = (REPOSITORY / "docs/openzfs.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page.partition("## How it works")[0], re.MULTILINE)
    assert [name for name, _ in rows] == names
    assert f"test openzfs [{'|'.join(names)}]…" in (REPOSITORY / "dev").read_text()
    texts = dict(rows)
    for step in steps.STEPS:
        for folder in (word for word in step.argv if word.startswith("tests/")):
            assert (REPOSITORY / folder).exists() and f"`{folder}" in texts[step.name], folder
