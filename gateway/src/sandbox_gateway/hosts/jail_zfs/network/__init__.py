"""The network of jails: a bridge, an epair to each jail, and the packet filter."""
