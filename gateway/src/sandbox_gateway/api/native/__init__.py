"""The native API, which contains the calls of E2B and CubeSandbox, with additions.

Each resource has one module with its routes. requests, shapes and view contain the models that the routes share.
"""
