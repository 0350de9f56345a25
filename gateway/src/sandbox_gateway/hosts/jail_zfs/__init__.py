"""The host kind `jail_zfs`: FreeBSD jails on ZFS clones."""
