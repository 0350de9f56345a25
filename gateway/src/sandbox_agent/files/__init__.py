"""Read and write files, list directories, and watch directories for changes.

``contents`` transfers files, and ``filesystem`` manages directories; ``entries`` describes their entries. ``watch``
serves changes, which it detects with ``inotify`` or, where that is not available, with ``scan``.
"""
