"""The attention unit beside a memory channel."""
