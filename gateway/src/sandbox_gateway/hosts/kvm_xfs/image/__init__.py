"""Files on disk: their layout, reflinks, and the files of machines and snapshots.

``layout`` has all paths below the state root, ``instances`` creates the files of a machine, ``snapshots`` commits and
finds snapshots and templates, ``reflink`` shares blocks between files.
"""
