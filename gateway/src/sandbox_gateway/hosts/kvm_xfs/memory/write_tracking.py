"""Keep track of which pages a machine may have written since an earlier image of its memory.

A capture writes only pages that may differ from a base: an image of the machine's memory at an earlier time. The
base is the image of the machine's latest capture, or else the image that the machine was started from.
`InstanceFiles` lists these files. None of them needs to survive a crash of the host, because the machine does not
survive it either.
"""

from __future__ import annotations

import errno
from pathlib import Path
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from sandbox_gateway.hosts.kvm_xfs.files import held_images
from sandbox_gateway.hosts.kvm_xfs.files.layout import InstanceFiles, MemoryDirectory
from sandbox_gateway.hosts.kvm_xfs.memory import image_check, listing
from sandbox_gateway.hosts.kvm_xfs.memory.image_check import ImageCheck
from sandbox_gateway.hosts.kvm_xfs.memory.page_runs import Runs, create_empty_runs, union
from sandbox_gateway.hosts.kvm_xfs.memory.ram import Ram
from sandbox_gateway.hosts.kvm_xfs.memory.tracker_client import TrackerClient
from sandbox_gateway.hosts.kvm_xfs.qemu.machine import Machine
from sandbox_gateway.records import MemoryMode

MODES_BEST_FIRST = (
    MemoryMode.WRITTEN,
    MemoryMode.SOFT_DIRTY,
    MemoryMode.COMPARE,
    MemoryMode.INCREMENTAL,
    MemoryMode.FULL,
)
"""The memory modes, best first. A capture uses the first mode that works."""

_LISTERS = {MemoryMode.WRITTEN: listing.list_written_pages, MemoryMode.SOFT_DIRTY: listing.list_soft_dirty_pages}


class WriteTrackingRegistry:
    """Manages the write tracking of all running machines. ``best_mode`` is the best mode that captures may use."""

    def __init__(self, tracker: TrackerClient, best_mode: MemoryMode) -> None:
        self._tracker = tracker
        self._best_mode = best_mode
        self._machines: WeakKeyDictionary[Machine, WriteTracking] = WeakKeyDictionary()

    def get(self, machine: Machine, boot_check: ImageCheck | None) -> WriteTracking:
        if machine not in self._machines:
            self._machines[machine] = WriteTracking(machine.files, self._tracker, self._best_mode, boot_check)
        return self._machines[machine]


