"""mount(8), mount_nullfs(8), umount(8). Messages: sbin/{mount,mount_nullfs,umount}/*.c, sys/kern/vfs_mount.c.

nullfs is a bind mount, devfs a tmpfs with the nodes of ruleset 4. The state directory records the data that only
FreeBSD's mount table has (special, fsid, options); a record whose mount no longer exists is ignored.
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
NODES = {"null": (1, 3), "zero": (1, 5), "random": (1, 8), "urandom": (1, 9)}
ASTRAY = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ELOOP)
LINKS = {"stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "fd": "/proc/self/fd", "ptmx": "pts/ptmx"}


class Mount:
    """One line of the mount table.

    ``node`` is the original mount point (statfs.f_mntonname, set once by vfs_mount.c vfs_mount_alloc()); ``place`` is
    the current one, since directories above it may be renamed; ``what`` distinguishes it from a later mount of the same
    number: the kernel reuses the number of a removed mount, and its device, for the next one.
    """

    def __init__(
        self, identity: int, special: str, node: str, fstype: str, options: list[str], fsid: str, what: str
    ) -> None:
        self.identity, self.special, self.node, self.fstype = identity, special, node, fstype
        self.options, self.fsid, self.place, self.what = options, fsid, node, what


def unescape(text: str) -> str:
    """/proc's octal escapes."""
    if "\\" not in text:
        return text
    out, at = bytearray(), 0
    raw = os.fsencode(text)
    while at < len(raw):
        if raw[at] == 92 and raw[at + 1 : at + 4].isdigit():
            out.append(int(raw[at + 1 : at + 4], 8))
            at += 4
        else:
            out.append(raw[at])
            at += 1
    return os.fsdecode(bytes(out))


def kernel_table() -> list[Mount]:
    """Linux's own mount table, oldest first."""
    found = []
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        for line in file:
            fields = line.split()
            dash = fields.index("-")
            words = fields[5].split(",")
            fstype = fields[dash + 1]
            if fstype.startswith("fuse") and not fields[dash + 2].startswith("/"):
                fstype = "zfs"  # zfs-fuse mounts with the dataset's name as its source
            options = [word for word in words if word in OPTIONS]
            number = int(fields[0])
            fsid = number.to_bytes(4, "little").hex() + "de000000"
            what = f"{fields[2]} {fields[3]} {fields[dash + 2]}"
            found.append(Mount(number, unescape(fields[dash + 2]), unescape(fields[4]), fstype, options, fsid, what))
    return found


def table() -> list[Mount]:
    """The mount table as FreeBSD would show it, oldest first."""
    records = {record["id"]: record for record in base.load("mounts", {"mounts": []})["mounts"]}
    found, hidden = [], []
    for each in kernel_table():
        record = records.get(each.identity)
        if record is not None and record["what"] == each.what:
            each.special, each.fstype, each.fsid = record["special"], record["fstype"], record["fsid"]
            each.options, each.node = record["options"], record["node"]
            if each.fstype == "devfs":
                hidden.append(each.place + "/pts")
        if not (each.fstype == "devpts" and each.place in hidden):
            found.append(each)
    return found


def record(special: str, node: str, fstype: str, options: list[str], identity: int) -> None:
    """Record the new mount; drops records of mounts that no longer exist."""
    with base.locked():
        state = base.load("mounts", {"last": 0, "mounts": []})
        now = kernel_table()
        there = {each.identity: each.what for each in now}
        state["mounts"] = [each for each in state["mounts"] if there.get(each["id"]) == each["what"]]
        made = next(each for each in now if each.identity == identity)
        state["last"] += 1
        # vfs_getnewfsid(): a unique number and the file system's type number
        kind = "29000000" if fstype == "nullfs" else "71000000"
        fsid = (0x00FF00 + state["last"]).to_bytes(4, "little").hex() + kind
        entry = {"id": made.identity, "what": made.what, "special": special, "node": node}
        state["mounts"].append(entry | {"fstype": fstype, "options": options, "fsid": fsid})
        base.save("mounts", state)


def is_mounted(node: str, fstype: str) -> bool:
    return any(each.node == node and each.fstype == fstype for each in table())


