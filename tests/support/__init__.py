"""What tests share that is not a fixture."""
