"""Many hosts as one: who is a member, what is where, and where new sandboxes go.

Imports go from api to fleet to engine. Without `[fleet]` in the configuration, nothing of this package is imported.
Each module imports only modules above it in this list:

* ``store``: requests to etcd, with bounded waits.
* ``keys``, ``records``: the layout of the keys in etcd, and their values.
* ``secret``: the secret that all members share.
* ``view``: what this gateway knows of the fleet, kept up to date by a watch.
* ``membership``: the lease and the record of this gateway.
* ``directory``: the names and ids of this gateway's objects.
* ``peers``: connections to the other gateways.
* ``placement``: where new sandboxes go, and the room that is reserved for them.
* ``fleet``: composes them.
"""
