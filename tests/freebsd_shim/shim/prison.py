"""Implement the kernel's part of jails (sys/kern/kern_jail.c) with Linux namespaces.

A jail is represented by a *holder*: a sleeping process, the first of a new pid namespace, with its own network (vnet),
host name and System V IPC namespaces. Its working directory is the jail's path. As on FreeBSD, jails share the host's
mount table: a mount or unmount below the path immediately affects the jail, and a path with a jail in it is busy.

Processes of a jail are confined by chroot(2) and lack the capabilities with which they could escape.
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
# (B boolean, I integer, S string, J jailsys). "+": can only be set at creation (CTLFLAG_RDTUN). "-": read-only.

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
ALLOW_NAMES = (
    "set_hostname reserved_ports unprivileged_proc_debug suser sysvipc raw_sockets chflags mount quotas socket_af "
    "mlock read_msgbuf nfsd extattr adjtime settime mount.devfs mount.fdescfs mount.fusefs mount.nullfs mount.procfs "
    "mount.tmpfs mount.zfs"
).split()
PARAMS.update({f"allow.{name}": "B" for name in ALLOW_NAMES})
# kern_jail.c JAIL_DEFAULT_ALLOW
DEFAULT_ALLOW = {"allow.set_hostname", "allow.reserved_ports", "allow.unprivileged_proc_debug", "allow.suser"}

JAILSYS_VALUES = ["disable", "new", "inherit"]
JAIL_MAX = 999999


class JailError(Exception):
    """An error with the text of libjail's jail_errmsg."""


def strip_no(name: str) -> str | None:
    """Return ``allow.raw_sockets`` for ``allow.noraw_sockets``, or None for a name without "no". See nononame()."""
    head, dot, tail = name.rpartition(".")
    return head + dot + tail[2:] if tail.startswith("no") else None


def look_up_parameter(name: str) -> tuple[str, str, bool]:
    """Return a parameter's name, its type, and whether ``name`` is its "no" form. Raises JailError.

    See jailparam_type().
    """
    if name in PARAMS:
        return name, PARAMS[name], False
    if base.read_osreldate() >= 1500000 and (name in ("meta", "env") or name.startswith(("meta.", "env."))):
        return name, "S", False  # jail(8) of 15.0: meta, env
    positive_name = strip_no(name)
    if positive_name is not None and PARAMS.get(positive_name, "").startswith("B"):
        return positive_name, PARAMS[positive_name], True
    raise JailError(f"unknown parameter: {name}")


def convert_parameter(name: str, text: str | None) -> tuple[str, object]:
    """Return a parameter's name and converted value. Raises JailError with the messages of jailparam_import()."""
    parameter, kind, is_negated = look_up_parameter(name)
    if kind[0] == "B":
        if text is None:
            return parameter, not is_negated
        if text.lower() in ("false", "true"):
            return parameter, (text.lower() == "true") != is_negated
        if not is_integer(text):
            raise JailError(f'{name}: unknown boolean value "{text}"')
        return parameter, (int(text) != 0) != is_negated
    if kind[0] == "J":
        if not text:  # "Allow setting a jailsys parameter to "new" in a booleanesque fashion."
            return parameter, "new"
        if text.lower() in JAILSYS_VALUES:
            return parameter, text.lower()
        if not is_integer(text):
            raise JailError(f'{name}: unknown jailsys value "{text}"')
        if not 0 <= int(text) < len(JAILSYS_VALUES):
            raise JailError(f"jail_set: {base.strerror(errno.EINVAL)}")
        return parameter, JAILSYS_VALUES[int(text)]
    if kind[0] == "I":
        if not is_integer(text or ""):
            raise JailError(f'{name}: non-integer value "{text or ""}"')
        return parameter, int(text or "")
    return parameter, text or ""


def is_integer(text: str) -> bool:
    digits = text[1:] if text[:1] in ("-", "+") else text
    return digits.isascii() and digits.isdigit()


# ---- the list of jails ------------------------------------------------------------------------------------------


def read_start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot, or 0 if it is not running.

    A process with a reused pid has a different start time.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
    except OSError:
        return 0


