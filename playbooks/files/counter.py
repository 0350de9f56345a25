"""A counter that lives in memory alone.

`counter.py ensure` starts it where it does not run; `counter.py status` prints, as JSON,
    value     how far it has counted, two a second
    mark      drawn at random when it started: two that say the same are copies of one running process
    history   a stamp for each of its first counts, taken from how the clock trembled just then: two copies have the
              same stamps up to the count at which they were parted, and other ones ever after
    files     names of the notes beside it
    shared    names of the notes in the volume
"""

import json
import os
import socket
import sys
import time
import zlib
from pathlib import Path

ADDRESS = "\0counter"
PID_FILE = Path("/run/counter.pid")
NOTES = Path("/root/notes")
SHARED = Path("/srv/shared")
TICK = 0.5
REMEMBERED = 240


def main():
    if sys.argv[1:] == ["ensure"] and ask() is None:
        start()
    answer = ask()
    if answer is None:
        sys.exit("the counter does not run")
    for kind, place in (("files", NOTES), ("shared", SHARED)):
        answer[kind] = sorted(path.name for path in place.glob("*"))
    print(json.dumps(answer))


def ask():
    """The counter's answer; None where none runs."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.settimeout(10)
        try:
            channel.connect(ADDRESS)
        except ConnectionRefusedError:
            return None
        return json.loads(channel.makefile().read())


def start():
    """Return when a counter in the background can be asked."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(ADDRESS)
    listener.listen()
    if os.fork():
        return
    os.setsid()
    PID_FILE.write_text(str(os.getpid()))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    count(listener)


def count(listener):
    value, mark, history = 0, os.urandom(4).hex(), []
    due = time.monotonic()
    while True:
        due += TICK
        while (left := due - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                with listener.accept()[0] as channel:
                    channel.sendall(json.dumps({"value": value, "mark": mark, "history": history}).encode())
            except OSError:
                continue
        value += 1
        if value <= REMEMBERED:
            history.append(stamp())


def stamp():
    readings = [time.perf_counter_ns() for reading in range(64)]
    return f"{zlib.crc32(repr(readings).encode()):08x}"


if __name__ == "__main__":
    main()
