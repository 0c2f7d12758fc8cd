"""Command windows, descriptor fetch, page-table walk and completion."""
