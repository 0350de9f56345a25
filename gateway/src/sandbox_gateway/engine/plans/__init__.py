"""Plan sessions, which determine what a playbook run would do, without doing it. `api.app` creates them.

A session is an engine of its own. Its index begins as a copy of the gateway's (``sessions``), and its host keeps
everything in memory (``host``), so the rules that a session applies are those of a real run. ``room`` computes how much
space the host would have left. ``agent`` stands in for the agents inside sandboxes.

``applied_runs`` manages the runs that apply a plan, which act on the host. ``open_runs`` keeps sessions and applied
runs in the order of their last use.
"""
