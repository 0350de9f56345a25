"""The gateway's operations. They add names, locks, undo, retention and lineage to the primitives capture and fork.

``engine`` composes the groups of operations; its constructor shows which group uses which.

* State: ``context``, ``index``, ``names``, ``events``, ``secret``; ``keyed_locks`` and ``locking``;
  ``record_changes`` and ``volume_records``.
* Groups: ``sandboxes``, ``forks``, ``snapshots``, ``templates``, ``volumes``, ``attachments``, ``commands``.
* The two primitives: ``machine_lifecycle`` starts a machine from a snapshot, ``captures`` takes a snapshot.
* Steps of forks and rollbacks: ``spec``, ``fork_plan``, ``mount_plan``, ``mount_paths``, ``replacement``.
* ``room``: refuses operations that would fill the host, and continues machines that stalled on a full disk.
* Removal: ``references`` finds the users of an object, ``collector`` removes unused objects; ``expiry``,
  ``retention``, ``timeouts``, ``backoff``. Start-up: ``recovery``. Measurements of sandboxes: ``loads``.
* Guests: ``agents``, ``agent_client``, ``guest_json``. Templates: ``template_builder``, ``builds``.
"""
