"""Run a counter that exists only in memory.

The program starts the counter if it is not running. The counter answers each connection to its port with JSON:
    value     the count, which grows by two per second
    mark      a random value, chosen at the start: equal marks belong to copies of one process
    history   a stamp for each of its first counts, computed from clock jitter: two copies have the same stamps up to
              the count at which they were forked, and different ones afterwards
    files     names of the notes beside it
    shared    names of the notes in the volume
"""

import json
import os
import socket
import time
import zlib
from pathlib import Path

ADDRESS = ("127.0.0.1", 7777)
PID_FILE = Path("/run/counter.pid")
NOTES = Path("/root/notes")
SHARED = Path("/srv/shared")
TICK = 0.5
REMEMBERED = 240


def main():
    try:
        print(ask())
    except ConnectionRefusedError:
        start()
        print(ask())


def ask():
    with socket.create_connection(ADDRESS, timeout=10) as channel:
        return channel.makefile().read()


def start():
    """Start the counter in the background. When this function returns, the counter accepts connections."""
    listener = socket.create_server(ADDRESS)
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
                    answer = {"value": value, "mark": mark, "history": history}
                    channel.sendall(json.dumps(answer | {"files": names(NOTES), "shared": names(SHARED)}).encode())
            except OSError:
                continue
        value += 1
        if value <= REMEMBERED:
            history.append(stamp())


def names(place):
    return sorted(path.name for path in place.glob("*"))


def stamp():
    readings = [time.perf_counter_ns() for reading in range(64)]
    return f"{zlib.crc32(repr(readings).encode()):08x}"


if __name__ == "__main__":
    main()
