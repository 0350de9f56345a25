"""Send HTTP requests one after the other, each on a new connection: ``python -m benchmarks.call SOCKET TARGET COUNT``.

Prints a JSON list with the duration of each request in milliseconds, from connecting to the end of the response.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
import time


class _Connection(http.client.HTTPConnection):
    def __init__(self, socket_path: str) -> None:
        super().__init__("localhost")
        self._path = socket_path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def main() -> None:
    socket_path, target, count = sys.argv[1:]
    durations = []
    for _ in range(int(count)):
        start = time.perf_counter()
        connection = _Connection(socket_path)
        connection.request("GET", target)
        response = connection.getresponse()
        response.read()
        durations.append((time.perf_counter() - start) * 1000)
        connection.close()
        if response.status != http.client.OK:
            sys.exit(f"GET {target} returned HTTP status {response.status}")
        # Wait about as long as a task takes. Without a pause, the server's caches would be warmer than in a real play.
        time.sleep(0.02)
    json.dump(durations, sys.stdout)


if __name__ == "__main__":
    main()