def load_state() -> dict:  # type: ignore[type-arg]
    """Return the state without stopped jails. Saves the state if it changed and this process holds the lock."""
    state = base.load("jails", {"last": 0, "jails": []})
    remaining_jails, has_changed = [], False
    for jail in state["jails"]:
        if read_start_time(jail["holder"]) != jail["born"]:
            continue  # the machine was restarted, or the holder was killed
        if jail["dying"] and has_finished_dying(jail):
            tear_down(jail)
            continue
        if not jail["dying"] and not jail["params"]["persist"] and not list_processes(jail):
            # A jail without persist begins to die when its last process exits (jail(8) "persist").
            jail["dying"] = compute_end_of_dying()
            if not jail["dying"]:
                tear_down(jail)
                continue
            has_changed = True
        remaining_jails.append(jail)
    if has_changed or len(remaining_jails) != len(state["jails"]):
        state["jails"] = remaining_jails
        if base.locked.depth:
            base.save("jails", state)
    return state


def compute_end_of_dying() -> str:
    """Return when a jail that ends now will stop dying: a time, ``forever``, or "" if it is removed immediately."""
    duration = base.read_knob("dying")
    return "" if duration == "0" else duration if duration == "forever" else str(time.time() + float(duration))


def has_finished_dying(jail: Jail) -> bool:
    """Return whether a dying jail can be removed now."""
    if jail["dying"] == "forever":
        return base.read_knob("dying") == "0"
    return float(jail["dying"]) <= time.time()


def find_jail(key: str, *, include_dying: bool = False) -> Jail:
    """Return the jail with this jid or name, like jail_getid(3). Raises JailError with the texts of kern_jail_get()."""
    is_number = key.isascii() and key.isdigit()
    description = key if is_number else f'"{key}"'
    dying_jail = None
    for jail in load_state()["jails"]:
        if (jail["jid"] == int(key)) if is_number else (jail["name"] == key):
            if not jail["dying"]:
                return jail
            dying_jail = jail
    if dying_jail is not None:
        if include_dying:
            return dying_jail
        raise JailError(f"jail {description} is dying")
    raise JailError(f"jail {description} not found")


def list_processes(jail: Jail) -> list[int]:
    """Return the pids of the jail's processes in the host's namespace, without the holder."""
    try:
        namespace = os.readlink(f"/proc/{jail['holder']}/ns/pid")
    except OSError:
        return []
    pids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != jail["holder"]:
            try:
                if os.readlink(f"/proc/{entry}/ns/pid") == namespace:
                    pids.append(int(entry))
            except OSError:
                continue
    return pids


def create(settings: dict[str, object]) -> Jail:
    """Create a jail, like jail_set(JAIL_CREATE). Raises JailError with the messages of kern_jail_set()."""
    check_parameters(settings)
    if not settings.get("persist"):
        raise JailError("new jail must persist or attach")
    if settings.get("vnet") == "new" and any(name in settings for name in ("ip4", "ip4.addr", "ip6", "ip6.addr")):
        raise JailError("vnet jails cannot have IP address restrictions")
    if "ip4.addr" in settings or "ip6.addr" in settings:
        raise base.unsupported("ip4.addr and ip6.addr of a jail without vnet")
    name, jid = str(settings.get("name", "")), int(settings.get("jid", 0))  # type: ignore[call-overload]
    if not jid and name.isascii() and name.isdigit():
        jid = int(name)
    path = os.path.realpath(str(settings.get("path", "/")))
    if not os.path.isdir(path):
        raise JailError(f"jail_set: {base.strerror(errno.ENOTDIR)}")
    with base.locked():
        state = load_state()
        if jid < 0:
            raise JailError("negative jid")
        if any(jail["jid"] == jid for jail in state["jails"]):
            raise JailError(f"jail {jid} already exists")
        if "." in name:
            find_jail(name.rpartition(".")[0])
            raise JailError("prison limit exceeded")  # children.max of every jail here is 0
        if any(jail["name"] == name and not jail["dying"] for jail in state["jails"]):
            raise JailError(f'jail "{name}" already exists')
        if not jid:
            jid = choose_next_jid(state)
        if name.isascii() and name.isdigit() and name != str(jid):
            raise JailError("name cannot be numeric (unless it is the jid)")
        name = name or str(jid)
        params = {key: value for key, value in settings.items() if key not in ("jid", "name", "path")}
        holder = start_holder(path, name, params)
        jail = {"jid": jid, "name": name, "path": path, "holder": holder, "born": read_start_time(holder)}
        jail |= {"vnet": params.get("vnet") == "new", "params": params, "dying": ""}
        state["jails"].append(jail)
        state["jails"].sort(key=lambda each: each["jid"])
        base.save("jails", state)
    return jail


