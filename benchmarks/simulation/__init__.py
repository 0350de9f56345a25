"""A fleet of many hosts in one process, and the gateway that is measured beside it (bench ``fleet_scale``)."""
