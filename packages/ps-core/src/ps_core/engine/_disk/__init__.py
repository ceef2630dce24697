"""The disk tier's file, and what moves its bytes."""
