"""mount(8), mount_nullfs(8) and umount(8).

The messages are copied from sbin/{mount,mount_nullfs,umount}/*.c and sys/kern/vfs_mount.c.

nullfs is a bind mount, and devfs is a tmpfs with the device nodes of ruleset 4. The state directory stores the data
that only FreeBSD's mount table has (special, fsid, options). A record whose mount no longer exists is ignored.
"""

from __future__ import annotations

import errno
import os
import stat
import time

from shim import base

EX_USAGE = 64
MOUNT_USAGE = """\
usage: mount [-adflpruvw] [-F fstab] [-o options] [-t ufs | external_type]
       mount [-dfpruvw] special | node
       mount [-dfpruvw] [-o options] [-t ufs | external_type] special node"""
UMOUNT_USAGE = """\
usage: umount [-dfNnv] special ... | node ... | fsid ...
       umount -a | -A [-F fstab] [-fnv] [-h host] [-t type]"""

# vfs_mount.c global_opts[] and vfs_donmount(); the flags are Linux's, the words are sys/mount.h MNTOPT_NAMES and
# mount.c flags2opts().
OPTIONS = {
    "ro": (base.MOUNT_ATTR_RDONLY, "read-only", "ro"),
    "nosuid": (base.MOUNT_ATTR_NOSUID, "nosuid", "nosuid"),
    "noexec": (base.MOUNT_ATTR_NOEXEC, "noexec", "noexec"),
    "noatime": (base.MOUNT_ATTR_NOATIME, "noatime", "noatime"),
    "nocover": (0, "nocover", "nocover"),
    "emptydir": (0, "emptydir", "emptydir"),
}
# MNTOPT_NAMES is in this order
VERBOSE_ORDER = ("noatime", "noexec", "nosuid", "ro", "nocover", "emptydir")
FSTAB_ORDER = ("ro", "noexec", "nosuid", "noatime", "nocover", "emptydir")
# devfs rule 4 of /etc/defaults/devfs.rules (devfsrules_jail): basic, login
DEVICES = {"null": (1, 3), "zero": (1, 5), "random": (1, 8), "urandom": (1, 9)}
PATH_CHANGED_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ELOOP)
DEVICE_LINKS = {"stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "fd": "/proc/self/fd", "ptmx": "pts/ptmx"}


class Mount:
    """An entry of the mount table.

    ``node`` is the original mount point (statfs.f_mntonname, which vfs_mount_alloc() sets). ``current_path`` differs
    from it if a directory above it was renamed. ``fingerprint`` distinguishes the mount from a later one, because the
    kernel reuses the number and the device of a removed mount.
    """

    def __init__(
        self, identity: int, special: str, node: str, fstype: str, options: list[str], fsid: str, fingerprint: str
    ) -> None:
        self.identity, self.special, self.node, self.fstype = identity, special, node, fstype
        self.options, self.fsid, self.current_path, self.fingerprint = options, fsid, node, fingerprint


def unescape(text: str) -> str:
    """Decode the octal escapes that the kernel uses in /proc."""
    if "\\" not in text:
        return text
    decoded_text, index = bytearray(), 0
    encoded_text = os.fsencode(text)
    while index < len(encoded_text):
        if encoded_text[index] == 92 and encoded_text[index + 1 : index + 4].isdigit():
            decoded_text.append(int(encoded_text[index + 1 : index + 4], 8))
            index += 4
        else:
            decoded_text.append(encoded_text[index])
            index += 1
    return os.fsdecode(bytes(decoded_text))


def list_kernel_mounts() -> list[Mount]:
    """Return Linux's mount table, oldest mount first."""
    mounts = []
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        for line in file:
            fields = line.split()
            separator_index = fields.index("-")
            flags = fields[5].split(",")
            fstype = fields[separator_index + 1]
            if fstype.startswith("fuse") and not fields[separator_index + 2].startswith("/"):
                fstype = "zfs"  # zfs-fuse mounts with the dataset's name as its source
            options = [word for word in flags if word in OPTIONS]
            number = int(fields[0])
            fsid = number.to_bytes(4, "little").hex() + "de000000"
            fingerprint = f"{fields[2]} {fields[3]} {fields[separator_index + 2]}"
            mounts.append(
                Mount(
                    number,
                    unescape(fields[separator_index + 2]),
                    unescape(fields[4]),
                    fstype,
                    options,
                    fsid,
                    fingerprint,
                )
            )
    return mounts


def list_mounts() -> list[Mount]:
    """Return the mount table as FreeBSD would show it, oldest mount first."""
    records = {record["id"]: record for record in base.load("mounts", {"mounts": []})["mounts"]}
    mounts, hidden_paths = [], []
    for each in list_kernel_mounts():
        record = records.get(each.identity)
        if record is not None and record["what"] == each.fingerprint:
            each.special, each.fstype, each.fsid = record["special"], record["fstype"], record["fsid"]
            each.options, each.node = record["options"], record["node"]
            if each.fstype == "devfs":
                hidden_paths.append(each.current_path + "/pts")
        if not (each.fstype == "devpts" and each.current_path in hidden_paths):
            mounts.append(each)
    return mounts


def record_mount(special: str, node: str, fstype: str, options: list[str], identity: int) -> None:
    """Record a new mount, and remove the records of mounts that no longer exist."""
    with base.locked():
        state = base.load("mounts", {"last": 0, "mounts": []})
        current_mounts = list_kernel_mounts()
        fingerprints = {each.identity: each.fingerprint for each in current_mounts}
        state["mounts"] = [each for each in state["mounts"] if fingerprints.get(each["id"]) == each["what"]]
        new_mount = next(each for each in current_mounts if each.identity == identity)
        state["last"] += 1
        # vfs_getnewfsid(): a unique number and the file system's type number
        type_number = "29000000" if fstype == "nullfs" else "71000000"
        fsid = (0x00FF00 + state["last"]).to_bytes(4, "little").hex() + type_number
        entry = {"id": new_mount.identity, "what": new_mount.fingerprint, "special": special, "node": node}
        state["mounts"].append(entry | {"fstype": fstype, "options": options, "fsid": fsid})
        base.save("mounts", state)


def is_mounted(node: str, fstype: str) -> bool:
    return any(each.node == node and each.fstype == fstype for each in list_mounts())


# ---- mount ----------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    argv, is_json = base.parse_libxo(argv)
    try:
        options, arguments = base.getopt(argv, "adF:fLlno:prt:uvw")
    except base.BadOption:
        raise base.usage(MOUNT_USAGE) from None
    words: list[str] = []
    fstype, verbose, fstab = "", False, False
    for letter, value in options:
        if letter == "o":
            words += [word for word in value.split(",") if word]
        elif letter == "t":
            if fstype:
                raise base.errx(1, "only one -t option may be specified")
            fstype = value
        elif letter == "r":
            words.append("ro")
        elif letter == "v":
            verbose = True
        elif letter == "p":
            fstab = verbose = True
        elif letter != "n":
            raise base.unsupported(f"-{letter}")
    if not arguments:
        return show_mounts(fstype, is_json, verbose, fstab)
    if len(arguments) == 1:
        if fstype:
            raise base.usage(MOUNT_USAGE)
        raise base.errx(1, f"{arguments[0]}: unknown special file or file system")
    if len(arguments) > 2:
        raise base.usage(MOUNT_USAGE)
    return mount(fstype or "ufs", arguments[0], arguments[1], words)


def resolve_path(path: str) -> str:
    """Resolve a path like realpath(3). Retries if a symbolic link is replaced while it is being read."""
    while True:
        try:
            return os.path.realpath(path)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise


def check_path(path: str) -> str:
    """Resolve the path of a directory, like checkpath() in getmntopts.c. Raises OSError with the resolved path."""
    resolved_path = resolve_path(path)
    try:
        mode = os.stat(resolved_path).st_mode
    except OSError as error:
        raise OSError(error.errno, "", resolved_path) from None
    if not stat.S_ISDIR(mode):
        raise OSError(errno.ENOTDIR, "", resolved_path)
    return resolved_path


def mount(fstype: str, special: str, node: str, words: list[str]) -> int:
    try:
        node = check_path(node)
    except OSError as error:
        base.warn(str(error.filename), error.errno or 0)
        return 1
    if fstype == "nullfs":
        own_program, base.PROG = base.PROG, "mount_nullfs"
        try:
            return mount_nullfs(special, node, words)
        finally:
            base.PROG = own_program
    if fstype == "devfs":
        return mount_devfs(special, node, words)
    raise base.unsupported(f"-t {fstype}")


def resolve_options(words: list[str], fstype_options: tuple[str, ...]) -> tuple[list[str], str]:
    """Return the effective options and the first unknown one, like vfs_filteropt() and vfs_donmount()."""
    effective_options: list[str] = []
    for word in words:
        name = word.partition("=")[0]
        if name in OPTIONS:
            effective_options = [each for each in effective_options if each != name] + [name]
        elif name in ("rw", "noro"):
            effective_options = [each for each in effective_options if each != "ro"]
        elif name in ("suid", "exec", "atime", "cover"):
            effective_options = [each for each in effective_options if each != "no" + name]
        elif name not in fstype_options:
            return effective_options, name
    return effective_options, ""


def check_cover(node: str, options: list[str]) -> int:
    """Return an errno if the options forbid covering this mount point, else 0. See vfs_domount() in vfs_mount.c."""
    if "nocover" in options and any(each.current_path == node for each in list_mounts()):
        return errno.EBUSY
    if "emptydir" in options and os.listdir(node):
        return errno.ENOTEMPTY
    return 0


def mount_nullfs(special: str, node: str, words: list[str]) -> int:
    """Mount ``special`` at ``node``. Symbolic links in both paths are followed. See mount_nullfs.c."""
    try:
        source = check_path(special)
    except OSError as error:
        raise base.err(EX_USAGE, str(error.filename), error.errno or 0) from None
    options, unknown_option = resolve_options(words, ("cache", "nocache"))
    if unknown_option:
        raise base.err(1, f"{node}: mount option <{unknown_option}> is unknown", errno.EINVAL)
    error_number = check_cover(node, options)
    if not error_number and any(
        each.fstype == "nullfs" and each.current_path == node and each.special == source for each in list_mounts()
    ):
        error_number = errno.EDEADLK  # nullfs_mount(): "Check multi null mount"
    if error_number:
        raise base.err(1, node, error_number)
    try:
        node, identity = bind_mount(source, node, sum(OPTIONS[name][0] for name in options))
    except OSError as error:
        raise base.err(1, node, error.errno or 0) from None
    record_mount(source, node, "nullfs", options, identity)
    return 0


def bind_mount(source: str, node: str, attributes: int) -> tuple[str, int]:
    """Mount ``source`` at ``node`` and return the resulting path and the mount's number. See vfs_domount().

    Like namei() with FOLLOW, this follows symbolic links that were created after the path was checked.
    """
    target_fd = os.open(node, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    mount_fd = base.clone_mount(source, attributes)
    base.attach_mount(mount_fd, target_fd)
    return os.readlink(f"/proc/self/fd/{target_fd}"), read_mount_number(f"/proc/self/fdinfo/{mount_fd}")


def mount_devfs(special: str, node: str, words: list[str]) -> int:
    """Mount devfs. The mount table shows "devfs" instead of ``special``. See mount_fs.c and devfs_vfsops.c."""
    mount_options, unknown_option = resolve_options(words, ("from", "ruleset", "export"))
    if unknown_option:
        raise base.err(1, f"{special}: mount option <{unknown_option}> is unknown", errno.EINVAL)
    rulesets = [word.partition("=")[2] for word in words if word.startswith("ruleset")]
    for text in rulesets:
        if not text.isdigit() or int(text) > 65535:
            raise base.err(1, f"{special}: could not convert ruleset parameter", errno.EINVAL)
        if text != "4":
            raise base.unsupported(f"devfs ruleset {text}")
    if not rulesets:
        raise base.unsupported("devfs without a ruleset")
    error_number = check_cover(node, mount_options)
    if error_number:
        raise base.err(1, special, error_number)
    source = f"devfs-{os.getpid()}-{time.monotonic_ns()}"
    base.mount_syscall(source, node, "tmpfs", base.MS_NOSUID | base.MS_NOEXEC, "mode=755,size=64k")
    for name, device in DEVICES.items():
        path = os.path.join(node, name)
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(*device))
        os.chmod(path, 0o666)
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, os.path.join(node, name))
    os.mkdir(os.path.join(node, "pts"), 0o755)
    options = "newinstance,ptmxmode=0666,mode=620"
    base.mount_syscall("devpts", os.path.join(node, "pts"), "devpts", base.MS_NOSUID | base.MS_NOEXEC, options)
    record_mount(
        "devfs",
        node,
        "devfs",
        mount_options,
        next(each.identity for each in list_kernel_mounts() if each.special == source),
    )
    return 0


