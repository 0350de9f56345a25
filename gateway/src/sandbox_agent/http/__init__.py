"""HTTP and envd's Connect protocol: connections, requests, replies. Independent of the sandbox."""
