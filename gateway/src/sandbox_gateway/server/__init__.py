"""The daemon `sandbox-gateway`, with its commands, startup, shutdown and listeners.

``daemon`` defines the commands, and ``serving`` starts and stops the gateway. They use ``connections`` (limits on TCP
connections), ``heap`` (returns memory to the system), ``service_manager`` (notifies systemd), and ``config_docs``
(generates docs/configuration.md).
"""