class WriteTracking:
    """Manages the marks of one machine while this gateway watches it. Captures of the machine must not overlap.

    ``best_mode`` is the best mode that captures may use. ``boot_check`` is the check data of the image that the machine
    was started from, if it is known.
    """

    def __init__(
        self, files: InstanceFiles, tracker: TrackerClient, best_mode: MemoryMode, boot_check: ImageCheck | None
    ) -> None:
        self._boot_image = files.memory
        self._last_image = files.last_memory
        self._last_check = files.last_memory_check
        self._taken_marker = files.taken_marker
        self._tracker = tracker
        self._best_mode = best_mode
        self._boot_check = boot_check
        self._marks_are_complete = not self._taken_marker.exists()
        """Whether the marks and ``_unsaved_pages`` cover every page that differs from the latest image."""
        self._unsaved_pages = create_empty_runs()
        """Pages whose marks were taken by a capture that has not completed."""
        self._marks: MemoryMode | None = None
        """The kind of mark in use."""
        self._can_trust_marks = False
        self._has_started_tracking = False
        """Whether this gateway, not an earlier one, started the tracking."""
        self.mode = MemoryMode.FULL
        self.base: Path | None = None
        """The base of the capture. None: an empty image."""
        self.reason = ""
        """Why the mode is not the best one, or "" if it is."""

    def begin(self, ram: Ram) -> Runs:
        """Choose the mode and the base of a capture, and return the pages that the capture would copy now.

        The machine may be running.
        """
        self.reason = ""
        self._marks = self._start_marks(ram)
        base_is_latest = self._choose_base()
        self._can_trust_marks = self._marks is not None and base_is_latest and self._marks_are_complete
        if self._marks is not None and self._can_trust_marks:
            self.mode = self._marks
        elif self.base == self._last_image:
            self.mode = MemoryMode.COMPARE
        elif self.base is not None and self._is_allowed(MemoryMode.INCREMENTAL):
            self.mode = MemoryMode.INCREMENTAL
        else:
            self.mode, self.base = MemoryMode.FULL, None
        if self._marks is not None and not self._marks_are_complete:
            self._set_reason("an earlier capture was interrupted")
        try:
            return self._list_pages(ram, take_marks=False)
        except OSError as error:
            self._set_reason(f"the kernel does not report the written pages ({error.strerror})")
            self.mode, self.base, self._marks, self._can_trust_marks = MemoryMode.FULL, None, None, False
            return ram.list_all_pages()

    @property
    def has_marks(self) -> bool:
        """Whether a capture can list the pages that were written since its previous listing."""
        return self._marks is not None

    @property
    def can_take_marks_while_running(self) -> bool:
        """Whether marks can be taken while the machine runs, because they are listed and taken in one atomic step."""
        return self._marks is MemoryMode.WRITTEN

    def take(self, ram: Ram, *, only_new: bool = False) -> Runs:
        """Return the pages that may differ from the base, and take their marks.

        The machine must be stopped, unless ``can_take_marks_while_running``. Pages with I/O in flight are returned, but
        are not marked again when the I/O writes to them.

        ``only_new``: return only the pages written since this capture's previous call. This requires marks.
        """
        if self._marks is None:
            return self._list_pages(ram, take_marks=False)
        # If this process exits before the capture completes, the list of taken pages is lost.
        self._taken_marker.touch(mode=0o600)
        if only_new:
            self._can_trust_marks = True
        # If the listing fails, it may already have taken some marks.
        were_complete, self._marks_are_complete = self._marks_are_complete, False
        runs = self._list_pages(ram, take_marks=True)
        self._unsaved_pages = union(self._unsaved_pages, runs)
        self._marks_are_complete = were_complete
        return runs if only_new else self._unsaved_pages

    def list_pages_since_last_take(self, ram: Ram) -> Runs:
        """Return the pages written since the last ``take``, without taking their marks. This requires marks."""
        assert self._marks is not None
        return _LISTERS[self._marks](ram, take_marks=False)

    def complete(self, image: Path, memory_directory: MemoryDirectory | None = None) -> ImageCheck:
        """Finish a capture whose memory is in ``image``. Return the check data of the image.

        ``memory_directory``: the directory of the image, if it is in a memory root.
        """
        check = image_check.compute_check(image)
        new_link = held_images.prepare(image, self._last_image, memory_directory)
        self._last_check.unlink(missing_ok=True)
        held_images.replace(new_link, self._last_image)
        self._last_check.touch(mode=0o600)
        self._last_check.write_text(check.model_dump_json())
        self._taken_marker.unlink(missing_ok=True)
        self._unsaved_pages, self._marks_are_complete = create_empty_runs(), True
        return check

    def _is_allowed(self, mode: MemoryMode) -> bool:
        return MODES_BEST_FIRST.index(mode) >= MODES_BEST_FIRST.index(self._best_mode)

    def _set_reason(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _start_marks(self, ram: Ram) -> MemoryMode | None:
        """Make the kernel mark written pages. Return the kind of mark, or None if no kind is available."""
        if self._is_allowed(MemoryMode.WRITTEN):
            try:
                self._track(ram)
                return MemoryMode.WRITTEN
            except OSError as error:
                self._set_reason(str(error))
        if self._is_allowed(MemoryMode.SOFT_DIRTY):
            if listing.has_soft_dirty_bits():
                return MemoryMode.SOFT_DIRTY
            self._set_reason("the kernel does not support soft-dirty bits")
        return None

    def _track(self, ram: Ram) -> None:
        if not listing.is_tracked(ram):
            self._tracker.track(ram.pid, ram.areas)
            self._has_started_tracking = True
        elif not self._has_started_tracking and not self._has_capture():
            # An earlier gateway started the tracking, and the files of its captures no longer exist.
            self._marks_are_complete = False
        if not listing.is_tracked(ram):
            raise OSError(
                errno.ENOSYS, "the kernel does not track writes to private mappings (requires Linux 6.7 or later)"
            )

    def _has_capture(self) -> bool:
        return self._last_image.exists() or self._last_check.exists()

    def _choose_base(self) -> bool:
        """Set ``base`` to an intact image, or None. Return whether it is the latest image, to which the marks refer."""
        if self._is_allowed(MemoryMode.COMPARE) and self._has_capture():
            damage = self._find_damage_in_last_image()
            if not damage:
                self.base = self._last_image
                return True
            self._set_reason(damage)
        damage = image_check.find_damage(self._boot_image, self._boot_check) if self._boot_check else ""
        if damage:
            self._set_reason(damage)
        self.base = None if damage else self._boot_image
        return not damage and not self._has_capture()

    def _find_damage_in_last_image(self) -> str:
        try:
            check = ImageCheck.model_validate_json(self._last_check.read_bytes())
        except (OSError, ValidationError):
            return f"{self._last_check.name} is missing or damaged"
        return image_check.find_damage(self._last_image, check)

    def _list_pages(self, ram: Ram, *, take_marks: bool) -> Runs:
        marked_runs = create_empty_runs()
        if self._marks is not None and (take_marks or self._can_trust_marks):
            marked_runs = _LISTERS[self._marks](ram, take_marks=take_marks)
        if self._can_trust_marks:
            return marked_runs
        # List pages only after the marks were taken, so that a page written in between is listed or marked again.
        return ram.list_all_pages() if self.mode is MemoryMode.FULL else listing.list_anonymous_pages(ram)
