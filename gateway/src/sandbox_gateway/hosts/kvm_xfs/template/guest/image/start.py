#!/opt/sandbox/bin/python3 -ISB
"""Run the entry point of the image from which the template was built, with its environment, user and directory.

An argument is a JSON object whose members replace the image's `args`, `user` and `cwd`, and extend its `env`. A member
`cmd` replaces only the arguments of the image's entry point. `expand` is a list of members in whose strings `${NAME}`
stands for a variable of the image, and `$$` for a dollar sign.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import sys
from typing import Any

SETTINGS = "/opt/sandbox/start.json"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
REFERENCE = re.compile(r"\$(?:\$|\{([^}]*)\})")


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


def expand(value: Any, env: dict[str, str]) -> Any:
    """Replace the variables in a string, or in the values of a list or an object."""
    if isinstance(value, dict):
        return {name: expand(text, env) for name, text in value.items()}
    if isinstance(value, list):
        return [expand(text, env) for text in value]
    return REFERENCE.sub(lambda match: "$" if match[1] is None else env.get(match[1], ""), value)


def main() -> None:
    with open(SETTINGS) as file:
        settings = json.load(file)
    changes = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    for member in changes.pop("expand", ()):
        changes[member] = expand(changes[member], settings["env"])
    if "cmd" in changes:
        changes["args"] = [*settings["entry_point"], *changes["cmd"]]
    settings = {**settings, **changes, "env": {**settings["env"], **changes.get("env", {})}}
    if not settings["args"]:
        return  # Neither the image nor the argument has a program to start.
    settings["cwd"] = os.path.join("/", settings["cwd"])
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
