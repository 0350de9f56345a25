"""Run tasks in a container booted by systemd-nspawn, by entering the namespaces of its first process."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.connection.local import Connection as Local

DOCUMENTATION = r"""
name: machine
short_description: Run tasks in a container of this machine
description:
  - Enters the mount, UTS, IPC and PID namespaces of a container, and shares its network.
author:
  - The grove.sandbox authors (@grove-sandbox)
options:
  pid_file:
    description:
      - A file with the process id of the container's first process, as seen from the host.
    type: path
    required: true
    vars:
      - name: ansible_machine_pid_file
  directory:
    description:
      - The directory from which the container was booted.
      - A process with another root directory is not entered, because it has reused the process id.
    type: path
    required: true
    vars:
      - name: ansible_machine_directory
"""


class Connection(Local):
    transport = "machine"
    has_pipelining = True

    @property
    def _init_pid(self):
        try:
            pid = Path(self.get_option("pid_file")).read_text().strip()
            if Path(f"/proc/{pid}/root").samefile(self.get_option("directory")):
                return pid
        except OSError:
            pass
        raise AnsibleConnectionFailure(
            f"the container in {self.get_option('directory')} is not running: boot it with molecule create"
        )

    def exec_command(self, cmd, in_data=None, sudoable=True):
        argv = ["nsenter", "--target", self._init_pid, "--mount", "--uts", "--ipc", "--pid", "--", "/bin/sh", "-c", cmd]
        return super().exec_command(shlex.join(argv), in_data=in_data, sudoable=sudoable)

    def put_file(self, in_path, out_path):
        shutil.copyfile(in_path, f"/proc/{self._init_pid}/root{out_path}")

    def fetch_file(self, in_path, out_path):
        shutil.copyfile(f"/proc/{self._init_pid}/root{in_path}", out_path)