def check_parameters(settings: dict[str, object]) -> None:
    """Raise JailError for values that kern_jail_set() rejects. Checks them in the same order."""

    def check_range(key: str, low: int, high: int, error_number: int) -> None:
        if key in settings and not low <= int(settings[key]) <= high:  # type: ignore[call-overload]
            raise JailError(f"jail_set: {base.strerror(error_number)}")

    check_range("enforce_statfs", 0, 2, errno.EINVAL)
    for key in ("name", "host.hostname", "host.domainname", "host.hostuuid"):
        if len(str(settings.get(key, ""))) >= (64 if key == "host.hostuuid" else 256):
            raise JailError(f"jail_set: {base.strerror(errno.ENAMETOOLONG)}")
    check_range("securelevel", -1, 1 << 31, errno.EPERM)
    check_range("children.max", -JAIL_MAX, JAIL_MAX - 1, errno.EPERM)
    check_range("devfs_ruleset", 0, 65535, errno.EINVAL)
    for key in settings:
        if PARAMS.get(key, "").endswith("-"):
            raise JailError(f"jail_set: {base.strerror(errno.EINVAL)}")


def choose_next_jid(state: dict) -> int:  # type: ignore[type-arg]
    """Return the next unused jid after the most recent one. See get_next_prid() in kern_jail.c."""
    used_jids = {jail["jid"] for jail in state["jails"]}
    jid = state["last"] % JAIL_MAX + 1
    while jid in used_jids:
        jid = jid % JAIL_MAX + 1
    state["last"] = jid
    return int(jid)


def start_holder(path: str, name: str, params: dict[str, object]) -> int:
    """Start the holder process of a jail, and return its pid."""
    namespace_flags = base.CLONE_NEWPID | base.CLONE_NEWUTS | base.CLONE_NEWIPC
    namespace_flags |= base.CLONE_NEWNET if params.get("vnet") == "new" else 0
    read_end, write_end = os.pipe()
    intermediate_pid = os.fork()
    if intermediate_pid == 0:
        try:
            base.unshare(namespace_flags)
            _socket.sethostname(str(params.get("host.hostname", ""))[:64])
            holder = os.fork()
            if holder == 0:
                become_holder(path, write_end)
            os.write(write_end, b"%d" % holder)
        finally:
            os._exit(0)
    os.waitpid(intermediate_pid, 0)
    os.close(write_end)
    holder_pid = os.read(read_end, 32)
    # The holder's end of the pipe closes when the holder executes sleep(1); on failure it writes "!".
    failure = os.read(read_end, 1)
    os.close(read_end)
    if not holder_pid or failure:
        raise JailError(f"jail_set: {base.strerror(errno.EAGAIN)}")
    return int(holder_pid)


def become_holder(path: str, write_end: int) -> None:
    """Turn this process into the holder: close inherited files, change to ``path``, and sleep. Never returns."""
    try:
        os.setsid()
        os.chdir(path)
        null_fd = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null_fd, fd)
        descriptor_limit = os.sysconf("SC_OPEN_MAX")
        os.closerange(3, write_end)
        os.closerange(write_end + 1, min(descriptor_limit, 1 << 16))
        os.set_inheritable(write_end, False)
        # Orphans in the pid namespace become children of the holder. SIG_IGN, which exec keeps, makes the kernel reap
        # them.
        _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)
        for number in (_signal.SIGHUP, _signal.SIGINT, _signal.SIGTERM):
            _signal.signal(number, _signal.SIG_IGN)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, [])
        os.execve("/bin/sleep", ["sleep", "infinity"], {**os.environ, "FREEBSD_SHIM_JAIL": path})
    finally:
        os.write(write_end, b"!")
        os._exit(1)


# ---- into a jail ------------------------------------------------------------------------------------------------

# prison_priv_check() in kern_jail.c lists root's privileges in a jail; these capabilities have no counterpart there:
# DAC_READ_SEARCH (open_by_handle_at), SYS_MODULE, SYS_RAWIO, SYS_CHROOT, SYS_PACCT, SYS_ADMIN, SYS_BOOT, SYS_RESOURCE,
# SYS_TIME, SYS_TTY_CONFIG, MKNOD, AUDIT_CONTROL, MAC_*, SYSLOG, WAKE_ALARM, BLOCK_SUSPEND, AUDIT_READ, PERFMON, BPF,
# CHECKPOINT_RESTORE.
FORBIDDEN_CAPABILITIES = [2, 16, 17, 18, 20, 21, 22, 24, 25, 26, 27, 30, 32, 33, 34, 35, 36, 37, 38, 39, 40]
CAP_LINUX_IMMUTABLE, CAP_NET_ADMIN, CAP_NET_RAW, CAP_IPC_LOCK = 9, 12, 13, 14


