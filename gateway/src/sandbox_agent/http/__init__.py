"""HTTP and the Connect protocol of envd. This package does not depend on the sandbox."""
