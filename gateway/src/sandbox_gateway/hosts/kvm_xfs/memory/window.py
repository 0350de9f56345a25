"""The window of a machine's marks: the pages that it may have written since which image.

A capture writes only pages that may differ from a base, an image of the machine's memory at an earlier instant. That
is the image of its latest capture, or else the image it was started from. A machine's directory contains

    memory.base         the image it was started from
    memory.last         the image of its latest capture: a hard link, so it outlives the snapshot
    memory.last.json    an `ImageCheck` of memory.last
    memory.taken        exists while marks were taken whose pages are in no image yet

None of these files needs to survive a crash of the host, because the machine does not.
"""

from __future__ import annotations

import errno
from pathlib import Path
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from sandbox_gateway.hosts.kvm_xfs.image.layout import Instance
from sandbox_gateway.hosts.kvm_xfs.memory import image_check, listing
from sandbox_gateway.hosts.kvm_xfs.memory.image_check import ImageCheck
from sandbox_gateway.hosts.kvm_xfs.memory.ram import Ram
from sandbox_gateway.hosts.kvm_xfs.memory.runs import Runs, empty, union
from sandbox_gateway.hosts.kvm_xfs.memory.tracker_client import TrackerClient
from sandbox_gateway.hosts.kvm_xfs.qemu.machine import Machine
from sandbox_gateway.records import Memory

LADDER = (Memory.WRITTEN, Memory.SOFT_DIRTY, Memory.COMPARE, Memory.INCREMENTAL, Memory.FULL)
"""The modes, best first. A capture uses the first one that works."""

_LISTERS = {Memory.WRITTEN: listing.list_written, Memory.SOFT_DIRTY: listing.list_soft_dirty}


class Windows:
    """The windows of running machines. ``best``: the best mode to use."""

    def __init__(self, tracker: TrackerClient, best: Memory) -> None:
        self._tracker = tracker
        self._best = best
        self._windows: WeakKeyDictionary[Machine, Window] = WeakKeyDictionary()

    def window_of(self, machine: Machine, boot_check: ImageCheck | None) -> Window:
        if machine not in self._windows:
            self._windows[machine] = Window(machine.files, self._tracker, self._best, boot_check)
        return self._windows[machine]


