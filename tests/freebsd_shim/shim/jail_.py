"""jail(8). Order and messages: usr.sbin/jail/{jail,config,command,state}.c; there is no jail.conf."""

from __future__ import annotations

import os
import stat
import sys

from shim import base, prison

USAGE = """\
usage: jail [-dhilqv] [-J jid_file] [-u username] [-U username]
            -[cmr] param=value ... [command=command ...]
       jail [-dqv] [-f file] [-e separator] -[cmr] [jail]
       jail [-qv] [-f file] -[rR] ['*' | jail ...]
       jail [-dhilqv] [-J jid_file] [-u username] [-U username]
            [-n jailname] [-s securelevel]
            path hostname [ip[,...]] command ..."""

# usr.sbin/jail/config.c intparams[]: parameters that only jail(8) itself uses, with the types that it checks.
PSEUDO = {
    "allow.dying": "B",
    "command": "",
    "depend": "",
    "exec.clean": "B",
    "exec.consolelog": "",
    "exec.created": "",
    "exec.fib": "I",
    "exec.jail_user": "",
    "exec.poststart": "",
    "exec.poststop": "",
    "exec.prepare": "",
    "exec.prestart": "",
    "exec.prestop": "",
    "exec.release": "",
    "exec.start": "",
    "exec.stop": "",
    "exec.system_jail_user": "B",
    "exec.system_user": "",
    "exec.timeout": "I",
    "interface": "",
    "ip_hostname": "B",
    "mount": "",
    "mount.devfs": "B",
    "mount.fdescfs": "B",
    "mount.fstab": "",
    "mount.procfs": "B",
    "stop.timeout": "I",
    "vnet.interface": "",
    "zfs.dataset": "",
}
# Accepted and, as for a jail from the command line on FreeBSD, without effect: only "jail -r" with jail.conf uses them.
ONLY_AT_STOP = {"exec.stop", "exec.prestop", "exec.poststop", "exec.release", "stop.timeout"}
BUILT = ONLY_AT_STOP | {
    "command",
    "exec.clean",
    "exec.poststart",
    "exec.prestart",
    "exec.start",
    "exec.timeout",
    "mount",
    "mount.devfs",
    "vnet.interface",
}
# command.c: a command with one of these goes through /bin/sh -c
SHELL = set("!\"$&'()*;<>?[\\]`{|}~")


class Failed(Exception):
    """The jail's work failed, and the error has been printed."""


class Work:
    """One jail in jail(8) (struct cfjail of a command line: it has no name to print)."""

    def __init__(self) -> None:
        self.given: dict[str, list[str]] = {}
        self.values: dict[str, object] = {}
        self.jail: prison.Jail | None = None

    def add(self, word: str) -> None:
        """config.c add_param(): later values are appended to earlier ones; without a value they replace them."""
        name, equals, value = word.partition("=")
        for known in list(self.given):
            if same_option(known, name):
                if name in ("jid", "name"):
                    base.warnx(f'cannot redefine parameter "{name}".')
                    raise Failed
                values = self.given.pop(known)
                self.given[name] = [*values, value] if equals else []
                return
        self.given[name] = [value] if equals else []

    def last(self, name: str) -> str | None:
        values = self.given.get(name)
        return values[-1] if values else None

    def flag(self, name: str) -> bool:
        """config.c bool_param()."""
        for known, values in self.given.items():
            if same_option(known, name):
                on = not values or values[-1].lower() == "true" or (prison.is_integer(values[-1]) and int(values[-1]))
                return bool(on) != (known != name)
        return False

    def check(self) -> None:
        """check_intparams() and import_params()."""
        bad = False
        for name, values in self.given.items():
            own = name if name in PSEUDO else prison.positive(name) or name
            if own not in PSEUDO:
                try:
                    key, value = prison.convert(name, values[-1] if values else None)
                    self.values[key] = value
                except prison.JailError as error:
                    base.warnx(str(error))
                    bad = True
                continue
            kind, value = PSEUDO[own], values[-1] if values else None
            if value is not None and kind == "B" and not boolean(value):
                base.warnx(f'{name}: unknown boolean value "{value}"')
                bad = True
            elif value is not None and kind == "I" and not prison.is_integer(value):
                base.warnx(f'{name}: non-integer value "{value}"')
                bad = True
            elif own not in BUILT:
                raise base.unsupported(f"the parameter {own}")
        if bad:
            raise Failed

    def running(self) -> prison.Jail | None:
        """running_jid(): the live jail of that jid or name."""
        key = self.last("jid") or self.last("name")
        try:
            return prison.find(key) if key else None
        except prison.JailError:
            return None

    def label(self) -> str:
        return self.last("jid") or self.last("name") or ""


