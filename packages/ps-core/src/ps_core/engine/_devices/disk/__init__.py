"""The disk tier's file, and the threads that read and write it."""
