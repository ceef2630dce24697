"""Training under a memory budget with other libraries: one module a library.

`ps_core.integrations.transformers`, `accelerate` and `lightning`. Each imports its library when the module is imported,
and says how to install it where it is missing; importing this package imports none of them. Ray Train needs no module:
`ps_dist.connect()` joins its workers.
"""

__all__: list[str] = []
