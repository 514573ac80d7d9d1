"""A DLRM on click logs: the program behind ``tbe train``.

``config`` holds the options, ``criteo`` and ``synthetic`` stream clicks, ``model`` is the network, ``loop``
trains and evaluates, ``checkpoint`` saves and resumes. Nothing is imported here: ``tbe --help`` stays fast.
"""
