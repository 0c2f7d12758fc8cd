"""What happens to partial results: merge over channels, finish, write-back."""
