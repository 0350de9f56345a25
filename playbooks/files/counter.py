"""A counter that lives in memory alone.

`counter.py ensure` starts it where it does not run; `counter.py status` prints, as JSON,
    value   how far it has counted, two a second
    mark    drawn at random when it started: two that say the same are copies of one running process
    woke    [[host name, value], …]: where it began, and each time it found itself in another machine or another time
    files   names of the notes beside it
"""

import json
import os
import socket
import sys
import time

ADDRESS = "\0counter"
NOTES = "/root/notes"
TICK = 0.5
JUMP = 0.3


def main():
    if sys.argv[1:] == ["ensure"] and ask() is None:
        start()
    answer = ask()
    if answer is None:
        sys.exit("the counter does not run")
    answer["files"] = sorted(os.listdir(NOTES)) if os.path.isdir(NOTES) else []
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
    with open("/run/counter.pid", "w") as file:
        file.write(str(os.getpid()))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    count(listener)


def count(listener):
    value, mark = 0, os.urandom(4).hex()
    place, offset = where()
    woke = [[place, value]]
    listener.settimeout(0)
    due = time.monotonic()
    while True:
        due += TICK
        while (left := due - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                with listener.accept()[0] as channel:
                    channel.sendall(json.dumps({"value": value, "mark": mark, "woke": woke}).encode())
            except (TimeoutError, BlockingIOError):
                break
            except OSError:
                continue
        value += 1
        before = place, offset
        place, offset = where()
        if place == before[0] and abs(offset - before[1]) < JUMP:
            continue
        if value - woke[-1][1] < 1 / TICK and len(woke) > 1:
            woke[-1][0] = place
        else:
            woke.append([place, value])


def where():
    """(host name, clock less the time since boot): the second jumps when a machine goes on from an earlier instant."""
    return os.uname().nodename, time.time() - time.monotonic()


if __name__ == "__main__":
    main()
