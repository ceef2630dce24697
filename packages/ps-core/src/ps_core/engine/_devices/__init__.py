"""Memory, streams and events of one device; the disk's file; the bytes of tensors that are not model data."""
