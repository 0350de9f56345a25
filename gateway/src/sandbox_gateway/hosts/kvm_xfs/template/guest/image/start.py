#!/opt/sandbox/bin/python3 -ISB
"""Run the entry point of the image from which the template was built, with its environment, user and directory.

An argument is a JSON object whose members replace the image's `args`, `user` and `cwd`, and extend its `env`.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import sys

SETTINGS = "/opt/sandbox/start.json"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def find_user(text: str) -> tuple[int, int, list[int], str]:
    """Return the uid, gid, supplementary groups and home directory of USER, UID, USER:GROUP or UID:GID."""
    user, _, group = (text or "root").partition(":")
    try:
        entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
        uid, gid, home = entry.pw_uid, entry.pw_gid, entry.pw_dir
        groups = os.getgrouplist(entry.pw_name, gid)
    except KeyError:
        if not user.isdigit():
            sys.exit(f"the user {user!r} of the image does not exist in its /etc/passwd")
        uid, gid, home, groups = int(user), 0, "/", []
    if group:
        try:
            gid = int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
        except KeyError:
            sys.exit(f"the group {group!r} of the image does not exist in its /etc/group")
        groups = [gid]
    return uid, gid, groups, home


def main() -> None:
    with open(SETTINGS) as file:
        settings = json.load(file)
    changes = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    settings = {**settings, **changes, "env": {**settings["env"], **changes.get("env", {})}}
    uid, gid, groups, home = find_user(settings["user"])
    env = {"PATH": DEFAULT_PATH, "HOME": home, **settings["env"]}
    os.makedirs(settings["cwd"], exist_ok=True)
    os.setgroups(groups)
    os.setgid(gid)
    os.setuid(uid)
    os.chdir(settings["cwd"])
    try:
        os.execvpe(settings["args"][0], settings["args"], env)
    except OSError as error:
        sys.exit(f"the entry point {settings['args'][0]!r} of the image cannot be run: {error.strerror}")


main()
