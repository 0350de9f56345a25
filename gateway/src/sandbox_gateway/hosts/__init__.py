"""Kinds of host: each folder knows one substrate, and nothing of the verbs made of it."""
