"""Operations of concurrent clients on a fleet, while faults are injected, and a model of what must hold afterwards.

``processes`` runs the gateways and etcd, each in a process of its own, and ``network`` connects them. ``workload`` has
the clients, and ``model`` what they know of the fleet. ``injection`` injects the faults. ``invariants`` compares the
model with the fleet once it is quiet. ``runs`` runs all of them, in batches.
"""
