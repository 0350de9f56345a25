"""Test the FreeBSD part of the gateway role, with test doubles for FreeBSD's commands.

The tests do not run on FreeBSD. A double of rc.subr checks what rc.subr(8) and rc(8) require of the service script.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import session
from tests.support.roles import PlayResult, make_environment

ROLE_DIRECTORY = session.REPOSITORY / "roles" / "gateway"
FACTS = {"ansible_os_family": "FreeBSD", "ansible_distribution": "FreeBSD", "ansible_service_mgr": "bsdinit"}

# Only the part of rc.subr that shows whether a script is correct: the variables at each step, and the command.
RC_SUBR_DOUBLE = """\
load_rc_config() { [ "$1" = "$name" ] && [ -n "$rcvar" ] || { echo "too early" >&2; exit 9; }; . "$RC_CONF"; loaded=1; }
run_rc_command() {
    [ -n "$loaded" ] || { echo "not loaded" >&2; exit 9; }
    eval "enabled=\\$$rcvar"
    case $1 in
        start) [ "$enabled" = YES ] || exit 1; $start_precmd && eval "$command $command_args" ;;
        onestatus) [ -e "$pidfile" ] ;;
        onestop) rm "$pidfile" ;;
        show) echo "$rcvar=$enabled"; eval "echo $command $command_args"; eval "echo \\$${name}_env" ;;
    esac
}
"""
DAEMON_DOUBLE = """\
#!/bin/sh
[ "$*" = "-r -R 2 -P $3 -o $5 $6 serve --config $8" ] || true
while [ "$1" != -P ]; do shift; done
echo running >"$2"
"""
SERVICE_DOUBLE = """\
#!/bin/sh
[ -x "$RC_DIR/$1" ] || { echo "$1 does not exist in /etc/rc.d or the local startup" >&2; exit 1; }
sed -e "s#/etc/rc.subr#$RC_SUBR#" \\
    -e "s#/usr/sbin/daemon#$DOUBLES/daemon#" -e "s#-g wheel#-g root#" "$RC_DIR/$1" >"$DOUBLES/running"
exec sh "$DOUBLES/running" "$2"
"""
SYSRC_DOUBLE = """\
#!/bin/sh
case $1 in
    -n) . "$RC_CONF"; eval "[ -z \\"\\$$3\\" ] || echo \\$$3" ;;
    -x) grep -q "^$2=" "$RC_CONF" || { echo "unknown variable" >&2; exit 1; }; sed -i "/^$2=/d" "$RC_CONF" ;;
    *) echo "${1%%=*}=\\"${1#*=}\\"" >>"$RC_CONF" ;;
esac
"""
PKG_DOUBLE = """\
#!/bin/sh
[ -e "$DOUBLES/pkg.there" ] || [ "$ASSUME_ALWAYS_YES" = yes ] || { echo "pkg: not installed" >&2; exit 1; }
touch "$DOUBLES/pkg.there"
case $1 in
    query) [ "$2 $3" = "-a %n" ] && cat "$DOUBLES/packages" ;;
    install) [ "$2" = --yes ] && shift 2 && printf '%s\\n' "$@" >>"$DOUBLES/packages" ;;
    *) exit 64 ;;
