"""The gateway's operations, which add names, locks, undo, retention and lineage to capture and fork.

``engine`` creates the groups of operations. Its constructor has the same sections as this overview, and shows which
groups each group uses.

* Shared state: ``context``; ``index``, ``creation_order`` and ``id_groups``, ``names``, ``events``, ``secret``;
  ``durations`` measures operations; ``record_changes`` saves changed records, and ``volume_records`` adds new volumes
  and their snapshots; ``spec`` describes requests; ``timeouts`` and ``mount_paths`` check values;
  ``own_changes`` counts the changes of a run. In a fleet, ``name_claims`` reserves names beyond this host, and
  ``commit_gate`` delays commits.
* Prerequisites of the primitives:
    * locks: ``locking``, ``keyed_locks``.
    * users of objects: ``references`` finds them, ``in_use`` creates the errors that name them.
    * removal: ``removal`` removes snapshots and volumes; ``collector`` finds unused ones, and the snapshots that a rule
      no longer keeps (``retention``); ``backoff`` delays retries. ``sandboxes`` removes committed sandboxes, and
      ``template_builder`` the bases of templates; ``recovery`` removes the bases of interrupted builds, and
      pause snapshots whose sandboxes are gone.
    * agents: ``agents``, ``agent_client``, ``guest_json``.
    * ``room``: refuses operations that would fill the host, and resumes machines that stalled on a full disk.
    * ``prewarm``: starts forks before they are requested. It is the only module other than
      ``machine_lifecycle`` that starts machines.
* The two primitives: ``machine_lifecycle`` forks a machine from a snapshot, and ``captures`` takes a snapshot.
  ``machine_lifecycle`` also boots and stops machines. ``start_slots`` orders the starts, ``boot_failure`` explains a
  failed one.
* Operations that do not need the primitives: ``volumes``, ``attachments``; ``commands`` inside running sandboxes;
  exports to files and imports from them, in the package ``transfer``; ``build_files`` stores the files that steps of
  a template copy, and ``archive_digest`` checks them.
* Operations that are built on the primitives: ``snapshots`` and ``lineage``, ``forks``, ``sandboxes``, ``templates``.
  Their steps: ``fork_plan``, ``mount_plan``, ``replacement``, ``template_builder``, ``builds``,
  ``image_steps``; ``dockerfiles`` and ``build_context_patterns`` translate Dockerfiles to such steps.
* ``moves``: sandboxes that leave for another host of the fleet, and those that arrive; ``first_passes`` sends most of
  their data before they are paused.
* Snapshots and templates in registries: `transfer.artifacts`, which uses `transfer.transfers` and ``templates``.
* Work that no request triggers: ``loads`` measures sandboxes; ``recovery`` runs at start-up; ``expiry``. Groups above
  also have such work, which `Engine.open` starts: ``prewarm``, ``room``, and the removal of files that
  ``build_files`` and `transfer.artifacts` no longer need.

The package ``plans`` contains plan sessions for check mode, which `api.app` creates. Each session is a second engine
over a host without machines.
"""
