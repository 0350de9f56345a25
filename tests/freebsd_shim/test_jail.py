"""Test jail, jls, jexec and pkill: their output, their errors, and the isolation of jails."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from tests.freebsd_shim.harness import Shim


def list_jails(shim: Shim, *options: str) -> list[dict[str, str]]:
    output = json.loads(shim.check_ok("jls", "--libxo", "json", *options, "jid", "name", "path", "dying"))
    assert output["__version"] == "2"
    jails: list[dict[str, str]] = output["jail-information"]["jail"]
    return jails


def test_creating_a_jail_prints_the_next_jid(shim: Shim) -> None:
    assert shim.create_jail() == "1"
    shim.check_ok("jail", "-R", "sx1")
    shim.check_ok("umount", f"{shim.root}/dev")
    assert shim.create_jail() == "2"


def test_jls_prints_jails(shim: Shim) -> None:
    assert list_jails(shim) == []
    shim.create_jail()
    assert list_jails(shim) == [{"jid": "1", "name": "sx1", "path": str(shim.root), "dying": "false"}]
    assert shim.check_ok("jls", "name", "vnet", "persist", "host.hostname") == "sx1 new true sx1-host\n"
    assert (
        shim.check_ok("jls", "-n", "name", "allow.set_hostname", "persist") == "name=sx1 allow.noset_hostname persist\n"
    )
    assert shim.check_ok("jls", "-j", "sx1", "jid") == "1\n"
    header, row = shim.check_ok("jls").splitlines()
    assert header == "   JID  IP Address      Hostname                      Path"
    assert row.split() == ["1", "sx1-host", str(shim.root)]
    shim.expect_failure(1, 'jls: jail "none" not found', "jls", "-j", "none", "jid")
    shim.expect_failure(1, "jls: unknown parameter: nome", "jls", "nome")


def test_jail_reports_errors_like_freebsd(shim: Shim) -> None:
    shim.create_jail()
    path = f"path={shim.root}"
    shim.expect_failure(1, 'jail: "sx1" already exists', "jail", "-i", "-c", "name=sx1", path, "persist")
    shim.expect_failure(
        1, "jail: path /nowhere: No such file or directory", "jail", "-c", "name=a", "path=/nowhere", "persist"
    )
    shim.expect_failure(
        1, "jail: path /etc/passwd: Not a directory", "jail", "-c", "name=a", "path=/etc/passwd", "persist"
    )
    shim.expect_failure(1, "jail: new jail must persist or attach", "jail", "-c", "name=a", path)
    shim.expect_failure(1, "jail: unknown parameter: wnet", "jail", "-c", "name=a", path, "persist", "wnet=new")
    shim.expect_failure(1, 'jail: jail "a" not found', "jail", "-c", "name=a.b", path, "persist")
    numeric_name_error = "jail: name cannot be numeric (unless it is the jid)"
    shim.expect_failure(1, numeric_name_error, "jail", "-c", "jid=9", "name=8", path, "persist")
    shim.expect_failure(
        1, 'jail: securelevel: non-integer value "x"', "jail", "-c", "name=a", path, "persist", "securelevel=x"
    )
    shim.expect_failure(
        1, 'jail: vnet: unknown jailsys value "own"', "jail", "-c", "name=a", path, "persist", "vnet=own"
    )
    shim.expect_failure(
        1, "jail: jail_set: Invalid argument", "jail", "-c", "name=a", path, "persist", "enforce_statfs=3"
    )
    long_name = "name=" + "n" * 300
    shim.expect_failure(1, "jail: jail_set: File name too long", "jail", "-c", long_name, path, "persist")
    shim.expect_failure(
        1,
        "jail: vnet jails cannot have IP address restrictions",
        *("jail", "-c", "name=a", path, "persist", "vnet", "ip4.addr=10.0.0.1"),
    )
    # meta exists since 15.0
    shim.expect_failure(1, "jail: unknown parameter: meta.id", "jail", "-c", "name=a", path, "persist", "meta.id=5")
    shim.check_ok("freebsd-shim", "set", "kern.osreldate", "1500068")
    shim.check_ok("jail", "-c", "name=a", path, "persist", "meta.id=5")
    assert shim.check_ok("jls", "-j", "a", "meta.id") == "5\n"


def test_unknown_options_fail(shim: Shim) -> None:
    for command in ("jail -X", "jexec -X", "jls -X", "pkill -@", "umount -X /", "mount -X", "rctl -X", "pfctl -X"):
        result = shim(*command.split())
        assert result.returncode in (1, 2) and "illegal option -- " in result.stderr and "usage: " in result.stderr
    assert shim("jail", "-c", "-r", "x").returncode == 70  # FreeBSD supports this, but the shim does not.


def test_mount_devfs_requires_a_directory_that_is_not_a_symlink(shim: Shim) -> None:
    (shim.root / "dev").rmdir()
    command = ["jail", "-c", "name=a", f"path={shim.root}", "persist", "mount.devfs"]
    shim.expect_failure(1, f"jail: mount.devfs: {shim.root}/dev: No such file or directory", *command)
    (shim.root / "dev").symlink_to("/tmp")
    shim.expect_failure(1, f"jail: mount.devfs: {shim.root}/dev is a symbolic link", *command)


def test_a_failed_creation_is_undone(shim: Shim) -> None:
    result = shim(
        *("jail", "-i", "-c", "name=a", f"path={shim.root}", "persist", "vnet=new", "mount.devfs"),
        "exec.start=/bin/sh -c 'exit 3'",
    )
    assert result.returncode == 1
    assert result.stderr == "jail: /bin/sh -c /bin/sh -c 'exit 3': failed\n"
    assert list_jails(shim, "-d") == [] and shim.check_ok("mount", "-t", "devfs") == ""
    result = shim("jail", "-c", "name=a", f"path={shim.root}", "persist", "vnet=new", "vnet.interface=nope0")
    assert result.returncode == 1
    assert "ifconfig: interface nope0 does not exist\njail: /sbin/ifconfig nope0 vnet a: failed\n" in result.stderr
    assert list_jails(shim, "-d") == []


def test_exec_start_runs_in_the_jail_and_leaves_background_commands_running(shim: Shim) -> None:
    output = shim.check_ok(
        *("jail", "-i", "-c", "name=a", f"path={shim.root}", "persist", "vnet=new", "host.hostname=inner"),
        *("mount.devfs", "exec.start=/bin/hostname", "exec.start=sleep 1000 >/dev/null 2>&1 &"),
    )
    assert output == "1\ninner\n"
    for _ in range(50):
        if shim("pgrep", "-j", "a").stdout.count("\n") == 1:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the background command is not running")
    shim.check_ok("pkill", "-KILL", "-j", "1")


def test_a_trailing_ampersand_starts_a_command_in_the_background(shim: Shim) -> None:
    """The command inherits the standard output of jail(8), so readers see no end of file until the command exits."""
    process = shim.start("jail", "-i", "-c", "name=a", f"path={shim.root}", "persist", "exec.start=sleep 1000 &")
    assert process.stdout is not None and process.stdout.readline() == "1\n"
    assert process.wait(30) == 0
    time.sleep(0.2)
    assert shim.check_ok("pgrep", "-j", "a", "sleep").count("\n") == 1
    shim.check_ok("pkill", "-KILL", "-j", "a")
    assert process.communicate(timeout=30) == ("", "")


def test_a_jail_is_isolated(shim: Shim) -> None:
    shim.create_jail()
    (shim.root / "tmp/mark").write_text("here")
    assert shim.check_ok("jexec", "sx1", "/bin/sh", "-c", "cat /tmp/mark; pwd; hostname") == "here/\nsx1-host\n"
    script = (
        "import os, socket, sys\n"
        "assert os.getpid() < 20\n"
        "assert [name for _, name in socket.if_nameindex()] == ['lo']\n"
        "for act in (lambda: os.chroot('/tmp'), lambda: socket.sethostname('x'),"
        " lambda: os.mknod('/tmp/n', 0o20666, 259), lambda: os.kill(int(sys.argv[1]), 0),"
        " lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)):\n"
        "    try: act()\n"
        "    except OSError as error: print(error.errno)\n"
    )
    output = shim.check_ok("jexec", "sx1", "/usr/bin/python3", "-c", script, str(os.getpid()))
    assert output.split() == ["1", "1", "1", "3", "1"]  # EPERM, and ESRCH for a process outside
    nodes = shim.check_ok(
        "jexec", "sx1", "sh", "-c", "ls /dev; head -c 4 /dev/urandom | wc -c; echo x > /dev/null"
    ).split()
    assert nodes == ["fd", "null", "ptmx", "pts", "random", "stderr", "stdin", "stdout", "urandom", "zero", "4"]
    script = "import os; one, other = os.openpty(); print(os.ttyname(other))"
    assert shim.check_ok("jexec", "sx1", "/usr/bin/python3", "-c", script) == "/dev/pts/0\n"


def test_jexec_sets_environment_and_user(shim: Shim) -> None:
    shim.create_jail()
    command = [
        "/usr/bin/env",
        "-i",
        "K=V",
        "sh",
        "-c",
        'cd /tmp && exec "$@"',
        "sh",
        "sh",
        "-c",
        'echo "$PWD $K $SECRET"',
    ]
    assert shim.check_ok("jexec", "sx1", *command, SECRET="s") == "/tmp V \n"
    assert shim.check_ok("jexec", "sx1", "sh", "-c", "echo $SECRET", SECRET="s") == "s\n"
    assert shim.check_ok("jexec", "-l", "sx1", "sh", "-c", 'echo "$SECRET$PATH $HOME $(pwd)"', SECRET="s") == (
        "/bin:/usr/bin /root /root\n"
    )
    assert (
        shim.check_ok("jexec", "-U", "guest", "sx1", "sh", "-c", 'echo "$(id -u) $USER $HOME"') == "1234 guest /tmp\n"
    )
    shim.expect_failure(1, "jexec: guest: no such user", "jexec", "-u", "guest", "sx1", "id")
    shim.expect_failure(1, 'jexec: jail "none" not found', "jexec", "none", "id")
    shim.expect_failure(1, "jexec: jail 77 not found", "jexec", "77", "id")
    shim.expect_failure(1, "jexec: execvp: /no/such: No such file or directory", "jexec", "sx1", "/no/such")
    assert shim("jexec", "sx1").returncode == 0  # A shell whose input is empty.


def test_jexec_forwards_the_exit_status_and_signals(shim: Shim) -> None:
    shim.create_jail()
    assert shim("jexec", "sx1", "sh", "-c", "exit 7").returncode == 7
    assert shim("jexec", "sx1", "sh", "-c", "kill -KILL $$").returncode == -signal.SIGKILL
    loop_script = "trap 'echo got; exit 9' TERM; echo up; while :; do sleep 0.05; done"
    process = shim.start("jexec", "sx1", "sh", "-c", loop_script)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "got\n" and process.returncode == 9
    # Killing jexec kills the command, because they are the same process on FreeBSD.
    process = shim.start("jexec", "sx1", "sleep", "1000")
    while not shim("pgrep", "-j", "sx1", "sleep").stdout:
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=30)
    for _ in range(100):
        if shim("pgrep", "-j", "sx1").returncode == 1:
            return
        time.sleep(0.02)
    raise AssertionError("the command is still running after its jexec was killed")


def test_pkill_kills_only_the_jails_processes(shim: Shim) -> None:
    shim.create_jail()
    processes = [shim.start("jexec", "sx1", "sleep", "1000") for _ in range(2)]
    while shim("pgrep", "-j", "1").stdout.count("\n") < 2:
        time.sleep(0.02)
    shim.check_ok("pkill", "-KILL", "-j", "1")
    assert [each.wait(30) for each in processes] == [-signal.SIGKILL] * 2
    for each in processes:
        each.communicate()
    assert shim("pkill", "-KILL", "-j", "1").returncode == 1  # nothing matched
    assert shim("pkill", "-KILL", "-j", "99").returncode == 1
    shim.expect_failure(2, "pkill: Invalid jail ID or name `none2'", "pkill", "-KILL", "-j", "none2")
    assert [each["name"] for each in list_jails(shim)] == ["sx1"]


def test_removing_a_jail_terminates_processes_and_keeps_mounts(shim: Shim) -> None:
    shim.create_jail()
    process = shim.start("jexec", "sx1", "sh", "-c", "trap 'exit 5' TERM; echo up; while :; do sleep 0.05; done")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    assert shim.check_ok("jail", "-r", "sx1") == ""
    process.communicate(timeout=30)
    assert process.returncode == 5
    assert list_jails(shim, "-d") == []
    assert f"devfs on {shim.root}/dev (devfs)\n" == shim.check_ok("mount", "-t", "devfs")
    assert shim.check_ok("mount", "-t", "nullfs") != ""
    shim.check_ok("umount", f"{shim.root}/dev")
    shim.expect_failure(1, 'jail: "sx1" not found', "jail", "-r", "sx1")
    shim.expect_failure(1, 'jail: "5" not found', "jail", "-R", "5")


def test_a_mount_is_busy_while_a_jail_uses_it(shim: Shim) -> None:
    shim.check_ok("mount", "-t", "nullfs", str(shim.root), str(shim.root / "vol"))
    shim.check_ok("jail", "-c", "name=a", f"path={shim.root}/vol", "persist")
    shim.expect_failure(1, f"umount: unmount of {shim.root}/vol failed: Device busy", "umount", f"{shim.root}/vol")
    shim.check_ok("jail", "-R", "a")
    shim.check_ok("umount", f"{shim.root}/vol")


def test_mounts_appear_and_disappear_in_a_running_jail(shim: Shim, tmp_path: Path) -> None:
    shim.create_jail()
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume/file").write_text("data")
    shim.check_ok("mount", "-t", "nullfs", "-o", "ro,nosuid,nocover", str(tmp_path / "volume"), f"{shim.root}/vol")
    assert shim.check_ok("jexec", "sx1", "cat", "/vol/file") == "data"
    assert "Read-only file system" in shim("jexec", "sx1", "sh", "-c", "echo > /vol/file").stderr
    process = shim.start("jexec", "sx1", "sh", "-c", "cd /vol; echo in; sleep 1000")
    assert process.stdout is not None and process.stdout.readline() == "in\n"
    shim.expect_failure(1, f"umount: unmount of {shim.root}/vol failed: Device busy", "umount", f"{shim.root}/vol")
    shim.check_ok("pkill", "-KILL", "-j", "sx1")
    process.communicate()
    shim.check_ok("umount", f"{shim.root}/vol")
    assert shim.check_ok("jexec", "sx1", "ls", "/vol") == ""


def test_jail_parameters_can_be_updated(shim: Shim) -> None:
    shim.create_jail()
    shim.check_ok("jail", "-m", "name=sx1", "host.hostname=other", "children.max=3")
    assert shim.check_ok("jls", "-j", "sx1", "host.hostname", "children.max") == "other 3\n"
    assert shim.check_ok("jexec", "sx1", "hostname") == "other\n"
    shim.expect_failure(1, "jail: vnet cannot be changed after creation", "jail", "-m", "name=sx1", "vnet=inherit")
    shim.expect_failure(1, 'jail: "none" not found', "jail", "-m", "name=none", "host.hostname=x")


def test_a_nonpersistent_jail_is_dying_after_its_last_process_exits(shim: Shim) -> None:
    shim.check_ok("freebsd-shim", "set", "dying", "forever")
    start_command = "sleep 30 </dev/null >/dev/null 2>&1 &"
    shim.check_ok("jail", "-c", "name=sx1", f"path={shim.root}", "mount.devfs", f"exec.start=({start_command})")
    assert list_jails(shim, "-d")[0]["dying"] == "false"
    shim.check_ok("pkill", "-KILL", "-j", "sx1")
    while list_jails(shim):
        pass
    assert list_jails(shim, "-d")[0]["dying"] == "true"
    shim.check_ok("freebsd-shim", "set", "dying", "0")
    assert list_jails(shim, "-d") == []


def test_dying_jails_are_listed_only_on_request(shim: Shim) -> None:
    shim.create_jail()
    shim.check_ok("freebsd-shim", "set", "dying", "forever")
    shim.check_ok("jail", "-R", "sx1")
    assert list_jails(shim) == [] and list_jails(shim, "-d")[0]["dying"] == "true"
    shim.expect_failure(1, 'jexec: jail "sx1" is dying', "jexec", "sx1", "id")
    shim.expect_failure(1, "jls: jail 1 is dying", "jls", "-j", "1", "jid")
    shim.check_ok("jail", "-R", "sx1")  # Removing it again succeeds.
    shim.check_ok("umount", f"{shim.root}/dev")
    assert shim.create_jail() == "2"  # The name can be used again.
    shim.check_ok("freebsd-shim", "set", "dying", "0")
    assert [each["jid"] for each in list_jails(shim, "-d")] == ["2"]
    shim.check_ok("freebsd-shim", "set", "dying", "0.3")
    shim.check_ok("jail", "-R", "sx1")
    assert len(list_jails(shim, "-d")) == 1
    time.sleep(0.4)
    assert list_jails(shim, "-d") == []


def test_a_nonpersistent_jail_is_removed_when_its_last_process_exits(shim: Shim) -> None:
    shim.check_ok("jail", "-c", "name=a", f"path={shim.root}", "exec.start=/bin/true")
    assert list_jails(shim) == []
    shim.check_ok("jail", "-c", "name=a", f"path={shim.root}", "mount.devfs", "exec.start=sleep 1000 >/dev/null 2>&1 &")
    assert [each["name"] for each in list_jails(shim)] == ["a"]
    shim.check_ok("pkill", "-KILL", "-j", "a")
    time.sleep(0.1)
    assert list_jails(shim) == []