class Window:
    """The marks of one machine, for as long as a gateway watches it. Its captures must not overlap.

    ``best``: the best mode to use. ``boot_check``: describes the image it was started from, if that is known.
    """

    def __init__(self, files: Instance, tracker: TrackerClient, best: Memory, boot_check: ImageCheck | None) -> None:
        self._boot = files.memory
        self._last = files.directory / "memory.last"
        self._last_check = files.directory / "memory.last.json"
        self._note = files.directory / "memory.taken"
        self._tracker = tracker
        self._best = best
        self._boot_check = boot_check
        self._certain = not self._note.exists()
        """Whether the marks and ``_owed`` cover every page that differs from the latest image."""
        self._owed = empty()
        """Pages whose marks were taken by a capture that has not completed."""
        self._marks: Memory | None = None
        """The kind of marks in use."""
        self._trust_marks = False
        self._is_ours = False
        """Whether this gateway started the tracking."""
        self.mode = Memory.FULL
        self.base: Path | None = None
        """The image to start from. None: an empty one."""
        self.reason = ""
        """Why the mode is not the best one; empty if it is."""

    def begin(self, ram: Ram) -> Runs:
        """Choose mode and base of a capture; return the pages that it would list now. The machine may run."""
        self.reason = ""
        self._marks = self._start_marks(ram)
        base_is_latest = self._choose_base()
        self._trust_marks = self._marks is not None and base_is_latest and self._certain
        if self._marks is not None and self._trust_marks:
            self.mode = self._marks
        elif self.base == self._last:
            self.mode = Memory.COMPARE
        elif self.base is not None and self._allows(Memory.INCREMENTAL):
            self.mode = Memory.INCREMENTAL
        else:
            self.mode, self.base = Memory.FULL, None
        if self._marks is not None and not self._certain:
            self._explain("an earlier capture was interrupted")
        try:
            return self._list(ram, take=False)
        except OSError as error:
            self._explain(f"the kernel does not report the written pages ({error.strerror})")
            self.mode, self.base, self._marks, self._trust_marks = Memory.FULL, None, None, False
            return ram.everything()

    @property
    def has_marks(self) -> bool:
        """Whether the pages written between two listings of a capture can be listed."""
        return self._marks is not None

    @property
    def takes_atomically(self) -> bool:
        """Whether a running machine's marks can be taken: no write falls between listing and taking."""
        return self._marks is Memory.WRITTEN

    def take(self, ram: Ram, *, again: bool = False) -> Runs:
        """List the pages that may differ from the base, and take their marks.

        The machine must be stopped unless ``takes_atomically``. Pages with I/O in flight are listed, but not marked
        when it writes.

        ``again``: list only the pages written since this capture's previous call, which needs marks.
        """
        if self._marks is None:
            return self._list(ram, take=False)
        # If this process ends before the capture completes, nobody knows whose marks were taken.
        self._note.touch(mode=0o600)
        if again:
            self._trust_marks = True
        found = self._list(ram, take=True)
        self._owed = union(self._owed, found)
        return found if again else self._owed

    def list_since_taken(self, ram: Ram) -> Runs:
        """Return the pages written since the last ``take``, which needs marks, and leave their marks."""
        assert self._marks is not None
        return _LISTERS[self._marks](ram, take=False)

    def complete(self, image: Path) -> ImageCheck:
        """End a capture, and describe ``image``, which holds the memory at the instant of the last listing."""
        check = image_check.describe(image)
        fresh = self._last.with_name("memory.last.fresh")
        fresh.unlink(missing_ok=True)
        fresh.hardlink_to(image)
        self._last_check.unlink(missing_ok=True)
        fresh.rename(self._last)
        self._last_check.write_text(check.model_dump_json())
        self._note.unlink(missing_ok=True)
        self._owed, self._certain = empty(), True
        return check

    def _allows(self, mode: Memory) -> bool:
        return LADDER.index(mode) >= LADDER.index(self._best)

    def _explain(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _start_marks(self, ram: Ram) -> Memory | None:
        """Have the kernel mark written pages; return the kind of marks, or None."""
        if self._allows(Memory.WRITTEN):
            try:
                self._track(ram)
                return Memory.WRITTEN
            except OSError as error:
                self._explain(str(error))
        if self._allows(Memory.SOFT_DIRTY):
            if listing.has_soft_dirty():
                return Memory.SOFT_DIRTY
            self._explain("the kernel has no soft-dirty bits")
        return None

    def _track(self, ram: Ram) -> None:
        if not listing.is_tracked(ram):
            self._tracker.track(ram.pid, ram.areas)
            self._is_ours = True
        elif not self._is_ours and not self._has_captured():
            # An earlier gateway tracked it, and its files are gone.
            self._certain = False
        if not listing.is_tracked(ram):
            raise OSError(errno.ENOSYS, "the kernel does not track writes to private mappings (Linux 6.7)")

    def _has_captured(self) -> bool:
        return self._last.exists() or self._last_check.exists()

    def _choose_base(self) -> bool:
        """Set ``base`` to an intact image; return whether it is the latest, to which the marks refer."""
        if self._allows(Memory.COMPARE) and self._has_captured():
            damage = self._find_damage_of_last()
            if not damage:
                self.base = self._last
                return True
            self._explain(damage)
        damage = image_check.find_damage(self._boot, self._boot_check) if self._boot_check else ""
        if damage:
            self._explain(damage)
        self.base = None if damage else self._boot
        return not damage and not self._has_captured()

    def _find_damage_of_last(self) -> str:
        try:
            check = ImageCheck.model_validate_json(self._last_check.read_bytes())
        except (OSError, ValidationError):
            return f"{self._last_check.name} is missing or damaged"
        return image_check.find_damage(self._last, check)

    def _list(self, ram: Ram, *, take: bool) -> Runs:
        marked = empty()
        if self._marks is not None and (take or self._trust_marks):
            marked = _LISTERS[self._marks](ram, take=take)
        if self._trust_marks:
            return marked
        # After the marks were taken: a page that is written in between is listed or marked.
        return ram.everything() if self.mode is Memory.FULL else listing.list_anonymous(ram)
