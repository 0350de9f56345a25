"""jail(8) without jail.conf, with the order and messages of usr.sbin/jail/{jail,config,command,state}.c."""

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
PSEUDO_PARAMETERS = {
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
# Accepted without effect, as for any jail without jail.conf: only "jail -r" with jail.conf uses them.
STOP_PARAMETERS = {"exec.stop", "exec.prestop", "exec.poststop", "exec.release", "stop.timeout"}
SUPPORTED_PARAMETERS = STOP_PARAMETERS | {
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
# command.c: a command that contains one of these is run with /bin/sh -c
SHELL_CHARACTERS = set("!\"$&'()*;<>?[\\]`{|}~")


class StepFailed(Exception):
    """A step failed. The error has been printed."""


class JailConfig:
    """The configuration of one jail, from the command line (struct cfjail)."""

    def __init__(self) -> None:
        self.settings: dict[str, list[str]] = {}
        self.values: dict[str, object] = {}
        self.jail: prison.Jail | None = None

    def add(self, word: str) -> None:
        """Add a ``name=value`` argument. See add_param() in config.c.

        A value is appended to earlier values of the parameter. An argument without a value removes all earlier values.
        """
        name, equals, value = word.partition("=")
        for existing in list(self.settings):
            if is_same_option(existing, name):
                if name in ("jid", "name"):
                    base.warnx(f'cannot redefine parameter "{name}".')
                    raise StepFailed
                values = self.settings.pop(existing)
                self.settings[name] = [*values, value] if equals else []
                return
        self.settings[name] = [value] if equals else []

    def get_last_value(self, name: str) -> str | None:
        values = self.settings.get(name)
        return values[-1] if values else None

    def is_set(self, name: str) -> bool:
        """Return whether a boolean parameter is set. See bool_param() in config.c."""
        for existing, values in self.settings.items():
            if is_same_option(existing, name):
                is_on = (
                    not values or values[-1].lower() == "true" or (prison.is_integer(values[-1]) and int(values[-1]))
                )
                return bool(is_on) != (existing != name)
        return False

    def check_settings(self) -> None:
        """Check and convert the settings. See check_intparams() and import_params()."""
        has_errors = False
        for name, values in self.settings.items():
            option = name if name in PSEUDO_PARAMETERS else prison.strip_no(name) or name
            if option not in PSEUDO_PARAMETERS:
                try:
                    key, value = prison.convert_parameter(name, values[-1] if values else None)
                    self.values[key] = value
                except prison.JailError as error:
                    base.warnx(str(error))
                    has_errors = True
                continue
            type_, value = PSEUDO_PARAMETERS[option], values[-1] if values else None
            if value is not None and type_ == "B" and not is_boolean(value):
                base.warnx(f'{name}: unknown boolean value "{value}"')
                has_errors = True
            elif value is not None and type_ == "I" and not prison.is_integer(value):
                base.warnx(f'{name}: non-integer value "{value}"')
                has_errors = True
            elif option not in SUPPORTED_PARAMETERS:
                raise base.unsupported(f"the parameter {option}")
        if has_errors:
            raise StepFailed

    def find_running(self) -> prison.Jail | None:
        """Return the running jail with this jid or name, or None if there is none. See running_jid()."""
        key = self.get_last_value("jid") or self.get_last_value("name")
        try:
            return prison.find_jail(key) if key else None
        except prison.JailError:
            return None

    def get_label(self) -> str:
        return self.get_last_value("jid") or self.get_last_value("name") or ""


def is_boolean(value: str) -> bool:
    return value.lower() in ("true", "false") or prison.is_integer(value)


def is_same_option(first: str, second: str) -> bool:
    """Return whether two names denote the same option, with or without "no". See equalopts() in config.c."""
    return first == second or prison.strip_no(first) == second or prison.strip_no(second) == first


def main(argv: list[str]) -> int:
    try:
        options, arguments = base.getopt(argv, "cde:f:hiJ:lmn:p:qrRs:u:U:v")
    except base.BadOption:
        raise base.usage(USAGE) from None
    option_letters = [letter for letter, _ in options]
    for letter in option_letters:
        if letter in "efhJlpuUv":
            raise base.unsupported(f"-{letter}")
    config = JailConfig()
    may_use_jail_conf = True
    for letter, value in options:
        if letter in "ns":
            config.add(("name=" if letter == "n" else "securelevel=") + value)
            may_use_jail_conf = False
    operations = {letter for letter in option_letters if letter in "cmrR"}
    if "d" in option_letters:
        base.warnx("the 'allow.dying' parameter and '-d' flag are deprecated and have no effect.")
    verbosity = -1 if "i" in option_letters or "q" in option_letters else 0
    if operations and operations <= {"r", "R"}:
        return stop_jails(arguments, may_use_jail_conf, "R" in operations, verbosity)
    if not operations:
        if len(arguments) < 4 or not arguments[0].startswith("/"):
            raise base.usage(USAGE)
        raise base.unsupported("the old command line with fixed parameters")
    if operations - {"c"} and operations - {"m"}:
        raise base.unsupported("-" + "".join(sorted(operations)) + " together")
    if not (len(arguments) > 1 or (len(arguments) == 1 and "=" in arguments[0])):
        if not may_use_jail_conf:
            raise base.usage(USAGE)
        # "From the config file": config.c load_config() → err(1, "%s", cfname)
        raise base.err(1, "/etc/jail.conf", 2)
    try:
        collect_settings(config, arguments)
        if operations == {"c"}:
            return start_jail(config, "i" in option_letters)
        return update_jail(config)
    except StepFailed:
        return 1


def collect_settings(config: JailConfig, words: list[str]) -> None:
    """Add the arguments to the configuration. ``command`` consumes all following words. See main() in jail.c."""
    for index, word in enumerate(words):
        if word == "command" or word.startswith("command="):
            config.settings["command"] = ([word[8:]] if "=" in word else []) + words[index + 1 :]
            return
        config.add(word)


# ---- jail -c ----------------------------------------------------------------------------------------------------


def start_jail(config: JailConfig, should_print_jid: bool) -> int:
    """Run the steps of startcommands[]. If one fails, undo it and the previous ones in reverse order."""
    config.check_settings()
    if config.find_running() is not None:
        base.warnx(f'"{config.get_label()}" already exists')
        return 1
    steps = [
        ("mount", lambda value: mount_fstab_line(config, value)),
        ("mount.devfs", lambda _: mount_devfs(config)),
        ("exec.prestart", lambda value: run_command(config, value, in_jail=False)),
        ("", lambda _: create_jail(config, should_print_jid)),
        ("vnet.interface", lambda value: move_interface(config, value)),
        ("exec.start", lambda value: run_command(config, value, in_jail=True)),
        ("command", lambda _: run_command_parameter(config)),
        ("exec.poststart", lambda value: run_command(config, value, in_jail=False)),
    ]
    completed_steps: list[tuple[str, str]] = []
    try:
        for name, step in steps:
            for value in get_step_values(config, name):
                completed_steps.append((name, value))  # A failed step is also undone: next_command(create_failed).
                step(value)
    except StepFailed:
        for name, value in reversed(completed_steps):
            undo_step(config, name, value)
        return 1
    clear_persist(config)
    return 0


def get_step_values(config: JailConfig, name: str) -> list[str]:
    """Return the values for which to run a step. Jail creation, mount.devfs and the command run at most once."""
    if name == "":
        return [""]
    if name == "mount.devfs":
        return [""] if config.is_set(name) else []
    if name == "command":
        return [""] if config.settings.get(name) else []
    return [value for value in config.settings.get(name, []) if value]


def mount_fstab_line(config: JailConfig, line: str) -> None:
    from shim import mount_

    words = line.split()
    if len(words) < 3:
        base.warnx(f"mount: {line}: missing information")
        raise StepFailed
    check_path(config, "mount", words[1])
    arguments = ["-t", words[2], *(["-o", words[3]] if len(words) > 3 else []), words[0], words[1]]
    run_shim_command(mount_.main, "mount", "/sbin/mount", arguments)


def mount_devfs(config: JailConfig) -> None:
    from shim import mount_

    path = config.get_last_value("path")
    if path is None:
        base.warnx("mount.devfs: no jail root path defined")
        raise StepFailed
    check_path(config, "mount.devfs", f"{path}/dev")
    ruleset = config.get_last_value("devfs_ruleset") or "4"  # "devfsrules_jail"
    run_shim_command(mount_.main, "mount", "/sbin/mount", ["-t", "devfs", f"-oruleset={ruleset}", ".", f"{path}/dev"])


def check_path(config: JailConfig, name: str, path: str) -> None:
    """Check that a path is absolute and has no symbolic links below the jail's path. See check_path() in command.c."""
    if not path.startswith("/"):
        base.warnx(f"{name}: {path}: not an absolute pathname")
        raise StepFailed
    root = config.get_last_value("path") or ""
    if not path.startswith(root + "/"):
        return
    current_path = root
    for part in path[len(root) + 1 :].split("/"):
        current_path += "/" + part
        try:
            mode = os.lstat(current_path).st_mode
        except OSError as error:
            base.warnx(f"{name}: {current_path}: {base.strerror(error.errno or 0)}")
            raise StepFailed from None
        if stat.S_ISLNK(mode):
            base.warnx(f"{name}: {current_path} is a symbolic link")
            raise StepFailed


def create_jail(config: JailConfig, should_print_jid: bool) -> None:
    """Create the jail. See create_jail() in jail.c."""
    path = config.get_last_value("path")
    if path is not None:
        try:
            if not stat.S_ISDIR(os.stat(path).st_mode):
                base.warnx(f"path {path}: Not a directory")
                raise StepFailed
        except OSError as error:
            base.warnx(f"path {path}: {base.strerror(error.errno or 0)}")
            raise StepFailed from None
    values = dict(config.values)
    if any(config.settings.get(name) for name in ("exec.start", "command", "exec.poststart")):
        values["persist"] = True  # 'except that "persist" is always set when there are commands to run later'
    try:
        config.jail = prison.create(values)
    except prison.JailError as error:
        base.warnx(str(error))
        raise StepFailed from None
    if should_print_jid:
        base.print_line(str(config.jail["jid"]))
        sys.stdout.flush()


def move_interface(config: JailConfig, name: str) -> None:
    from shim import ifconfig_

    assert config.jail is not None
    run_shim_command(
        ifconfig_.main, "ifconfig", "/sbin/ifconfig", [name, "vnet", config.get_label() or str(config.jail["jid"])]
    )


def run_shim_command(main_function: object, prog: str, display_name: str, arguments: list[str]) -> None:
    """Run another command of the shim in this process. Reports failures as a separate process would."""
    own_program, base.PROG = base.PROG, prog
    try:
        code = main_function(arguments)  # type: ignore[operator]
    except SystemExit as exit_:
        if exit_.code == 70:
            raise
        code = exit_.code
    finally:
        base.PROG = own_program
    if code:
        base.warnx(f"{display_name} {' '.join(arguments)}: failed")
        raise StepFailed


def run_command(config: JailConfig, line: str, *, in_jail: bool) -> None:
    """Run a command, using a shell only if necessary. See run_command() in command.c.

    If "&" at the end is the only special character, run the command in the background without a shell.
    """
    index = next((index for index, letter in enumerate(line) if letter in SHELL_CHARACTERS), -1)
    background = index >= 0 and line[index:] == "&"
    plain_words = (line[:index] if background else line).split()
    words = ["/bin/sh", "-c", line] if index >= 0 and not background else plain_words
    if words:
        execute_command(config, words, in_jail=in_jail, background=background)


def run_command_parameter(config: JailConfig) -> None:
    execute_command(config, config.settings["command"], in_jail=True, background=False)


def execute_command(config: JailConfig, words: list[str], *, in_jail: bool, background: bool) -> None:
    timeout = int(config.get_last_value("exec.timeout") or 0)
    display_name = " ".join(words)
    child = os.fork()
    if child == 0:
        run_in_child(config, words, in_jail, background)
    if background:
        return
    status = wait_for_child(child, timeout)
    if status is None:
        base.warnx(f"{display_name}: timed out")
        raise StepFailed
    if os.WIFSIGNALED(status):
        base.warnx(f"{display_name}: exited on signal {os.WTERMSIG(status)}")
        raise StepFailed
    if os.WEXITSTATUS(status):
        base.warnx(f"{display_name}: failed")
        raise StepFailed


def wait_for_child(child: int, timeout: int) -> int | None:
    """Return the wait status of a child process, or None if it runs longer than ``timeout`` seconds.

    A timeout of 0 means that there is no limit.
    """
    if not timeout:
        return os.waitpid(child, 0)[1]
    import select

    fd = os.pidfd_open(child)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    events = poll.poll(timeout * 1000)
    os.close(fd)
    return os.waitpid(child, 0)[1] if events else None


def run_in_child(config: JailConfig, words: list[str], in_jail: bool, background: bool) -> None:
    """Run a command in the forked child. Never returns. See run_command() in command.c."""
    from shim import jexec_

    code = 1
    try:
        if background:
            os.setsid()
        if in_jail:
            assert config.jail is not None
            child = prison.attach_to_jail(config.jail, dies_with_caller=not background)
            if child:
                jexec_.proxy_process(child)
            if background and os.fork():
                os._exit(0)  # The command becomes a child of the holder, not of the host's init.
        if config.is_set("exec.clean"):
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


def undo_step(config: JailConfig, name: str, value: str) -> None:
    """Undo a step of startcommands[]."""
    from shim import ifconfig_, mount_

    try:
        if name == "" and config.jail is not None:
            prison.remove(config.jail)
        elif name == "vnet.interface" and config.jail is not None:
            run_shim_command(ifconfig_.main, "ifconfig", "/sbin/ifconfig", [value, "-vnet", config.get_label()])
        elif name == "mount.devfs" and mount_.is_mounted(f"{config.get_last_value('path')}/dev", "devfs"):
            run_shim_command(mount_.umount_main, "umount", "/sbin/umount", [f"{config.get_last_value('path')}/dev"])
        elif name == "mount" and mount_.is_mounted(value.split()[1], value.split()[2]):
            run_shim_command(mount_.umount_main, "umount", "/sbin/umount", [value.split()[1]])
    except (StepFailed, IndexError):
        return


def clear_persist(config: JailConfig) -> None:
    """Remove a jail without persist, unless a process runs in it. See clear_persist() in jail.c."""
    assert config.jail is not None
    if config.values.get("persist"):
        return
    with base.locked():
        state = prison.load_state()
        for jail in state["jails"]:
            if jail["jid"] == config.jail["jid"]:
                jail["params"]["persist"] = False
        base.save("jails", state)
        prison.load_state()


# ---- jail -m ----------------------------------------------------------------------------------------------------


def update_jail(config: JailConfig) -> int:
    """Change the parameters of a running jail. See rdtun_params() and jail_set(JAIL_UPDATE)."""
    config.check_settings()
    jail = config.find_running()
    if jail is None:
        base.warnx(f'"{config.get_label()}" not found' if config.get_label() else "no jail specified")
        return 1
    changes = {key: value for key, value in config.values.items() if key != "jid"}
    for key, value in changes.items():
        current_value = jail["path"] if key == "path" else jail["params"].get(key)
        if prison.PARAMS.get(key, "").endswith("+") and value != current_value:
            base.warnx(f"{key} cannot be changed after creation")
            return 1
    try:
        prison.check_parameters(changes)
    except prison.JailError as error:
        base.warnx(str(error))
        return 1
    with base.locked():
        state = prison.load_state()
        for each in state["jails"]:
            if each["jid"] == jail["jid"]:
                each["name"] = changes.pop("name", each["name"])
                changes.pop("path", None)
                each["params"].update(changes)
        base.save("jails", state)
    if "host.hostname" in changes:
        rename_host(jail, str(changes["host.hostname"]))
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


def stop_jails(names: list[str], may_use_jail_conf: bool, force: bool, verbosity: int) -> int:
    """Remove jails. Without jail.conf, jail(8) no longer knows exec.stop, so -r and -R do the same."""
    if not may_use_jail_conf or not names:
        raise base.usage(USAGE)
    if not force and any("=" in name for name in names):
        raise base.usage(USAGE)
    should_show_names = len(names) > 1 or "*" in names
    status, jails = 0, []
    for name in names:
        if name == "*":
            # state.c start_state(): -r matches "*" against jail.conf, -R against running jails
            jails += [jail for jail in prison.load_state()["jails"] if force and not jail["dying"]]
            continue
        try:
            jails.append(prison.find_jail(name, include_dying=True))
        except prison.JailError:
            base.warnx(f'"{name}" not found')
            status = 1
    for jail in jails:
        if not jail["dying"]:
            prison.terminate_processes(
                jail, 10
            )  # DEFAULT_STOP_TIMEOUT, because stop.timeout is not stored in the kernel.
            prison.remove(jail)
        if should_show_names and verbosity == 0:
            base.print_line(f"{jail['name']}: removed")
    return status
