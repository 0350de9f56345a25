"""Code that tests share, except for fixtures."""