# ---- the list -------------------------------------------------------------------------------------------------------


def select_mounts(fstype: str) -> list[Mount]:
    """Return the mounts of the listed types, or of all other types if the list begins with "no". See checkvfsname()."""
    if not fstype:
        return list_mounts()
    names = fstype.removeprefix("no").split(",")
    return [each for each in list_mounts() if (each.fstype in names) != fstype.startswith("no")]


def show_mounts(fstype: str, is_json: bool, verbose: bool, fstab: bool) -> int:
    mounts = select_mounts(fstype)
    if is_json:
        key, row = ("fstab", fstab_to_json) if fstab else ("mounted", lambda each: mount_to_json(each, verbose))
        rows = ",".join(row(each) for each in mounts)
        base.print_line('{"mount": {' + (f'"{key}": [{rows}]' if mounts else "") + "}}")
        return 0
    for each in mounts:
        base.print_line(format_fstab(each) if fstab else format_mount(each, verbose))
    return 0


def get_option_words(mount: Mount) -> list[str]:
    """Return the names of a mount's options (MNTOPT_NAMES). nullfs inherits "local" from the file system below."""
    inherited_words = ["local"] if mount.fstype in ("nullfs", "zfs") else []
    return inherited_words + [OPTIONS[name][1] for name in VERBOSE_ORDER if name in mount.options]