def get_forbidden_capabilities(jail: Jail) -> list[int]:
    params, capabilities = jail["params"], list(FORBIDDEN_CAPABILITIES)
    if not params.get("allow.chflags"):
        capabilities.append(CAP_LINUX_IMMUTABLE)
    if not params.get("allow.raw_sockets"):
        capabilities.append(CAP_NET_RAW)
    if not params.get("allow.mlock"):
        capabilities.append(CAP_IPC_LOCK)
    if not jail["vnet"]:
        capabilities.append(CAP_NET_ADMIN)
    return capabilities


def attach_to_jail(jail: Jail, *, dies_with_caller: bool = True) -> int:
    """Fork a child process in the jail, like jail_attach(2). Returns 0 in the child, and the child's pid in the caller.

    Afterwards, the caller is also in the jail's namespaces and root directory, so it cannot do anything on the host.
    With ``dies_with_caller``, the kernel kills the child when the caller exits.
    """
    from shim import limits

    cgroup_fds = limits.open_cgroups(jail["name"])
    root_fd = os.open(f"/proc/{jail['holder']}/cwd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    holder_fd = os.pidfd_open(jail["holder"])
    namespace_flags = base.CLONE_NEWPID | base.CLONE_NEWUTS | base.CLONE_NEWIPC
    base.setns(holder_fd, namespace_flags | (base.CLONE_NEWNET if jail["vnet"] else 0))
    os.close(holder_fd)
    os.fchdir(root_fd)
    os.chroot(".")
    os.close(root_fd)
    child = os.fork()
    if child == 0:
        if dies_with_caller:
            base.prctl(base.PR_SET_PDEATHSIG, _signal.SIGKILL)
        limits.enter_cgroups(cgroup_fds)
        for capability in get_forbidden_capabilities(jail):
            try:
                base.prctl(base.PR_CAPBSET_DROP, capability)
            except OSError:
                continue  # The kernel does not have this capability.
    return child


# ---- the end of a jail ------------------------------------------------------------------------------------------


def terminate_processes(jail: Jail, timeout: float) -> None:
    """Send SIGTERM to all processes, and wait up to ``timeout`` seconds for them to exit. See term_procs()."""
    signal_and_wait(jail, _signal.SIGTERM, timeout)


def signal_and_wait(jail: Jail, number: int, timeout: float) -> None:
    pidfds, poll = [], select.poll()
    for pid in list_processes(jail):
        try:
            fd = os.pidfd_open(pid)
            os.kill(pid, number)
        except OSError:
            continue
        pidfds.append(fd)
        poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + timeout
    pending_fds = set(pidfds)
    while pending_fds and time.monotonic() < deadline:
        for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            poll.unregister(fd)
            pending_fds.discard(fd)
    for fd in pidfds:
        os.close(fd)


def remove(jail: Jail) -> None:
    """Kill all processes of a jail and remove it, but not its mounts and rules. See jail_remove(2).

    The knob ``dying`` determines how long the jail stays dying.
    """
    with base.locked():
        state = load_state()
        matching_jails = [each for each in state["jails"] if each["jid"] == jail["jid"]]
        if not matching_jails or matching_jails[0]["dying"]:
            return
        dying_until = compute_end_of_dying()
        if not dying_until:
            tear_down(matching_jails[0])
            state["jails"].remove(matching_jails[0])
        else:
            signal_and_wait(matching_jails[0], _signal.SIGKILL, 5.0)
            matching_jails[0]["dying"] = dying_until
        base.save("jails", state)


def tear_down(jail: Jail) -> None:
    """Return the jail's interfaces to the host, like vnet_if_return() in sys/net/if.c, and kill the holder."""
    if jail["vnet"]:
        return_interfaces(jail["holder"])
    try:
        fd = os.pidfd_open(jail["holder"])
        os.kill(jail["holder"], _signal.SIGKILL)
    except OSError:
        return
    # The first process of a pid namespace exits after all other processes, so no process of the jail runs after that.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll(5000)
    os.close(fd)


def return_interfaces(holder: int) -> None:
    from shim import net

    try:
        jail_socket = net.open_netlink(holder)
    except OSError:
        return
    own_namespace_fd = net.open_own_namespace()
    for link in jail_socket.list_links():
        if link.driver == "epair":
            try:
                jail_socket.change_link(
                    link.index, net.pack_attribute(net.LINK_NS_FD, own_namespace_fd.to_bytes(4, "little"))
                )
            except OSError as error:
                base.warnx(f"{link.name} cannot be returned to the host: {base.strerror(error.errno or 0)}")
    jail_socket.socket.close()
    os.close(own_namespace_fd)
