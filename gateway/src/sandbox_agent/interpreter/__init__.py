"""The code interpreter, with contexts, their kernels, and the results of cells. It is imported on the first request.

``service`` has the routes, and ``answers`` their responses. A context (``contexts``) runs its cells in a process
(``kernel_process``), whose program depends on its language (``languages``); for Python, it is ``kernel``.
``kernel_protocol`` defines the frames between the two, and ``idle`` discards output between cells.
"""