def boolean(value: str) -> bool:
    return value.lower() in ("true", "false") or prison.is_integer(value)


def same_option(one: str, other: str) -> bool:
    """config.c equalopts(): with or without "no"."""
    return one == other or prison.positive(one) == other or prison.positive(other) == one


def main(argv: list[str]) -> int:
    try:
        options, rest = base.getopt(argv, "cde:f:hiJ:lmn:p:qrRs:u:U:v")
    except base.BadOption:
        raise base.usage(USAGE) from None
    option_letters = [letter for letter, _ in options]
    for letter in option_letters:
        if letter in "efhJlpuUv":
            raise base.unsupported(f"-{letter}")
    work = Work()
    conf = True
    for letter, value in options:
        if letter in "ns":
            work.add(("name=" if letter == "n" else "securelevel=") + value)
            conf = False
    operations = {letter for letter in option_letters if letter in "cmrR"}
    if "d" in option_letters:
        base.warnx("the 'allow.dying' parameter and '-d' flag are deprecated and have no effect.")
    quiet = -1 if "i" in option_letters or "q" in option_letters else 0
    if operations and operations <= {"r", "R"}:
        return stop(rest, conf, "R" in operations, quiet)
    if not operations:
        if len(rest) < 4 or not rest[0].startswith("/"):
            raise base.usage(USAGE)
        raise base.unsupported("the old command line with fixed parameters")
    if operations - {"c"} and operations - {"m"}:
        raise base.unsupported("-" + "".join(sorted(operations)) + " together")
    if not (len(rest) > 1 or (len(rest) == 1 and "=" in rest[0])):
        if not conf:
            raise base.usage(USAGE)
        # "From the config file": config.c load_config() → err(1, "%s", cfname)
        raise base.err(1, "/etc/jail.conf", 2)
    try:
        gather(work, rest)
        if operations == {"c"}:
            return start(work, "i" in option_letters)
        return update(work)
    except Failed:
        return 1


def gather(work: Work, words: list[str]) -> None:
    """jail.c main(): "command" takes all following words."""
    for at, word in enumerate(words):
        if word == "command" or word.startswith("command="):
            work.given["command"] = ([word[8:]] if "=" in word else []) + words[at + 1 :]
            return
        work.add(word)


# ---- jail -c ----------------------------------------------------------------------------------------------------


def start(work: Work, print_jid: bool) -> int:
    """The commands of startcommands[] in order; a failure undoes the previous ones in reverse order."""
    work.check()
    if work.running() is not None:
        base.warnx(f'"{work.label()}" already exists')
        return 1
    steps = [
        ("mount", lambda one: mount_line(work, one)),
        ("mount.devfs", lambda _: mount_devfs(work)),
        ("exec.prestart", lambda one: command(work, one, inside=False)),
        ("", lambda _: create(work, print_jid)),
        ("vnet.interface", lambda one: interface(work, one)),
        ("exec.start", lambda one: command(work, one, inside=True)),
        ("command", lambda _: command_words(work)),
        ("exec.poststart", lambda one: command(work, one, inside=False)),
    ]
    done: list[tuple[str, str]] = []
    try:
        for name, step in steps:
            for one in operations_of(work, name):
                done.append((name, one))  # the failed step is undone, too: next_command(create_failed)
                step(one)
    except Failed:
        for name, one in reversed(done):
            undo(work, name, one)
        return 1
    clear_persist(work)
    return 0


def operations_of(work: Work, name: str) -> list[str]:
    """One for each value; the operation, mount.devfs and the command run once."""
    if name == "":
        return [""]
    if name == "mount.devfs":
        return [""] if work.flag(name) else []
    if name == "command":
        return [""] if work.given.get(name) else []
    return [one for one in work.given.get(name, []) if one]


def mount_line(work: Work, line: str) -> None:
    from shim import mount_

    words = line.split()
    if len(words) < 3:
        base.warnx(f"mount: {line}: missing information")
        raise Failed
    check_path(work, "mount", words[1])
    arguments = ["-t", words[2], *(["-o", words[3]] if len(words) > 3 else []), words[0], words[1]]
    call(mount_.main, "mount", "/sbin/mount", arguments)


