"""Manage the memory, streams and events of one device, and the disk tier's file."""
