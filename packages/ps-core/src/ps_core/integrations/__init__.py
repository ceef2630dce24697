"""Train under a memory budget with other libraries: one module a library.

There are `ps_core.integrations.transformers`, `accelerate` and `lightning`. Each imports its library when the module is
imported, and says how to install it if it is missing. Importing this package imports none of them. Ray Train needs no
module: `ps_dist.connect()` joins its workers.
"""

__all__: list[str] = []