def format_mount(mount: Mount, verbose: bool) -> str:
    """Format an entry of the mount table as text. See prmount()."""
    words = [mount.fstype, *get_option_words(mount)]
    if verbose:
        words.append(f"fsid {mount.fsid}")
    return f"{mount.special} on {mount.node} ({', '.join(words)})"


def mount_to_json(mount: Mount, verbose: bool) -> str:
    q = base.quote_json
    options = ",".join(q(word) for word in get_option_words(mount))
    fields = f'"special":{q(mount.special)},"node":{q(mount.node)},"fstype":{q(mount.fstype)}'
    fields += f',"opts":[{options}]' if options else ""
    return "{" + fields + (f',"fsid":{q(mount.fsid)}' if verbose else "") + "}"


def get_fstab_options(mount: Mount) -> str:
    words = [OPTIONS[name][2] for name in FSTAB_ORDER if name in mount.options]
    return ",".join(words if "ro" in mount.options else ["rw", *words])


def pad_field(text: str) -> str:
    """Append up to three tabs, or a space, to a field. See putfsent()."""
    return text + ("\t" if len(text) < 8 else "") + ("\t" if len(text) < 16 else "") + ("\t" if len(text) < 24 else " ")


def format_fstab(mount: Mount) -> str:
    options = get_fstab_options(mount)
    padding = "\t" if len(options) < 8 else " "
    return f"{pad_field(mount.special)}{pad_field(mount.node)}{mount.fstype}\t{options}{padding}\t0 0"


