"""Template building: a root file system with the agent and the guest's settings, as a disk image."""
