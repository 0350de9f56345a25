# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
name: sandbox
short_description: Run tasks in a sandbox through its gateway
version_added: "0.1.0"
description:
  - Runs commands and transfers files through the gateway and the agent inside the sandbox. The sandbox needs no SSH
    server, no SSH key, and no address that the control node can reach.
  - The inventory plugin P(grove.sandbox.sandboxes#inventory) sets all required variables. For a sandbox that it found
    at the gateway O(gateway_url), the certificates and the key of the inventory are used, regardless of other variables
    of the host; only O(gateway_token) overrides the key.
  - Task results cannot redirect a key to another gateway. The variables C(ansible_host) and C(ansible_sandbox_*),
    except C(ansible_sandbox_gateway_timeout), are only accepted from an inventory, C(host_vars), C(group_vars),
    C(add_host) or the command line (C(-e)). If a fact, C(set_fact), C(include_vars), a registered variable, or C(vars)
    of a play, role or task sets one of them to another value, the host is unreachable.
author:
  - The grove.sandbox authors (@grove-sandbox)
options:
  sandbox:
    description:
      - The id or name of the sandbox.
    type: str
    default: inventory_hostname
    vars:
      - name: inventory_hostname
      - name: ansible_host
  gateway_url:
    description:
      - The address of the gateway as seen from the control node, as C(unix:///path/to/gateway.sock),
        C(http://host:port) or C(https://host:port).
    type: str
    default: unix:///run/sandbox-gateway/gateway.sock
    env:
      - name: SANDBOX_GATEWAY_URL
    ini:
      - section: grove_sandbox
        key: gateway_url
    vars:
      - name: ansible_sandbox_gateway_url
  gateway_token:
    description:
      - An API key from the gateway's key file, with the scope C(exec) or C(admin). The Unix socket needs no key.
      - If not set, the plugin uses the key of the inventory that found the sandbox, or else the key in
        O(gateway_token_file), or else O(default_token).
    type: str
    vars:
      - name: ansible_sandbox_gateway_token
  gateway_token_file:
    description:
      - A file on the control node that contains only an API key.
    type: str
    env:
      - name: SANDBOX_GATEWAY_TOKEN_FILE
    ini:
      - section: grove_sandbox
        key: gateway_token_file
    vars:
      - name: ansible_sandbox_gateway_token_file
  default_token:
    description:
      - The API key for gateways that have no other key.
    type: str
    env:
      - name: SANDBOX_GATEWAY_TOKEN
    ini:
      - section: grove_sandbox
        key: gateway_token
  ca_path:
    description:
      - A PEM file with the CA certificates for verifying the gateway's certificate.
      - If not set, the system's CA certificates are used.
    type: str
    ini:
      - section: grove_sandbox
        key: ca_path
    vars:
      - name: ansible_sandbox_ca_path
  validate_certs:
    description:
      - Whether to verify the gateway's certificate.
    type: bool
    default: true
    ini:
      - section: grove_sandbox
        key: validate_certs
    vars:
      - name: ansible_sandbox_validate_certs
  gateway_timeout:
    description:
      - The connection times out after this number of seconds without data or a heartbeat. Commands can run for longer,
        because the agent sends a heartbeat while they run.
      - Privilege escalation has the same timeout.
    type: int
    default: 60
    ini:
      - section: grove_sandbox
        key: connection_timeout
    vars:
      - name: ansible_sandbox_gateway_timeout
  max_output_mb:
    description:
      - Limit in MiB for the standard output and standard error of one command together. A command that prints
        more is killed, and its task fails. The control node keeps all output in memory.
    type: int
    default: 128
    ini:
      - section: grove_sandbox
        key: max_output_mb
    vars:
      - name: ansible_sandbox_max_output_mb
  remote_user:
    description:
      - The user inside the sandbox who runs commands and owns files. Any user of the sandbox works, without a password.
      - If this is the become user, Ansible needs neither sudo nor su.
    type: str
    default: root
    env:
      - name: ANSIBLE_REMOTE_USER
    ini:
      - section: defaults
        key: remote_user
    vars:
      - name: ansible_user
    cli:
      - name: user
    keyword:
      - name: remote_user
  pipelining:
    description:
      - Whether to send modules to the standard input of their interpreter instead of copying them to a file first.
    type: bool
    default: true
    env:
      - name: ANSIBLE_PIPELINING
    ini:
      - section: connection
        key: pipelining
      - section: defaults
        key: pipelining
    vars:
      - name: ansible_pipelining
notes:
  - The host is unreachable if the sandbox is paused, removed or rolled back during a task, or if the gateway cannot be
    reached. Interrupted commands are not repeated.
  - Commands keep running if the control node disconnects.
  - In a check-mode run, a task is skipped if its sandbox does not yet have a machine that the task could use, because
    an earlier task of this collection would create, restart or roll back the sandbox, or change its volumes.
  - In a check-mode run, a task is also skipped if its sandbox was created with C(autoResume), and is paused or would be
    paused by an earlier task. Check-mode runs do not resume sandboxes.
  - In a check-mode run, the host is unreachable if an earlier task would remove the sandbox, or would pause a sandbox
    that was created without C(autoResume).
  - A task with C(check_mode=false) acts on the real sandbox, which it can also resume. It is skipped only if the real
    sandbox does not exist yet.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from ansible import constants as C
from ansible.errors import AnsibleConnectionFailure, AnsibleError, AnsibleFileNotFound
from ansible.plugins.connection import ConnectionBase
from ansible.utils.display import Display
from ansible.utils.unsafe_proxy import wrap_var
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure, make_printable
from ansible_collections.grove.sandbox.plugins.plugin_utils._check_run import is_check_run, require_machine
from ansible_collections.grove.sandbox.plugins.plugin_utils._gateways import Gateway, find_gateway
from ansible_collections.grove.sandbox.plugins.plugin_utils._operator import OperatorVariables, find_task_host
from ansible_collections.grove.sandbox.plugins.plugin_utils._stream import AGENT_FAILURE_KIND, Channel, Process

display = Display()

UNGUARDED_VARIABLES = ("ansible_pipelining", "ansible_sandbox_gateway_timeout", "ansible_user", "inventory_hostname")
"""Variables of this plugin that any source may set, because they do not affect where the key is sent."""
GUARDED_VARIABLES_OF_LISTED_HOSTS = ("ansible_host", "ansible_sandbox_gateway_token", "ansible_sandbox_max_output_mb")
"""The variables that facts must not override for a sandbox that the inventory plugin listed."""
ADDRESS_VARIABLES = ("ansible_host", "ansible_sandbox_gateway_url")
"""The variables that identify a sandbox and its gateway."""
_MAX_ESCALATION_OUTPUT_BYTES = 1 << 20
"""Limit for the output before privilege escalation succeeds, because each check searches all output so far."""


class UnreachableError(AnsibleConnectionFailure):
    """The host is unreachable.

    The message is marked as unsafe, because it may quote output of the sandbox, which Ansible must not evaluate.
    """

    def __str__(self) -> str:
        text: str = wrap_var(super().__str__())
        return text


class Connection(ConnectionBase):
    transport: Any = "grove.sandbox.sandbox"
    has_pipelining = True
    has_tty = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._channel: Channel | None = None
        self._settings: dict[str, Any] | None = None
        self._initial_variables: dict[str, Any] = {}
        self._variables: dict[str, Any] = {}
        self._delegate = ""
        self._check_mode = False

    def set_options(self, task_keys: Any = None, var_options: Any = None, direct: Any = None) -> None:
        """Set all options except those that decide where the key is sent, which ``_compute_settings`` returns."""
        self._initial_variables = dict(var_options or {})
        unguarded_variables = {
            name: value for name, value in self._initial_variables.items() if name not in self._find_guarded_names()
        }
        super().set_options(task_keys=task_keys, var_options=unguarded_variables, direct=direct)
        self._delegate = (task_keys or {}).get("delegate_to") or ""
        self._check_mode = bool((task_keys or {}).get("check_mode"))

    def update_vars(self, variables: dict[str, Any]) -> None:
        """Store all variables. Ansible calls this method after ``set_options``, before each task and each loop item."""
        self.close()
        self._variables, self._settings = dict(variables), None
        super().update_vars(variables)

    @property
    def module_implementation_preferences(self) -> tuple[str, ...]:
        """The file extensions of modules.

        Ansible reads this before it searches for a Python interpreter. Some releases only print the errors of that
        search, so a task that must be skipped is skipped here.
        """
        if is_check_run():
            self._connect()
        return ("",)

    @property
    def transport_test(self) -> Any:
        """Skip a task that must be skipped. Otherwise, report that this plugin has no such method.

        `wait_for_connection` reads this attribute before it begins to retry after any error. Without the check at this
        point, a task that must be skipped would time out.
        """
        if is_check_run():
            with contextlib.suppress(UnreachableError):
                self._connect()
        raise AttributeError("transport_test")

    def _connect(self) -> Connection:
        """Create the channel, which connects on the first request.

        Raises UnreachableError or, in a check-mode run, PlannedMachineSkip if the task must be skipped.
        """
        if self._channel is None:
            try:
                self._channel = self._create_channel()
            except Failure as failure:
                raise UnreachableError(failure.message) from None
            self._connected = True
        return self

    def _create_channel(self) -> Channel:
        settings = self._compute_settings()
        sandbox = settings["sandbox"]
        gateway = find_gateway(sandbox, settings["gateway_url"])
        if gateway is None:
            gateway = Gateway(
                settings["gateway_url"],
                token_file=settings["gateway_token_file"] or "",
                ca_path=settings["ca_path"] or "",
                validate_certs=settings["validate_certs"],
            )
        gateway_options = {
            "timeout": self.get_option("gateway_timeout"),
            "url": gateway.url,
            "token": settings["gateway_token"] or gateway.read_key() or settings["default_token"] or "",
            "ca_path": str(Path(gateway.ca_path).expanduser()) if gateway.ca_path else "",
            "validate_certs": gateway.validate_certs,
        }
        if is_check_run():
            client = Client(**gateway_options)
            try:
                require_machine(client, sandbox, check_mode=self._check_mode)
            finally:
                client.close()
        # The sandbox can be paused after the check above, and during the task.
        may_resume = not (is_check_run() and self._check_mode)
        return Channel(sandbox, self.get_option("remote_user"), may_resume=may_resume, **gateway_options)

    def _find_guarded_names(self) -> list[str]:
        return [
            name for name in C.config.get_plugin_vars("connection", self._load_name) if name not in UNGUARDED_VARIABLES
        ]

    def _compute_settings(self) -> dict[str, Any]:
        """Return this plugin's options as the operator set them, independent of task results. Raises Failure."""
        if self._settings is None:
            self._settings = self._compute_options(self._compute_operator_values())
        return self._settings

    def _compute_options(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return this plugin's options, computed from the variables in ``values``."""
        options: dict[str, Any] = C.config.get_plugin_options("connection", self._load_name, variables=values)
        return options

    def _compute_operator_values(self) -> dict[str, Any]:
        """Return the values of the guarded variables as the operator set them.

        Raises Failure if another source sets a variable that decides where the key is sent.
        """
        variables = self._variables or self._initial_variables
        operator_variables: Any = {}
        host = str(self._delegate or variables.get("inventory_hostname", ""))
        if "hostvars" in variables:
            host = str(self._delegate or find_task_host())
            operator_variables = OperatorVariables(variables["hostvars"], host)
        if self._delegate:
            variables = variables.get("ansible_delegated_vars", {}).get(self._delegate, {})
        known_values = {
            "inventory_hostname": host,
            **{name: operator_variables.evaluate(name) for name in ADDRESS_VARIABLES if name in operator_variables},
        }
        address_options = self._compute_options(known_values)
        is_listed = find_gateway(address_options["sandbox"], address_options["gateway_url"]) is not None
        names = GUARDED_VARIABLES_OF_LISTED_HOSTS if is_listed else self._find_guarded_names()
        # With delegate_to, Ansible sets this variable by default.
        default_values = {"ansible_host": host}
        overridden_names = [
            name
            for name in names
            if name in variables and variables[name] != operator_variables.get(name, default_values.get(name))
        ]
        if overridden_names:
            raise Failure(
                f"{' and '.join(overridden_names)} of host {host} must not come from facts, other task results, or "
                "vars of a play, role or task, because this would decide where the gateway's key is sent: set it with "
                "add_host, in host_vars or group_vars, or with -e, and do not let tasks return a variable of that name"
            )
        return {
            **known_values,
            **{name: operator_variables.evaluate(name) for name in names if name in operator_variables},
        }

    def exec_command(self, cmd: str, in_data: bytes | None = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
        """Run a command. Returns (exit code, stdout, stderr); the code is 128 + n if signal n killed the command."""
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        display.vvv(make_printable(f"EXEC {cmd}"), host=self._sandbox)
        escalation = _Escalation(self.become, self._sandbox, self.get_option("gateway_timeout")) if sudoable else None
        try:
            is_waiting = bool(escalation and escalation.is_waiting)
            process = self._channel.start(
                ["/bin/sh", "-c", cmd],
                stdin=bool(in_data) or is_waiting,
                input_data=b"" if is_waiting else in_data or b"",
            )
            out, err = self._run_command(process, in_data, escalation)
        except Failure as failure:
            raise self._create_unreachable_error(failure) from None
        if escalation and process.exit_code:
            escalation.check_missing_password(err)
        return process.exit_code, out, err

    def _run_command(
        self, process: Process, in_data: bytes | None, escalation: _Escalation | None
    ) -> tuple[bytes, bytes]:
        output = {"stdout": bytearray(), "stderr": bytearray()}
        max_output_mb = self._compute_settings()["max_output_mb"]
        is_waiting = bool(escalation and escalation.is_waiting)
        has_started = False
        for kind, data in process.read_output():
            if not has_started:
                has_started = True
                if in_data and not is_waiting and not process.is_input_accepted:
                    process.feed(in_data)
            if kind:
                output[kind].extend(data)
                if len(output["stdout"]) + len(output["stderr"]) > max_output_mb << 20:
                    process.kill()
                    self.close()
                    raise AnsibleError(
                        f"the command in sandbox {self._sandbox} was killed, because it printed more than "
                        f"{max_output_mb} MiB. Redirect its output to a file, or increase ansible_sandbox_max_output_mb"
                    )
            if is_waiting:
                is_waiting = escalation.handle_output(process, output["stdout"], output["stderr"])
                if not is_waiting:
                    process.feed(in_data or b"")
        out, err = bytes(output["stdout"]), bytes(output["stderr"])
        return (escalation.strip_prompt(out), escalation.strip_prompt(err)) if escalation else (out, err)

    def put_file(self, in_path: str, out_path: str) -> None:
        super().put_file(in_path, out_path)
        display.vvv(make_printable(f"PUT {in_path} TO {out_path}"), host=self._sandbox)
        try:
            with Path(in_path).expanduser().open("rb") as file:
                self._channel.upload_file(file, os.fstat(file.fileno()).st_size, out_path)
        except FileNotFoundError:
            raise AnsibleFileNotFound(f"the file or module {in_path} does not exist") from None
        except OSError as error:
            raise AnsibleError(f"{in_path} cannot be read: {error.strerror or error}") from None
        except Failure as failure:
            if failure.kind == AGENT_FAILURE_KIND:
                raise AnsibleError(f"{out_path} cannot be written in sandbox {self._sandbox}: {failure}") from None
            raise self._create_unreachable_error(failure) from None

    def fetch_file(self, in_path: str, out_path: str) -> None:
        super().fetch_file(in_path, out_path)
        display.vvv(make_printable(f"FETCH {in_path} TO {out_path}"), host=self._sandbox)
        try:
            with Path(out_path).open("wb") as file:
                self._channel.download_file(in_path, file)
        except OSError as error:
            raise AnsibleError(f"{out_path} cannot be written: {error.strerror or error}") from None
        except Failure as failure:
            # A partial file could be mistaken for a complete one.
            Path(out_path).unlink()
            if failure.kind == AGENT_FAILURE_KIND:
                raise AnsibleError(f"{in_path} cannot be read in sandbox {self._sandbox}: {failure}") from None
            raise self._create_unreachable_error(failure) from None

    def reset(self) -> None:
        self.close()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._connected = False

    @property
    def _sandbox(self) -> str:
        return str(self._compute_settings()["sandbox"])

    def _create_unreachable_error(self, failure: Failure) -> UnreachableError:
        self.close()
        return UnreachableError(failure.message)


class _Escalation:
    """Handles privilege escalation and its password prompt.

    ``is_waiting``: whether to wait for a password prompt or a success message.
    """

    def __init__(self, become: Any, sandbox: str, timeout_seconds: float) -> None:
        self.become = become
        self.is_waiting = bool(become and become.success and become.expect_prompt())
        self._sandbox = sandbox
        self._deadline = time.monotonic() + timeout_seconds
        self._answered_output_sizes: tuple[int, int] | None = None

    def handle_output(self, process: Process, out: bytearray, err: bytearray) -> bool:
        """Check the output so far, and respond to a password prompt. Returns whether to wait for more output.

        Raises AnsibleError if the escalation fails.
        """
        if self.become.check_success(bytes(out)):
            return False
        search_offsets = self._answered_output_sizes or (0, 0)
        has_prompt = any(
            self.become.check_password_prompt(bytes(output[offset:]))
            for output, offset in zip((out, err), search_offsets)
        )
        if has_prompt and self._answered_output_sizes is None:
            self._answered_output_sizes = (len(out), len(err))
            process.write(self.become.get_option("become_pass").encode() + b"\n")
        elif has_prompt or self.become.check_incorrect_password(bytes(out + err)):
            self._fail(process, "the password was not accepted")
        elif time.monotonic() > self._deadline or len(out) + len(err) > _MAX_ESCALATION_OUTPUT_BYTES:
            self._fail(process, "neither success nor a password prompt was found in its output")
        return True

    def check_missing_password(self, err: bytes) -> None:
        """Raise AnsibleError if a command failed because a password is missing."""
        if self.become and self.become.check_missing_password(err):
            raise AnsibleError(
                f"{self.become.name} in sandbox {self._sandbox} requires a password: set "
                "ansible_become_password, or connect as the become user (remote_user), which needs no password"
            )

    def _fail(self, process: Process, reason: str) -> None:
        process.kill()
        raise AnsibleError(f"{self.become.name} failed in sandbox {self._sandbox}: {reason}")

    def strip_prompt(self, output: bytes) -> bytes:
        """Return the output that follows the password prompt and its line break.

        Call it after the command has exited, because the two streams can arrive in any order.
        """
        if self._answered_output_sizes is None:
            return output
        prompt = self.become.prompt
        if not isinstance(prompt, str) or prompt.encode() not in output:
            return output
        remaining_output = output.partition(prompt.encode())[2].lstrip(b" ")
        return remaining_output[1:] if remaining_output.startswith(b"\n") else remaining_output