# ---- mount ----------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    argv, json = base.take_libxo(argv)
    try:
        options, rest = base.getopt(argv, "adF:fLlno:prt:uvw")
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
    if not rest:
        return show(fstype, json, verbose, fstab)
    if len(rest) == 1:
        if fstype:
            raise base.usage(MOUNT_USAGE)
        raise base.errx(1, f"{rest[0]}: unknown special file or file system")
    if len(rest) > 2:
        raise base.usage(MOUNT_USAGE)
    return mount(fstype or "ufs", rest[0], rest[1], words)


def real_path(path: str) -> str:
    """realpath(3), which reads a link before it checks its type: it is not an error if it then stops being a link."""
    while True:
        try:
            return os.path.realpath(path)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise


def check_path(path: str) -> str:
    """getmntopts.c checkpath(): realpath(3), and it must be a directory. Raises OSError with the path so far."""
    real = real_path(path)
    try:
        mode = os.stat(real).st_mode
    except OSError as error:
        raise OSError(error.errno, "", real) from None
    if not stat.S_ISDIR(mode):
        raise OSError(errno.ENOTDIR, "", real)
    return real


def mount(fstype: str, special: str, node: str, words: list[str]) -> int:
    try:
        node = check_path(node)
    except OSError as error:
        base.warn(str(error.filename), error.errno or 0)
        return 1
    if fstype == "nullfs":
        own, base.PROG = base.PROG, "mount_nullfs"
        try:
            return mount_nullfs(special, node, words)
        finally:
            base.PROG = own
    if fstype == "devfs":
        return mount_devfs(special, node, words)
    raise base.unsupported(f"-t {fstype}")


def options_of(words: list[str], own: tuple[str, ...]) -> tuple[list[str], str]:
    """vfs_filteropt() and vfs_donmount(): (effective options, the first unknown word)."""
    on: list[str] = []
    for word in words:
        name = word.partition("=")[0]
        if name in OPTIONS:
            on = [each for each in on if each != name] + [name]
        elif name in ("rw", "noro"):
            on = [each for each in on if each != "ro"]
        elif name in ("suid", "exec", "atime", "cover"):
            on = [each for each in on if each != "no" + name]
        elif name not in own:
            return on, name
    return on, ""


def check_cover(node: str, on: list[str]) -> int:
    """vfs_mount.c vfs_domount(), vfs_domount_first(): 0, or the errno for a node that must not be covered."""
    if "nocover" in on and any(each.place == node for each in table()):
        return errno.EBUSY
    if "emptydir" in on and os.listdir(node):
        return errno.ENOTEMPTY
    return 0


def mount_nullfs(special: str, node: str, words: list[str]) -> int:
    """mount_nullfs.c: both paths are resolved, including links; the errors are the kernel's."""
    try:
        source = check_path(special)
    except OSError as error:
        raise base.err(EX_USAGE, str(error.filename), error.errno or 0) from None
    on, unknown = options_of(words, ("cache", "nocache"))
    if unknown:
        raise base.err(1, f"{node}: mount option <{unknown}> is unknown", errno.EINVAL)
    number = check_cover(node, on)
    if not number and any(
        each.fstype == "nullfs" and each.place == node and each.special == source for each in table()
    ):
        number = errno.EDEADLK  # nullfs_mount(): "Check multi null mount"
    if number:
        raise base.err(1, node, number)
    try:
        node, identity = bind(source, node, sum(OPTIONS[name][0] for name in on))
    except OSError as error:
        raise base.err(1, node, error.errno or 0) from None
    record(source, node, "nullfs", on, identity)
    return 0


