"""Start a counter that exists only in memory, unless it is already running, and print its status.

The counter sends its status to each connection to its port, as JSON:
    value     the count, which grows by two per second
    mark      a random value, chosen at the start: equal marks belong to copies of one process
    history   a stamp for each of its first counts, computed from clock jitter: two copies have the same stamps up to
              the count at which they were forked, and different ones afterwards
    files     names of the notes on the disk
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
TICK_SECONDS = 0.5
MAX_HISTORY = 240


def main():
    try:
        print(read_status())
    except ConnectionRefusedError:
        start()
        print(read_status())


def read_status():
    with socket.create_connection(ADDRESS, timeout=10) as channel:
        return channel.makefile().read()


def start():
    """Start the counter in the background. It accepts connections when this function returns."""
    listener = socket.create_server(ADDRESS)
    if os.fork():
        return
    os.setsid()
    PID_FILE.write_text(str(os.getpid()))
    null_device = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null_device, stream)
    count(listener)


def count(listener):
    value, mark, history = 0, os.urandom(4).hex(), []
    next_tick = time.monotonic()
    while True:
        next_tick += TICK_SECONDS
        while (remaining := next_tick - time.monotonic()) > 0:
            listener.settimeout(remaining)
            try:
                with listener.accept()[0] as channel:
                    status = {"value": value, "mark": mark, "history": history}
                    channel.sendall(
                        json.dumps(status | {"files": list_names(NOTES), "shared": list_names(SHARED)}).encode()
                    )
            except OSError:
                continue
        value += 1
        if value <= MAX_HISTORY:
            history.append(make_timestamp())


def list_names(directory):
    return sorted(path.name for path in directory.glob("*"))


def make_timestamp():
    readings = [time.perf_counter_ns() for reading in range(64)]
    return f"{zlib.crc32(repr(readings).encode()):08x}"


if __name__ == "__main__":
    main()
