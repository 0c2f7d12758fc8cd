"""The command path: rings and registers, descriptor checks, the page-table walk, completion records."""
