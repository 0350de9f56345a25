"""Jails as the kernel manages them: sys/kern/kern_jail.c on Linux namespaces.

A jail is a *holder*: a sleeping process, the first of a new pid namespace, with its own network (vnet), host name and
System V IPC namespaces, whose working directory is the jail's path. As in FreeBSD, the mount table is the host's: a
mount or unmount below the path immediately affects the jail, and a path with a jail in it is busy.

Processes of a jail are confined by chroot(2), without the capabilities that would let them escape.
"""

from __future__ import annotations

import _signal
import _socket
import errno
import os
import select
import time

from shim import base

Jail = dict  # jid, name, path, holder, born, vnet, params{}, dying

# ---- parameters -------------------------------------------------------------------------------------------------
# jail(8) "Core Parameters"; kern_jail.c SYSCTL_JAIL_PARAM*; the letter is the type of lib/libjail/jail.c
# (B boolean, I integer, S string, J jailsys); "+" = only at creation (CTLFLAG_RDTUN), "-" = read only.

PARAMS = {
    "jid": "I+",
    "parent": "I-",
    "name": "S",
    "path": "S+",
    "securelevel": "I",
    "devfs_ruleset": "I",
    "enforce_statfs": "I",
    "children.cur": "I-",
    "children.max": "I",
    "cpuset.id": "I-",
    "dying": "B-",
    "persist": "B",
    "osreldate": "I+",
    "osrelease": "S+",
    "host": "J",
    "host.hostname": "S",
    "host.domainname": "S",
    "host.hostuuid": "S",
    "host.hostid": "I",
    "vnet": "J+",
    "ip4": "J+",
    "ip4.addr": "A",
    "ip4.saddrsel": "B",
    "ip6": "J+",
    "ip6.addr": "A",
    "ip6.saddrsel": "B",
    "sysvmsg": "J",
    "sysvsem": "J",
    "sysvshm": "J",
}
ALLOW = (
    "set_hostname reserved_ports unprivileged_proc_debug suser sysvipc raw_sockets chflags mount quotas socket_af "
    "mlock read_msgbuf nfsd extattr adjtime settime mount.devfs mount.fdescfs mount.fusefs mount.nullfs mount.procfs "
    "mount.tmpfs mount.zfs"
).split()
PARAMS.update({f"allow.{name}": "B" for name in ALLOW})
# kern_jail.c JAIL_DEFAULT_ALLOW
ALLOWED = {"allow.set_hostname", "allow.reserved_ports", "allow.unprivileged_proc_debug", "allow.suser"}

JAILSYS = ["disable", "new", "inherit"]
JAIL_MAX = 999999


class JailError(Exception):
    """The content of libjail's jail_errmsg."""


def positive(name: str) -> str | None:
    """``allow.noraw_sockets`` → ``allow.raw_sockets``; None if the name has no "no" (libjail nononame())."""
    head, dot, tail = name.rpartition(".")
    return head + dot + tail[2:] if tail.startswith("no") else None


def describe(name: str) -> tuple[str, str, bool]:
    """(the parameter's own name, its type, whether it has its "no" form). Raises JailError as jailparam_type()."""
    if name in PARAMS:
        return name, PARAMS[name], False
    if base.osreldate() >= 1500000 and (name in ("meta", "env") or name.startswith(("meta.", "env."))):
        return name, "S", False  # jail(8) of 15.0: meta, env
    plain = positive(name)
    if plain is not None and PARAMS.get(plain, "").startswith("B"):
        return plain, PARAMS[plain], True
    raise JailError(f"unknown parameter: {name}")


def convert(name: str, text: str | None) -> tuple[str, object]:
    """A parameter as given → (own name, value). Raises JailError with the messages of jailparam_import()."""
    own, kind, no = describe(name)
    if kind[0] == "B":
        if text is None:
            return own, not no
        if text.lower() in ("false", "true"):
            return own, (text.lower() == "true") != no
        if not is_integer(text):
            raise JailError(f'{name}: unknown boolean value "{text}"')
        return own, (int(text) != 0) != no
    if kind[0] == "J":
        if not text:  # "Allow setting a jailsys parameter to "new" in a booleanesque fashion."
            return own, "new"
        if text.lower() in JAILSYS:
            return own, text.lower()
        if not is_integer(text):
            raise JailError(f'{name}: unknown jailsys value "{text}"')
        if not 0 <= int(text) < len(JAILSYS):
            raise JailError(f"jail_set: {base.strerror(errno.EINVAL)}")
        return own, JAILSYS[int(text)]
    if kind[0] == "I":
        if not is_integer(text or ""):
            raise JailError(f'{name}: non-integer value "{text or ""}"')
        return own, int(text or "")
    return own, text or ""