def mount_devfs(work: Work) -> None:
    from shim import mount_

    path = work.last("path")
    if path is None:
        base.warnx("mount.devfs: no jail root path defined")
        raise Failed
    check_path(work, "mount.devfs", f"{path}/dev")
    ruleset = work.last("devfs_ruleset") or "4"  # "devfsrules_jail"
    call(mount_.main, "mount", "/sbin/mount", ["-t", "devfs", f"-oruleset={ruleset}", ".", f"{path}/dev"])


def check_path(work: Work, name: str, path: str) -> None:
    """command.c check_path(): absolute, and without symbolic links below the jail's path."""
    if not path.startswith("/"):
        base.warnx(f"{name}: {path}: not an absolute pathname")
        raise Failed
    root = work.last("path") or ""
    if not path.startswith(root + "/"):
        return
    where = root
    for part in path[len(root) + 1 :].split("/"):
        where += "/" + part
        try:
            mode = os.lstat(where).st_mode
        except OSError as error:
            base.warnx(f"{name}: {where}: {base.strerror(error.errno or 0)}")
            raise Failed from None
        if stat.S_ISLNK(mode):
            base.warnx(f"{name}: {where} is a symbolic link")
            raise Failed


def create(work: Work, print_jid: bool) -> None:
    """jail.c create_jail()."""
    path = work.last("path")
    if path is not None:
        try:
            if not stat.S_ISDIR(os.stat(path).st_mode):
                base.warnx(f"path {path}: Not a directory")
                raise Failed
        except OSError as error:
            base.warnx(f"path {path}: {base.strerror(error.errno or 0)}")
            raise Failed from None
    values = dict(work.values)
    if any(work.given.get(name) for name in ("exec.start", "command", "exec.poststart")):
        values["persist"] = True  # 'except that "persist" is always set when there are commands to run later'
    try:
        work.jail = prison.create(values)
    except prison.JailError as error:
        base.warnx(str(error))
        raise Failed from None
    if print_jid:
        base.say(str(work.jail["jid"]))
        sys.stdout.flush()


def interface(work: Work, name: str) -> None:
    from shim import ifconfig_

    assert work.jail is not None
    call(ifconfig_.main, "ifconfig", "/sbin/ifconfig", [name, "vnet", work.label() or str(work.jail["jid"])])


def call(main_: object, prog: str, shown: str, arguments: list[str]) -> None:
    """Run another command of the shim in this process; its failure is reported like that of any command."""
    own, base.PROG = base.PROG, prog
    try:
        code = main_(arguments)  # type: ignore[operator]
    except SystemExit as exit_:
        if exit_.code == 70:
            raise
        code = exit_.code
    finally:
        base.PROG = own
    if code:
        base.warnx(f"{shown} {' '.join(arguments)}: failed")
        raise Failed


def command(work: Work, line: str, *, inside: bool) -> None:
    """command.c run_command(), default_command: through the shell only if necessary; a final "&" means background."""
    at = next((place for place, letter in enumerate(line) if letter in SHELL), -1)
    background = at >= 0 and line[at:] == "&"
    plain = (line[:at] if background else line).split()
    words = ["/bin/sh", "-c", line] if at >= 0 and not background else plain
    if words:
        execute(work, words, inside=inside, background=background)


def command_words(work: Work) -> None:
    execute(work, work.given["command"], inside=True, background=False)


def execute(work: Work, words: list[str], *, inside: bool, background: bool) -> None:
    limit = int(work.last("exec.timeout") or 0)
    shown = " ".join(words)
    child = os.fork()
    if child == 0:
        work_in_child(work, words, inside, background)
    if background:
        return
    status = wait_for_child(child, limit)
    if status is None:
        base.warnx(f"{shown}: timed out")
        raise Failed
    if os.WIFSIGNALED(status):
        base.warnx(f"{shown}: exited on signal {os.WTERMSIG(status)}")
        raise Failed
    if os.WEXITSTATUS(status):
        base.warnx(f"{shown}: failed")
        raise Failed


def wait_for_child(child: int, limit: int) -> int | None:
    """The child's wait status; None if it is not done after ``limit`` seconds (0: wait forever). It is not killed."""
    if not limit:
        return os.waitpid(child, 0)[1]
    import select

    fd = os.pidfd_open(child)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    ready = poll.poll(limit * 1000)
    os.close(fd)
    return os.waitpid(child, 0)[1] if ready else None


