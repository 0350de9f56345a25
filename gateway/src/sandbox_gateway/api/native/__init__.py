"""The native API (E2B, CubeSandbox and additions): one file of routes per resource; requests, shapes and view."""