def is_integer(text: str) -> bool:
    digits = text[1:] if text[:1] in ("-", "+") else text
    return digits.isascii() and digits.isdigit()


# ---- the list of jails ------------------------------------------------------------------------------------------


def start_time(pid: int) -> int:
    """The start time of the process (clock ticks since boot), 0 if it does not run: detects reuse of a pid."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
    except OSError:
        return 0


def table() -> dict:  # type: ignore[type-arg]
    """The list of jails without those that have ended; saves changes only under the lock."""
    state = base.load("jails", {"last": 0, "jails": []})
    kept, changed = [], False
    for jail in state["jails"]:
        if start_time(jail["holder"]) != jail["born"]:
            continue  # the machine was restarted, or the holder was killed
        if jail["dying"] and has_finished_dying(jail):
            finish(jail)
            continue
        if not jail["dying"] and not jail["params"]["persist"] and not processes(jail):
            # A jail without persist is removed with its last process (jail(8) "persist"), after dying like any jail.
            jail["dying"] = dying_duration()
            if not jail["dying"]:
                finish(jail)
                continue
            changed = True
        kept.append(jail)
    if changed or len(kept) != len(state["jails"]):
        state["jails"] = kept
        if base.locked.depth:
            base.save("jails", state)
    return state


def dying_duration() -> str:
    """How long a jail that ends now remains dying: ``forever``, until a time, or "" for not at all."""
    wish = base.knob("dying")
    return "" if wish == "0" else wish if wish == "forever" else str(time.time() + float(wish))


def has_finished_dying(jail: Jail) -> bool:
    """Whether its time of dying is over."""
    if jail["dying"] == "forever":
        return base.knob("dying") == "0"
    return float(jail["dying"]) <= time.time()


def find(key: str, *, dying: bool = False) -> Jail:
    """jail_getid(3): by jid if it is a number, else by name. Raises JailError with the messages of kern_jail_get()."""
    number = key.isascii() and key.isdigit()
    what = key if number else f'"{key}"'
    late = None
    for jail in table()["jails"]:
        if (jail["jid"] == int(key)) if number else (jail["name"] == key):
            if not jail["dying"]:
                return jail
            late = jail
    if late is not None:
        if dying:
            return late
        raise JailError(f"jail {what} is dying")
    raise JailError(f"jail {what} not found")


def processes(jail: Jail) -> list[int]:
    """Pids (in the host's namespace) of the jail's processes, without the holder."""
    try:
        space = os.readlink(f"/proc/{jail['holder']}/ns/pid")
    except OSError:
        return []
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != jail["holder"]:
            try:
                if os.readlink(f"/proc/{entry}/ns/pid") == space:
                    found.append(int(entry))
            except OSError:
                continue
    return found


def create(given: dict[str, object]) -> Jail:
    """jail_set(JAIL_CREATE) with converted parameters. Raises JailError with the messages of kern_jail_set()."""
    check(given)
    if not given.get("persist"):
        raise JailError("new jail must persist or attach")
    if given.get("vnet") == "new" and any(name in given for name in ("ip4", "ip4.addr", "ip6", "ip6.addr")):
        raise JailError("vnet jails cannot have IP address restrictions")
    if "ip4.addr" in given or "ip6.addr" in given:
        raise base.unsupported("ip4.addr and ip6.addr of a jail without vnet")
    name, jid = str(given.get("name", "")), int(given.get("jid", 0))  # type: ignore[call-overload]
    if not jid and name.isascii() and name.isdigit():
        jid = int(name)
    path = os.path.realpath(str(given.get("path", "/")))
    if not os.path.isdir(path):
        raise JailError(f"jail_set: {base.strerror(errno.ENOTDIR)}")
    with base.locked():
        state = table()
        if jid < 0:
            raise JailError("negative jid")
        if any(jail["jid"] == jid for jail in state["jails"]):
            raise JailError(f"jail {jid} already exists")
        if "." in name:
            find(name.rpartition(".")[0])
            raise JailError("prison limit exceeded")  # children.max of every jail here is 0
        if any(jail["name"] == name and not jail["dying"] for jail in state["jails"]):
            raise JailError(f'jail "{name}" already exists')
        if not jid:
            jid = next_jid(state)
        if name.isascii() and name.isdigit() and name != str(jid):
            raise JailError("name cannot be numeric (unless it is the jid)")
        name = name or str(jid)
        params = {key: value for key, value in given.items() if key not in ("jid", "name", "path")}
        holder = start_holder(path, name, params)
        jail = {"jid": jid, "name": name, "path": path, "holder": holder, "born": start_time(holder)}
        jail |= {"vnet": params.get("vnet") == "new", "params": params, "dying": ""}
        state["jails"].append(jail)
        state["jails"].sort(key=lambda each: each["jid"])
        base.save("jails", state)
    return jail


def check(given: dict[str, object]) -> None:
    """The values that kern_jail_set() rejects, in its order; EPERM and EINVAL have no messages of their own."""

    def check_range(key: str, low: int, high: int, number: int) -> None:
        if key in given and not low <= int(given[key]) <= high:  # type: ignore[call-overload]
            raise JailError(f"jail_set: {base.strerror(number)}")

    check_range("enforce_statfs", 0, 2, errno.EINVAL)
    for key in ("name", "host.hostname", "host.domainname", "host.hostuuid"):
        if len(str(given.get(key, ""))) >= (64 if key == "host.hostuuid" else 256):
            raise JailError(f"jail_set: {base.strerror(errno.ENAMETOOLONG)}")
    check_range("securelevel", -1, 1 << 31, errno.EPERM)
    check_range("children.max", -JAIL_MAX, JAIL_MAX - 1, errno.EPERM)
    check_range("devfs_ruleset", 0, 65535, errno.EINVAL)
    for key in given:
        if PARAMS.get(key, "").endswith("-"):
            raise JailError(f"jail_set: {base.strerror(errno.EINVAL)}")


def next_jid(state: dict) -> int:  # type: ignore[type-arg]
    """kern_jail.c get_next_prid(): one more than the last one, skipping those in use."""
    taken = {jail["jid"] for jail in state["jails"]}
    jid = state["last"] % JAIL_MAX + 1
    while jid in taken:
        jid = jid % JAIL_MAX + 1
    state["last"] = jid
    return int(jid)


def start_holder(path: str, name: str, params: dict[str, object]) -> int:
    """Start the holder process of the jail; returns its pid."""
    kinds = base.CLONE_NEWPID | base.CLONE_NEWUTS | base.CLONE_NEWIPC
    kinds |= base.CLONE_NEWNET if params.get("vnet") == "new" else 0
    back, front = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            base.unshare(kinds)
            _socket.sethostname(str(params.get("host.hostname", ""))[:64])
            holder = os.fork()
            if holder == 0:
                become_holder(path, front)
            os.write(front, b"%d" % holder)
        finally:
            os._exit(0)
    os.waitpid(middle, 0)
    os.close(front)
    answer = os.read(back, 32)
    # The holder's end of the pipe closes when the holder executes sleep(1); on failure it writes "!".
    rest = os.read(back, 1)
    os.close(back)
    if not answer or rest:
        raise JailError(f"jail_set: {base.strerror(errno.EAGAIN)}")
    return int(answer)


def become_holder(path: str, front: int) -> None:
    """Become the holder: drop everything of the caller, change to ``path``, sleep. Never returns."""
    try:
        os.setsid()
        os.chdir(path)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        limit = os.sysconf("SC_OPEN_MAX")
        os.closerange(3, front)
        os.closerange(front + 1, min(limit, 1 << 16))
        os.set_inheritable(front, False)
        # Orphans of the pid namespace become its children: SIG_IGN, which exec keeps, makes the kernel reap them.
        _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)
        for number in (_signal.SIGHUP, _signal.SIGINT, _signal.SIGTERM):
            _signal.signal(number, _signal.SIG_IGN)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, [])
        os.execve("/bin/sleep", ["sleep", "infinity"], {**os.environ, "FREEBSD_SHIM_JAIL": path})
    finally:
        os.write(front, b"!")
        os._exit(1)


# ---- into a jail ------------------------------------------------------------------------------------------------

# prison_priv_check() in kern_jail.c lists root's privileges in a jail; these capabilities have no counterpart there:
# DAC_READ_SEARCH (open_by_handle_at), SYS_MODULE, SYS_RAWIO, SYS_CHROOT, SYS_PACCT, SYS_ADMIN, SYS_BOOT, SYS_RESOURCE,
# SYS_TIME, SYS_TTY_CONFIG, MKNOD, AUDIT_CONTROL, MAC_*, SYSLOG, WAKE_ALARM, BLOCK_SUSPEND, AUDIT_READ, PERFMON, BPF,
# CHECKPOINT_RESTORE.
FORBIDDEN = [2, 16, 17, 18, 20, 21, 22, 24, 25, 26, 27, 30, 32, 33, 34, 35, 36, 37, 38, 39, 40]
CAP_LINUX_IMMUTABLE, CAP_NET_ADMIN, CAP_NET_RAW, CAP_IPC_LOCK = 9, 12, 13, 14


def forbidden(jail: Jail) -> list[int]:
    params, caps = jail["params"], list(FORBIDDEN)
    if not params.get("allow.chflags"):
        caps.append(CAP_LINUX_IMMUTABLE)
    if not params.get("allow.raw_sockets"):
        caps.append(CAP_NET_RAW)
    if not params.get("allow.mlock"):
        caps.append(CAP_IPC_LOCK)
    if not jail["vnet"]:
        caps.append(CAP_NET_ADMIN)
    return caps


def attach(jail: Jail, *, bound: bool = True) -> int:
    """jail_attach(2) in a child: returns 0 in a new process in the jail (at its /), and the child's pid in the caller.

    Afterwards the caller cannot do anything on the host: it is in the jail's namespaces and root as well. A child that
    is ``bound`` ends with the caller.
    """
    from shim import limits

    doors = limits.open_cgroups(jail["name"])
    root = os.open(f"/proc/{jail['holder']}/cwd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    holder = os.pidfd_open(jail["holder"])
    kinds = base.CLONE_NEWPID | base.CLONE_NEWUTS | base.CLONE_NEWIPC
    base.setns(holder, kinds | (base.CLONE_NEWNET if jail["vnet"] else 0))
    os.close(holder)
    os.fchdir(root)
    os.chroot(".")
    os.close(root)
    child = os.fork()
    if child == 0:
        if bound:
            base.prctl(base.PR_SET_PDEATHSIG, _signal.SIGKILL)
        limits.enter_cgroups(doors)
        for capability in forbidden(jail):
            try:
                base.prctl(base.PR_CAPBSET_DROP, capability)
            except OSError:
                continue  # a kernel with fewer capabilities
    return child


# ---- the end of a jail ------------------------------------------------------------------------------------------


def terminate(jail: Jail, timeout: float) -> None:
    """usr.sbin/jail/command.c term_procs(): SIGTERM to all processes, then wait up to ``timeout`` seconds."""
    signal_all(jail, _signal.SIGTERM, timeout)


def signal_all(jail: Jail, number: int, timeout: float) -> None:
    watched, poll = [], select.poll()
    for pid in processes(jail):
        try:
            fd = os.pidfd_open(pid)
            os.kill(pid, number)
        except OSError:
            continue
        watched.append(fd)
        poll.register(fd, select.POLLIN)
    end = time.monotonic() + timeout
    left = set(watched)
    while left and time.monotonic() < end:
        for fd, _ in poll.poll(max(0.0, end - time.monotonic()) * 1000):
            poll.unregister(fd)
            left.discard(fd)
    for fd in watched:
        os.close(fd)


def remove(jail: Jail) -> None:
    """jail_remove(2): kill all processes; the jail is gone, or dying (knob ``dying``). Mounts and rules remain."""
    with base.locked():
        state = table()
        known = [each for each in state["jails"] if each["jid"] == jail["jid"]]
        if not known or known[0]["dying"]:
            return
        wish = dying_duration()
        if not wish:
            finish(known[0])
            state["jails"].remove(known[0])
        else:
            signal_all(known[0], _signal.SIGKILL, 5.0)
            known[0]["dying"] = wish
        base.save("jails", state)


def finish(jail: Jail) -> None:
    """The last reference is released: borrowed interfaces return (sys/net/if.c vnet_if_return), the holder ends."""
    if jail["vnet"]:
        return_interfaces(jail["holder"])
    try:
        fd = os.pidfd_open(jail["holder"])
        os.kill(jail["holder"], _signal.SIGKILL)
    except OSError:
        return
    # The first process of a pid namespace ends after all others: then nothing of the jail runs any more.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll(5000)
    os.close(fd)


def return_interfaces(holder: int) -> None:
    from shim import net

    try:
        inside = net.net_of(holder)
    except OSError:
        return
    home = net.own_namespace()
    for link in inside.links():
        if link.driver == "epair":
            try:
                inside.change(link.index, net.attribute(net.LINK_NS_FD, home.to_bytes(4, "little")))
            except OSError as error:
                base.warnx(f"{link.name} does not go home: {base.strerror(error.errno or 0)}")
    inside.socket.close()
    os.close(home)
