"""``python -m benchmarks.call SOCKET TARGET COUNT``: make HTTP calls one after the other, each on its own connection.

Prints a JSON list with the milliseconds of each call, from before it connects until the answer is read.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
import time


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def main() -> None:
    path, target, count = sys.argv[1:]
    taken = []
    for _ in range(int(count)):
        start = time.perf_counter()
        connection = _Connection(path)
        connection.request("GET", target)
        answer = connection.getresponse()
        answer.read()
        taken.append((time.perf_counter() - start) * 1000)
        connection.close()
        if answer.status != http.client.OK:
            sys.exit(f"GET {target} returned HTTP status {answer.status}")
        # Wait about as long as a task works: without a pause the server would be warmer than in a real play.
        time.sleep(0.02)
    json.dump(taken, sys.stdout)


if __name__ == "__main__":
    main()
