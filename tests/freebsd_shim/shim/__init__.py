"""FreeBSD's commands on Linux namespaces; see ../README.md."""
