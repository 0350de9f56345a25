"""Commands and terminals: starting them, their input and output, and signals."""
