"""The sandbox gateway: an HTTP API that captures and forks sandboxes.

Packages, from top to bottom: ``server`` (the daemon), ``api`` (HTTP), ``fleet`` (several hosts as one), ``engine`` (the
operations), ``hosts`` (the kinds of host). ``cli`` is the client `sandboxctl`. The packages share these modules:

* ``config``, ``errors``, ``log``.
* ``records``: the metadata of objects. ``recipes``, ``image_references``: the sources of templates.
* ``command``: external commands. ``tasks``: background tasks, and work that cannot be cancelled.
* ``validation``, ``control_characters``: explain invalid data, and make untrusted text safe.
"""

__version__ = "0.1.0"
