"""Training under a memory budget with other libraries: one module a library.

`ps_core.integrations.transformers`, `accelerate`, `lightning` and `ray`. Each imports its library when the module is
imported, and says how to install it where it is missing; importing this package imports none of them.
"""

__all__: list[str] = []