def work_in_child(work: Work, words: list[str], inside: bool, background: bool) -> None:
    """The forked half of run_command(). Never returns."""
    from shim import jexec_

    code = 1
    try:
        if background:
            os.setsid()
        if inside:
            assert work.jail is not None
            child = prison.attach(work.jail, bound=not background)
            if child:
                jexec_.represent(child)
            if background and os.fork():
                os._exit(0)  # so that the command is the holder's child, not one of the host's init
        if work.flag("exec.clean"):
            environ = {"PATH": "/bin:/usr/bin", "USER": "root", "HOME": "/root", "SHELL": "/bin/sh"}
            if "TERM" in os.environ:
                environ["TERM"] = os.environ["TERM"]
            os.environ.clear()
            os.environ.update(environ)
        os.closerange(3, 1 << 16)
        try:
            os.execvp(words[0], words)
        except OSError as error:
            base.warnx(f"exec {words[0]}: {base.strerror(error.errno or 0)}")
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    finally:
        sys.stderr.flush()
        os._exit(code)


def undo(work: Work, name: str, one: str) -> None:
    """startcommands[] in reverse order after a failure."""
    from shim import ifconfig_, mount_

    try:
        if name == "" and work.jail is not None:
            prison.remove(work.jail)
        elif name == "vnet.interface" and work.jail is not None:
            call(ifconfig_.main, "ifconfig", "/sbin/ifconfig", [one, "-vnet", work.label()])
        elif name == "mount.devfs" and mount_.is_mounted(f"{work.last('path')}/dev", "devfs"):
            call(mount_.umount_main, "umount", "/sbin/umount", [f"{work.last('path')}/dev"])
        elif name == "mount" and mount_.is_mounted(one.split()[1], one.split()[2]):
            call(mount_.umount_main, "umount", "/sbin/umount", [one.split()[1]])
    except (Failed, IndexError):
        return


def clear_persist(work: Work) -> None:
    """jail.c clear_persist(): a jail without persist is removed unless a process runs in it."""
    assert work.jail is not None
    if work.values.get("persist"):
        return
    with base.locked():
        state = prison.table()
        for jail in state["jails"]:
            if jail["jid"] == work.jail["jid"]:
                jail["params"]["persist"] = False
        base.save("jails", state)
        prison.table()


# ---- jail -m ----------------------------------------------------------------------------------------------------


def update(work: Work) -> int:
    """JF_SET: rdtun_params(), then jail_set(JAIL_UPDATE)."""
    work.check()
    found = work.running()
    if found is None:
        base.warnx(f'"{work.label()}" not found' if work.label() else "no jail specified")
        return 1
    changes = {key: value for key, value in work.values.items() if key != "jid"}
    for key, value in changes.items():
        now = found["path"] if key == "path" else found["params"].get(key)
        if prison.PARAMS.get(key, "").endswith("+") and value != now:
            base.warnx(f"{key} cannot be changed after creation")
            return 1
    try:
        prison.check(changes)
    except prison.JailError as error:
        base.warnx(str(error))
        return 1
    with base.locked():
        state = prison.table()
        for jail in state["jails"]:
            if jail["jid"] == found["jid"]:
                jail["name"] = changes.pop("name", jail["name"])
                changes.pop("path", None)
                jail["params"].update(changes)
        base.save("jails", state)
    if "host.hostname" in changes:
        rename_host(found, str(changes["host.hostname"]))
    return 0


def rename_host(jail: prison.Jail, hostname: str) -> None:
    import _socket

    fd = os.open(f"/proc/{jail['holder']}/ns/uts", os.O_RDONLY)
    child = os.fork()
    if child == 0:
        try:
            base.setns(fd, base.CLONE_NEWUTS)
            _socket.sethostname(hostname[:64])
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(fd)


# ---- jail -r, -R ------------------------------------------------------------------------------------------------


def stop(names: list[str], conf: bool, by_force: bool, quiet: int) -> int:
    """Without jail.conf, both -r and -R run stopcommands[] without parameters: exec.stop is no longer known."""
    if not conf or not names:
        raise base.usage(USAGE)
    if not by_force and any("=" in name for name in names):
        raise base.usage(USAGE)
    note = len(names) > 1 or "*" in names
    code, chosen = 0, []
    for name in names:
        if name == "*":
            # state.c start_state(): -r matches "*" against jail.conf, -R against running jails
            chosen += [jail for jail in prison.table()["jails"] if by_force and not jail["dying"]]
            continue
        try:
            chosen.append(prison.find(name, dying=True))
        except prison.JailError:
            base.warnx(f'"{name}" not found')
            code = 1
    for jail in chosen:
        if not jail["dying"]:
            prison.terminate(jail, 10)  # DEFAULT_STOP_TIMEOUT: stop.timeout belonged to jail(8) alone, and is lost
            prison.remove(jail)
        if note and quiet == 0:
            base.say(f"{jail['name']}: removed")
    return code
