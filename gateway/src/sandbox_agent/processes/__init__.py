"""Start commands and terminals, transfer their input and output, and send them signals."""