def bind(source: str, node: str, attributes: int) -> tuple[str, int]:
    """vfs_mount.c vfs_domount(): namei() with FOLLOW, then vn_path_to_global_path().

    Links that appeared since are followed, and the mount is there. Returns the resulting path and the mount's number.
    """
    covered = os.open(node, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    tree = base.clone_mount(source, attributes)
    base.attach_mount(tree, covered)
    return os.readlink(f"/proc/self/fd/{covered}"), mount_of(f"/proc/self/fdinfo/{tree}")


def mount_devfs(special: str, node: str, words: list[str]) -> int:
    """mount_fs.c, sys/fs/devfs/devfs_vfsops.c. Shown as "devfs" whatever the special was."""
    on, unknown = options_of(words, ("from", "ruleset", "export"))
    if unknown:
        raise base.err(1, f"{special}: mount option <{unknown}> is unknown", errno.EINVAL)
    rulesets = [word.partition("=")[2] for word in words if word.startswith("ruleset")]
    for text in rulesets:
        if not text.isdigit() or int(text) > 65535:
            raise base.err(1, f"{special}: could not convert ruleset parameter", errno.EINVAL)
        if text != "4":
            raise base.unsupported(f"devfs ruleset {text}")
    if not rulesets:
        raise base.unsupported("devfs without a ruleset")
    number = check_cover(node, on)
    if number:
        raise base.err(1, special, number)
    source = f"devfs-{os.getpid()}-{time.monotonic_ns()}"
    base.mount_syscall(source, node, "tmpfs", base.MS_NOSUID | base.MS_NOEXEC, "mode=755,size=64k")
    for name, device in NODES.items():
        where = os.path.join(node, name)
        os.mknod(where, 0o666 | stat.S_IFCHR, os.makedev(*device))
        os.chmod(where, 0o666)
    for name, target in LINKS.items():
        os.symlink(target, os.path.join(node, name))
    os.mkdir(os.path.join(node, "pts"), 0o755)
    options = "newinstance,ptmxmode=0666,mode=620"
    base.mount_syscall("devpts", os.path.join(node, "pts"), "devpts", base.MS_NOSUID | base.MS_NOEXEC, options)
    record("devfs", node, "devfs", on, next(each.identity for each in kernel_table() if each.special == source))
    return 0


# ---- the list -------------------------------------------------------------------------------------------------------


def chosen(fstype: str) -> list[Mount]:
    """checkvfsname(): types separated by commas; "no" before them means all others."""
    if not fstype:
        return table()
    names = fstype.removeprefix("no").split(",")
    return [each for each in table() if (each.fstype in names) != fstype.startswith("no")]


def show(fstype: str, json: bool, verbose: bool, fstab: bool) -> int:
    mounts = chosen(fstype)
    if json:
        key, row = ("fstab", fstab_json) if fstab else ("mounted", lambda each: mounted_json(each, verbose))
        rows = ",".join(row(each) for each in mounts)
        base.say('{"mount": {' + (f'"{key}": [{rows}]' if mounts else "") + "}}")
        return 0
    for each in mounts:
        base.say(fstab_line(each) if fstab else mounted_line(each, verbose))
    return 0


def option_words(each: Mount) -> list[str]:
    """MNTOPT_NAMES; nullfs inherits "local" from the file system below (nullfs_mount())."""
    local = ["local"] if each.fstype in ("nullfs", "zfs") else []
    return local + [OPTIONS[name][1] for name in VERBOSE_ORDER if name in each.options]


def mounted_line(each: Mount, verbose: bool) -> str:
    """prmount()."""
    words = [each.fstype, *option_words(each)]
    if verbose:
        words.append(f"fsid {each.fsid}")
    return f"{each.special} on {each.node} ({', '.join(words)})"


def mounted_json(each: Mount, verbose: bool) -> str:
    q = base.quoted
    options = ",".join(q(word) for word in option_words(each))
    row = f'"special":{q(each.special)},"node":{q(each.node)},"fstype":{q(each.fstype)}'
    row += f',"opts":[{options}]' if options else ""
    return "{" + row + (f',"fsid":{q(each.fsid)}' if verbose else "") + "}"


def fstab_options(each: Mount) -> str:
    words = [OPTIONS[name][2] for name in FSTAB_ORDER if name in each.options]
    return ",".join(words if "ro" in each.options else ["rw", *words])


def padded(text: str) -> str:
    """putfsent(): up to three tabs, or a blank."""
    return text + ("\t" if len(text) < 8 else "") + ("\t" if len(text) < 16 else "") + ("\t" if len(text) < 24 else " ")


def fstab_line(each: Mount) -> str:
    options = fstab_options(each)
    tail = "\t" if len(options) < 8 else " "
    return f"{padded(each.special)}{padded(each.node)}{each.fstype}\t{options}{tail}\t0 0"


def fstab_json(each: Mount) -> str:
    q = base.quoted
    row = f'"device":{q(each.special)},"mntpoint":{q(each.node)},"fstype":{q(each.fstype)}'
    return "{" + row + f',"opts":{q(fstab_options(each))},"dump":0,"pass":0' + "}"


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
    """checkname(): an fsid, else a node, else a special, the newest first; then the result of statfs(2)."""
    found = look_up(name) or look_up(name.rstrip("/") or "/")
    if found is None:
        real = real_path(name)
        try:
            os.stat(name)
        except OSError as error:
            base.warn(f"{name}: statfs", error.errno or 0)
            base.warnx(f"{name}: unknown file system")
            return 1
        found = look_up(real)
        if found is None:
            base.warnx(f"{name}: not a file system root directory")
            return 1
    try:
        if found.node == base.knob("busy"):
            # dounmount(): MNTK_UNMOUNT, another unmount of it is under way and hangs; even force does not help
            raise OSError(errno.EBUSY, "")
        remove_mount(found, force)
    except OSError as error:
        base.warn(f"unmount of {found.node} failed", error.errno or 0)
        return 1
    if verbose:
        base.say(f"{found.special}: unmount from {found.node}")
    return 0


def look_up(name: str) -> Mount | None:
    """checkmntlist()."""
    mounts = list(reversed(table()))
    if len(name) == 16 and all(letter in "0123456789abcdefABCDEF" for letter in name):
        for each in mounts:
            if each.fsid == name.lower():
                return each
    for each in mounts:
        if each.node == name:
            return each
    return next((each for each in mounts if each.special == name), None)


def remove_mount(mount: Mount, force: bool) -> None:
    """For devfs, the shim's second mount must be removed first."""
    pts = os.path.join(mount.place, "pts")
    if mount.fstype == "devfs" and any(each.place == pts for each in kernel_table()):
        base.umount_syscall(pts, base.MNT_DETACH if force else 0)
    if force and is_open(mount.identity):
        keep_below(mount)
    act_on_current_path(mount, lambda: base.umount_syscall(mount.place, base.MNT_DETACH if force else 0))


def act_on_current_path(mount: Mount, act: object) -> object:
    """FreeBSD addresses a mount by its number, Linux by a path: look it up again after renames above it."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return act()  # type: ignore[operator]
        except OSError as error:
            if error.errno not in ASTRAY or time.monotonic() > deadline:
                raise
        here = [each for each in kernel_table() if (each.identity, each.what) == (mount.identity, mount.what)]
        if not here:
            raise OSError(errno.EINVAL, "it is gone")
        mount.place = here[0].place


def open_root(mount: Mount) -> int:
    fd = os.open(mount.place, os.O_PATH | os.O_DIRECTORY)
    if mount_of(f"/proc/self/fdinfo/{fd}") != mount.identity:
        os.close(fd)
        raise OSError(errno.ENOENT, "something else is there now")
    return fd


def keep_below(mount: Mount) -> None:
    """Keep the file system below a mount in use until no file is open through that mount.

    On FreeBSD, files that are open there are dead after a forced unmount. Here they stay alive; if the file system
    disappeared with the last close, zfs-fuse would wait forever for that close, and block all other requests.
    """
    root = act_on_current_path(mount, lambda: open_root(mount))
    if os.fork():
        os.close(root)  # type: ignore[arg-type]
        return
    try:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        if base.locked.depth:
            os.close(base.locked.handle)
        while is_open(mount.identity):
            time.sleep(0.1)
        time.sleep(0.5)  # the last close has arrived by then
    finally:
        os._exit(0)


def is_open(identity: int) -> bool:
    """Whether another process has a file, its directory or its program open through the mount of this number."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            files = [f"/proc/{entry}/fdinfo/{fd}" for fd in os.listdir(f"/proc/{entry}/fdinfo")]
        except OSError:
            continue
        if any(mount_of(file) == identity for file in files):
            return True
        for link in ("cwd", "root", "exe"):
            try:
                fd = os.open(f"/proc/{entry}/{link}", os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            found = mount_of(f"/proc/self/fdinfo/{fd}")
            os.close(fd)
            if found == identity:
                return True
    return False


def mount_of(fdinfo: str) -> int:
    """The number of the mount through which a file was opened; 0: unknown."""
    try:
        with open(fdinfo) as file:
            return next((int(line[7:]) for line in file if line.startswith("mnt_id:")), 0)
    except OSError:
        return 0


def purge() -> None:
    """Unmount all recorded mounts, newest first."""
    ours = {(entry["id"], entry["what"]) for entry in base.load("mounts", {"mounts": []})["mounts"]}
    for each in reversed(table()):
        if (each.identity, each.what) in ours:  # the kernel reuses the number of a removed mount
            try:
                remove_mount(each, True)
            except OSError as error:
                base.warn(f"unmount of {each.node} failed", error.errno or 0)
