"""Operations of concurrent clients on a fleet, while faults are injected, and a model of the expected results.

``processes`` runs the processes of the gateways and of etcd, and ``network`` connects them. ``workload`` has the
clients, and ``model`` their knowledge of the fleet. ``injection`` injects the faults. ``invariants`` compares the
model with the fleet once it is quiet. ``runs`` runs all of them, in batches.
"""
