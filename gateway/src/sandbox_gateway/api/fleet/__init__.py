"""The API of a fleet: its hosts, and requests that other gateways carry out. Imported only with `[fleet]`.

``route_targets`` lists where the requests of each route are carried out. ``middleware`` follows it:

* on the host of an object: ``locator`` finds the host, and ``forwarding`` sends the request there.
* on all hosts: ``merging`` merges their lists and events.
* on chosen hosts: ``placing`` lets them create the sandboxes of a request; ``spreading`` creates either all of them or
  none.
* in this gateway: ``local`` keeps the response.

``runs`` carries out the requests of plan sessions and of runs that apply a plan, which have parts on several hosts;
``parts`` contains the messages about these parts.

``moves`` has the route that moves a sandbox to another host, ``move_requests`` the requests between the two gateways,
and ``move_recovery`` completes moves that were interrupted.

``data_plane`` forwards requests to ports inside sandboxes. ``hosts`` has the routes of the fleet's hosts, and
``copies`` the one that copies a snapshot to another host.
"""