def fstab_to_json(mount: Mount) -> str:
    q = base.quote_json
    fields = f'"device":{q(mount.special)},"mntpoint":{q(mount.node)},"fstype":{q(mount.fstype)}'
    return "{" + fields + f',"opts":{q(get_fstab_options(mount))},"dump":0,"pass":0' + "}"


# ---- umount ---------------------------------------------------------------------------------------------------------


def umount_main(argv: list[str]) -> int:
    try:
        options, names = base.getopt(argv, "AaF:fh:Nndt:v")
    except base.BadOption:
        raise base.usage(UMOUNT_USAGE) from None
    option_letters = {letter for letter, _ in options}
    for letter in sorted(option_letters - set("fv")):
        raise base.unsupported(f"-{letter}")
    if not names:
        raise base.usage(UMOUNT_USAGE)
    return max([unmount(name, "f" in option_letters, "v" in option_letters) for name in names])


def unmount(name: str, force: bool, verbose: bool) -> int:
    """Unmount the newest mount with this fsid, node or special. Returns the exit code. See checkname()."""
    mount = find_mount(name) or find_mount(name.rstrip("/") or "/")
    if mount is None:
        resolved_path = resolve_path(name)
        try:
            os.stat(name)
        except OSError as error:
            base.warn(f"{name}: statfs", error.errno or 0)
            base.warnx(f"{name}: unknown file system")
            return 1
        mount = find_mount(resolved_path)
        if mount is None:
            base.warnx(f"{name}: not a file system root directory")
            return 1
    try:
        if mount.node == base.read_knob("busy"):
            # Another unmount of it is hung, so even a forced unmount fails: MNTK_UNMOUNT in dounmount().
            raise OSError(errno.EBUSY, "")
        remove_mount(mount, force)
    except OSError as error:
        base.warn(f"unmount of {mount.node} failed", error.errno or 0)
        return 1
    if verbose:
        base.print_line(f"{mount.special}: unmount from {mount.node}")
    return 0


