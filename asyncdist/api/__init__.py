"""The functions of torch.distributed, natively awaitable, and those beyond; each acts on a group or the default one.

A function that communicates says in its docstring all that its caller must know.
"""