esac
"""


class FreeBSDHost:
    """A stand-in for a FreeBSD host, on which the role's tasks use test doubles for FreeBSD's commands."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rc_conf, self.rc_dir, self.rc_subr = directory / "rc.conf", directory / "rc.d", directory / "rc.subr"
        self.packages = directory / "packages"
        for name, text in (
            ("daemon", DAEMON_DOUBLE),
            ("service", SERVICE_DOUBLE),
            ("sysrc", SYSRC_DOUBLE),
            ("pkg", PKG_DOUBLE),
        ):
            (directory / name).write_text(text)
            (directory / name).chmod(0o755)
        self.rc_subr.write_text(RC_SUBR_DOUBLE)
        self.rc_conf.touch()
        self.packages.touch()
        self.rc_dir.mkdir()
        (directory / "etc").mkdir()
        self.environ = {
            "PATH": f"{directory}:{os.environ['PATH']}",
            "RC_CONF": str(self.rc_conf),
            "RC_DIR": str(self.rc_dir),
            "RC_SUBR": str(self.rc_subr),
            "DOUBLES": str(directory),
        }
        variables = yaml.safe_load((ROLE_DIRECTORY / "vars" / "FreeBSD.yml").read_text())
        # The test's own directory, and a group that exists on this machine.
        self.os: dict[str, Any] = {**variables["gateway_os"], "rc_dir": str(self.rc_dir), "group": "root"}
        self.script = self.rc_dir / "sandbox_gateway"

    def apply(self, *tasks: str, check: bool = False, **options: Any) -> PlayResult:
        """Run some of the role's task files, with the facts and settings that main.yml would determine on FreeBSD."""
        variables = {
            "ansible_python_interpreter": "/usr/bin/python3",
            "gateway_os": self.os,
            "gateway_state": "neither",
            "gateway_pid_file": str(self.directory / "run" / "gateway.pid"),
            "gateway_config_dir": str(self.directory / "etc"),
            "gateway_socket_group": "",
            "gateway_settings": {"server": {"socket": ""}},
            "gateway_unit": {},
            **{f"gateway_{name}": value for name, value in options.items()},
        }
        steps: list[dict[str, Any]] = [
            {"ansible.builtin.set_fact": {**FACTS, "ansible_user_uid": 0, "cacheable": True}},
            {"ansible.builtin.import_role": {"name": "grove.sandbox.gateway", "rolespec_validate": False}},
        ]
        steps += [
            {
                "ansible.builtin.include_role": {
                    "name": "grove.sandbox.gateway",
                    "tasks_from": name,
                    "rolespec_validate": False,
                }
            }
            for name in tasks
        ]
        play = [{"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": steps}]
        playbook, variables_file = self.directory / "play.json", self.directory / "vars.json"
        playbook.write_text(json.dumps(play))
        variables_file.write_text(json.dumps(variables))
        ansible_playbook = Path(sys.executable).parent / "ansible-playbook"
        argv = [
            str(ansible_playbook),
            "-i",
            "localhost,",
            "-e",
            f"@{variables_file}",
            str(playbook),
            *(["--check"] if check else []),
        ]
        env = {**make_environment(self.directory), **self.environ}
        run = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env, check=False)
        output = run.stdout + run.stderr
        recap = re.search(r"changed=(\d+) +unreachable=(\d+) +failed=(\d+)", output)
        assert recap, output[-4000:]
        return PlayResult(output, int(recap[1]), recap[3] != "0", "")


@pytest.fixture
def freebsd_host(requires_root: None, tmp_path: Path) -> FreeBSDHost:
    return FreeBSDHost(tmp_path)


def get_changed_tasks(run: PlayResult) -> list[str]:
    assert not run.failed, run.output
    return [name.partition(" : ")[2] for name in run.changed_task_names]


def test_packages_are_listed_and_missing_ones_installed(freebsd_host: FreeBSDHost) -> None:
    freebsd_host.packages.write_text("pkg\npython311\n")
    assert get_changed_tasks(freebsd_host.apply("packages_pkg", check=True)) == ["Install the missing packages"]
    assert get_changed_tasks(freebsd_host.apply("packages_pkg")) == ["Install the missing packages"]
    # pkg was missing, so its list of packages was ignored
    assert sorted(freebsd_host.packages.read_text().split()) == ["pkg", "python311", "python311", "rust"]
    assert get_changed_tasks(freebsd_host.apply("packages_pkg")) == []


def test_freebsd_paths_are_used(freebsd_host: FreeBSDHost) -> None:
    defaults = yaml.safe_load((ROLE_DIRECTORY / "defaults" / "main.yml").read_text())
    option_names = [name for name, value in defaults.items() if "gateway_os" in str(value)]
    playbook = freebsd_host.directory / "paths.json"
    task = {"ansible.builtin.debug": {"msg": "{{ " + ", ".join(option_names) + " }}"}}
    variable_files = [str(ROLE_DIRECTORY / "defaults" / "main.yml"), str(ROLE_DIRECTORY / "vars" / "FreeBSD.yml")]
    play = [
        {
            "hosts": "localhost",
            "connection": "local",
            "gather_facts": False,
            "vars_files": variable_files,
            "tasks": [task],
        }
    ]
    playbook.write_text(json.dumps(play))
    ansible_playbook = Path(sys.executable).parent / "ansible-playbook"
    env = make_environment(freebsd_host.directory)
    run = subprocess.run(
        [str(ansible_playbook), "-i", "localhost,", str(playbook)], capture_output=True, text=True, env=env, check=True
    )
    for path in (
        "/usr/local/sandbox-gateway",
        "/usr/local/etc/sandbox-gateway",
        "/var/db/sandbox-gateway",
        "/var/run/sandbox-gateway/gateway.sock",
        "/var/run/sandbox-gateway/gateway.pid",
        "python3.11",
    ):
        assert f'"{path}"' in run.stdout