def find_mount(name: str) -> Mount | None:
    """Find the newest mount with this fsid, node or special. See checkmntlist()."""
    mounts = list(reversed(list_mounts()))
    if len(name) == 16 and all(letter in "0123456789abcdefABCDEF" for letter in name):
        for each in mounts:
            if each.fsid == name.lower():
                return each
    for each in mounts:
        if each.node == name:
            return each
    return next((each for each in mounts if each.special == name), None)


def remove_mount(mount: Mount, force: bool) -> None:
    """Unmount a file system. For devfs, unmount the shim's devpts first."""
    pts_path = os.path.join(mount.current_path, "pts")
    if mount.fstype == "devfs" and any(each.current_path == pts_path for each in list_kernel_mounts()):
        base.umount_syscall(pts_path, base.MNT_DETACH if force else 0)
    if force and has_open_files(mount.identity):
        keep_underlying_file_system_busy(mount)
    retry_after_renames(mount, lambda: base.umount_syscall(mount.current_path, base.MNT_DETACH if force else 0))


def retry_after_renames(mount: Mount, action: object) -> object:
    """Call ``action``, which uses the path of a mount. If directories above it are renamed, retry with the new path.

    FreeBSD identifies a mount by its number, whereas Linux uses its path.
    """
    deadline = time.monotonic() + 10
    while True:
        try:
            return action()  # type: ignore[operator]
        except OSError as error:
            if error.errno not in PATH_CHANGED_ERRNOS or time.monotonic() > deadline:
                raise
        matching_mounts = [
            each
            for each in list_kernel_mounts()
            if (each.identity, each.fingerprint) == (mount.identity, mount.fingerprint)
        ]
        if not matching_mounts:
            raise OSError(errno.EINVAL, "the mount no longer exists")
        mount.current_path = matching_mounts[0].current_path


def open_root(mount: Mount) -> int:
    fd = os.open(mount.current_path, os.O_PATH | os.O_DIRECTORY)
    if read_mount_number(f"/proc/self/fdinfo/{fd}") != mount.identity:
        os.close(fd)
        raise OSError(errno.ENOENT, "another mount covers the path")
    return fd


def keep_underlying_file_system_busy(mount: Mount) -> None:
    """Keep the file system below a mount in use until no file is open through that mount.

    On FreeBSD, open files become unusable after a forced unmount; on Linux they stay usable. If closing the last open
    file also tore down the file system, zfs-fuse would wait forever for the close and block all other requests.
    """
    root_fd = retry_after_renames(mount, lambda: open_root(mount))
    if os.fork():
        os.close(root_fd)  # type: ignore[arg-type]
        return
    try:
        os.setsid()
        null_fd = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null_fd, fd)
        if base.locked.depth:
            os.close(base.locked.handle)
        while has_open_files(mount.identity):
            time.sleep(0.1)
        time.sleep(0.5)  # zfs-fuse needs time to receive the last close.
    finally:
        os._exit(0)


def has_open_files(identity: int) -> bool:
    """Return whether another process has a file, directory or program open through the mount with this number."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            files = [f"/proc/{entry}/fdinfo/{fd}" for fd in os.listdir(f"/proc/{entry}/fdinfo")]
        except OSError:
            continue
        if any(read_mount_number(file) == identity for file in files):
            return True
        for link in ("cwd", "root", "exe"):
            try:
                fd = os.open(f"/proc/{entry}/{link}", os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            mount_id = read_mount_number(f"/proc/self/fdinfo/{fd}")
            os.close(fd)
            if mount_id == identity:
                return True
    return False


def read_mount_number(fdinfo: str) -> int:
    """Return the number of the mount through which a file was opened, or 0 if it is unknown."""
    try:
        with open(fdinfo) as file:
            return next((int(line[7:]) for line in file if line.startswith("mnt_id:")), 0)
    except OSError:
        return 0


def purge() -> None:
    """Unmount all mounts that the state directory records, newest first."""
    own_mount_keys = {(entry["id"], entry["what"]) for entry in base.load("mounts", {"mounts": []})["mounts"]}
    for each in reversed(list_mounts()):
        if (each.identity, each.fingerprint) in own_mount_keys:  # the kernel reuses the number of a removed mount
            try:
                remove_mount(each, True)
            except OSError as error:
                base.warn(f"unmount of {each.node} failed", error.errno or 0)