def test_the_script_meets_the_requirements_of_rc(freebsd_host: FreeBSDHost) -> None:
    get_changed_tasks(freebsd_host.apply("start", start_seconds=1))
    text = freebsd_host.script.read_text()
    assert stat.S_IMODE(freebsd_host.script.stat().st_mode) == 0o555
    subprocess.run(["sh", "-n", str(freebsd_host.script)], check=True)
    lines = text.splitlines()
    assert lines[0] == "#!/bin/sh"
    # rcorder reads one block of these keywords, in this order
    keywords = [line.split(":")[0] for line in lines if re.match(r"# [A-Z]+:", line)]
    assert keywords == ["# PROVIDE", "# REQUIRE", "# KEYWORD"]
    assert "# PROVIDE: sandbox_gateway" in lines
    expected_order = [
        ". /etc/rc.subr",
        'name="sandbox_gateway"',
        'rcvar="sandbox_gateway_enable"',
        'load_rc_config "$name"',
    ]
    expected_order += [': ${sandbox_gateway_enable:="NO"}', 'run_rc_command "$1"']
    positions = [lines.index(line) for line in expected_order]
    assert positions == sorted(positions)
    assert [line for line in lines if line][-1] == expected_order[-1]
    assert re.fullmatch("[a-z_]+", "sandbox_gateway"), "the name must be valid in shell variables"


def test_the_script_starts_the_gateway_with_the_daemon_command(freebsd_host: FreeBSDHost) -> None:
    get_changed_tasks(freebsd_host.apply("start", start_seconds=1))
    run = subprocess.run(
        [str(freebsd_host.directory / "service"), "sandbox_gateway", "show"],
        env={**os.environ, **freebsd_host.environ},
        capture_output=True,
        text=True,
        check=True,
    )
    enabled, command, environment_variables = run.stdout.splitlines()
    assert enabled == "sandbox_gateway_enable=YES"
    pid_file, config_file = freebsd_host.directory / "run/gateway.pid", freebsd_host.directory / "etc/config.toml"
    program = "/usr/local/sandbox-gateway/venv/bin/sandbox-gateway"
    arguments = [
        "-r",
        "-R",
        "2",
        "-P",
        str(pid_file),
        "-o",
        "/var/log/sandbox-gateway.log",
        program,
        "serve",
        "--config",
        str(config_file),
    ]
    assert shlex.split(command)[1:] == arguments
    path, watchdog_timeout = environment_variables.split(" ")
    assert "/usr/local/bin" in path and watchdog_timeout == "WATCHDOG_USEC=60000000"


def test_the_service_is_started_once_and_stopped(freebsd_host: FreeBSDHost) -> None:
    check_run = freebsd_host.apply("start", check=True, start_seconds=1)
    expected_tasks = ["Write the rc.d script", "Enable the service", "Start the service"]
    assert get_changed_tasks(check_run) == expected_tasks
    assert not freebsd_host.script.exists()
    assert get_changed_tasks(freebsd_host.apply("start", start_seconds=1)) == expected_tasks
    assert (freebsd_host.directory / "run" / "gateway.pid").exists()
    assert freebsd_host.rc_conf.read_text() == 'sandbox_gateway_enable="YES"\n'
    assert get_changed_tasks(freebsd_host.apply("start", start_seconds=1)) == []

    assert get_changed_tasks(freebsd_host.apply("stop_rc")) == ["Stop the service"]
    assert not (freebsd_host.directory / "run" / "gateway.pid").exists()
    assert get_changed_tasks(freebsd_host.apply("stop_rc")) == []


def test_a_new_script_restarts_the_service(freebsd_host: FreeBSDHost) -> None:
    get_changed_tasks(freebsd_host.apply("start", start_seconds=1))
    second_run = freebsd_host.apply("start", start_seconds=1, log_file="/var/log/other.log")
    assert get_changed_tasks(second_run) == ["Write the rc.d script", "Stop the service", "Start the service"]
